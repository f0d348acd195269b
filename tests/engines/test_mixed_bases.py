"""Federations of unequal base models in the engine: what each party runs on, what is sent once, resume, failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from coterie.algorithms import FedIT, FedSLM, LocalOnly
from coterie.compress import SVD, cut, rank_layers
from coterie.engines.checkpoints import CheckpointStore
from coterie.engines.in_process import InProcess, Played, Progress
from coterie.engines.setting import Fault, Measuring, OwnTests, Setting, Site
from coterie.engines.sites import Store, Volatile
from coterie.errors import ConfigError
from coterie.maths.keys import root_key
from coterie.models.loading import Base, from_network
from coterie.models.targets import linears
from coterie.training.asks import Plan
from coterie.training.executor import Executor
from coterie.wire.codec import decode, encode
from coterie.wire.ledger import Ledger
from engines.world import FAST, TARGETS, play, sites, text

RATIOS = {"base": None, "ratio-0.5": 0.5, "ratio-0.8": 0.8}
SPECS = ("ratio-0.5", "ratio-0.5", "ratio-0.8", "base", "base")


def compressed(ratio: float | None) -> Base:
    """The toy encoder, whole or with the adapted layers cut from its singular value decomposition."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        sizes = {"vocab_size": 60, "max_position_embeddings": 32, "num_labels": 2, "initializer_range": 0.2}
        network = BertForSequenceClassification(BertConfig(**shape, **sizes)).eval().requires_grad_(False)
    if ratio is not None:
        names = [name for name in linears(network) if name.endswith(tuple(TARGETS))]
        windows = torch.arange(5, 53).reshape(4, 12)
        cut(network, rank_layers(network, names, SVD(), windows, 0.8), SVD(), ratio)
    return from_network(network, None, TARGETS, root_key(0).fold("head"), attention="eager")


def federation(
    algorithm: FedSLM | LocalOnly | FedIT,
    *,
    store: Store | None = None,
    rounds: int = 2,
    specs: tuple[str, ...] = SPECS,
    own_tests: dict[str, OwnTests] | None = None,
    **fields: object,
) -> InProcess:
    bases = {spec: compressed(ratio) for spec, ratio in RATIOS.items()}
    chosen = {
        name: Site(replace(site.card, spec=spec, layers=bases[spec].layers), site.data)
        for (name, site), spec in zip(sites([2] * len(specs), bases["base"].layers).items(), specs, strict=True)
    }
    unlabelled = replace(text(12, seed=77), stored_labels=torch.full((12,), -1))
    setting = Setting(
        algorithm=algorithm,
        sites=chosen,
        rounds=rounds,
        seed=3,
        heads={spec: base.head for spec, base in bases.items()},
        pooled_test=text(40, seed=999),
        server_data={"unlabeled": unlabelled},
        server_base="base",
        own_tests=own_tests or {},
        set_up={"ratio-0.5": 1000, "ratio-0.8": 2000},
        measuring=Measuring(objective_examples=8),
        **fields,  # type: ignore[arg-type]
    )
    return InProcess(setting, Executor(bases, FAST, Plan()), store or Volatile(), Ledger())


SLM = FedSLM(epochs=1, student_rank=4, beside=(("confidence", 0.5),))


def test_each_group_trains_on_its_own_model_and_the_server_deploys_a_student_of_the_whole_one() -> None:
    run = federation(SLM)
    *_, before, last = play(run)
    assert before.progress.state.students == {} and "global" in before.metrics and before.metrics["global"] is None
    assert set(before.metrics["train"]["bases"]) == set(RATIOS)
    losses, cards = before.metrics["train"]["losses"], {card.id: card for card in run.federation.cards}
    small = {name: cards[name].examples for name in ("c0", "c1")}
    mean = sum(losses[name] * weight for name, weight in small.items()) / sum(small.values())
    assert before.metrics["train"]["bases"]["ratio-0.5"] == pytest.approx(mean)
    state = last.progress.state
    assert {
        spec: core["bert.encoder.layer.0.attention.self.query"].shape[0] for spec, core in state.groups.cores.items()
    } == {
        spec: run.executor.bases[spec].layers["bert.encoder.layer.0.attention.self.query"].inner
        for spec in ("ratio-0.5", "ratio-0.8")
    }
    assert last.metrics["train"]["steps"] == {"unlabeled": 6}
    of_students = last.metrics["measures"]["students"]
    assert list(of_students) == ["entropy-0.5", "confidence-0.5"] and len(set(of_students.values())) == 2
    assert last.metrics["train"]["losses"] == {"unlabeled": pytest.approx(sum(of_students.values()) / 2)}
    assert set(last.metrics["global"]["further"]) == {"weak", "confidence-0.5"}
    assert all(figures["pooled"]["examples"] == 40 for figures in last.metrics["global"]["further"].values())


def test_students_of_all_weights_move_every_layer_at_a_rank_that_factors_do_not_have() -> None:
    last = play(federation(replace(SLM, student="full"), rounds=1))[-1]
    students = last.progress.state.students
    for model in students.values():
        assert model["delta"].keys() == last.progress.state.layers.keys()
        assert all(torch.linalg.matrix_rank(term.W) > SLM.student_rank for term in model["delta"].values())
    assert students.keys() == last.metrics["measures"]["students"].keys()
    assert last.metrics["global"]["pooled"]["examples"] == 40


def test_figures_of_a_base_model_are_those_of_the_clients_with_it() -> None:
    last = play(federation(SLM))[-1].metrics["personal"]
    for spec, names in {"ratio-0.5": ("c0", "c1"), "ratio-0.8": ("c2",), "base": ("c3", "c4")}.items():
        own = last["bases"][spec]
        assert own["clients"]["accuracy"] == {name: last["clients"]["accuracy"][name] for name in names}
        assert own["pooled"]["examples"] == 40
    weights = {"ratio-0.5": 2, "ratio-0.8": 1, "base": 2}
    mean = sum(count * last["bases"][spec]["pooled"]["loss"] for spec, count in weights.items()) / 5
    assert last["pooled"]["loss"] == pytest.approx(mean)
    assert "bases" not in play(federation(FedIT(), specs=("base",) * 5))[-1].metrics["personal"]


def test_a_compressed_model_is_booked_once_for_each_client_that_gets_one() -> None:
    run = federation(SLM)
    play(run)
    booked = {}
    for row in run.ledger.rows():
        if row["kind"] == "setup":
            booked.setdefault((row["client"], row["round"]), []).append(row["payload"])
    assert booked == {("c0", 1): [1000], ("c1", 1): [1000], ("c2", 1): [2000]}


def test_the_head_is_one_for_all_models_cut_from_one() -> None:
    heads = play(federation(SLM, rounds=1))[0].progress.heads
    assert set(heads) == {"base/all"}
    apart = play(federation(LocalOnly(), rounds=1))[0].progress.heads
    assert set(apart) == {f"{spec}/all" for spec in RATIOS}


def test_heads_of_a_federation_that_teaches_are_averaged_lest_the_teacher_have_an_untrained_one() -> None:
    run = federation(SLM, rounds=1, head="local")
    first = play(run)[0].progress.heads["base/all"]
    initial = run.setting.initial_head("base")
    assert initial is not None
    assert all(not torch.equal(first[name], initial[name]) for name in initial)


def states(played: list[Played]) -> list[bytes]:
    return [encode(one.progress, dense=True) for one in played]


def test_strict_mode_gives_the_same_bits() -> None:
    plain, strict = (play(federation(SLM, strict=one)) for one in (False, True))
    assert states(plain) == states(strict)
    assert [one.metrics for one in plain] == [one.metrics for one in strict]


@pytest.mark.parametrize("after", [1, 2])
def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(after: int, tmp_path: Path) -> None:
    whole = play(federation(SLM))
    store = CheckpointStore(tmp_path)
    first = federation(SLM, store=store)
    progress = first.begin()
    for _ in range(after):
        progress = first.play(progress).progress
    store.put("progress", encode(progress, dense=True))
    store.commit(after, {})
    again = CheckpointStore(tmp_path)
    again.open()
    kept = decode(again.get("progress"))
    assert isinstance(kept, Progress)
    rest = list(federation(SLM, store=again).rounds(kept))
    assert states(rest) == states(whole[after:])
    assert [one.metrics for one in rest] == [one.metrics for one in whole[after:]]


def test_a_group_all_of_whose_clients_fail_stays_as_it_was_and_the_others_go_on() -> None:
    faults = tuple(Fault("c2", number, kind) for number, kind in ((1, "exception"), (2, "nan")))
    played = play(federation(SLM, faults=faults))
    state = played[-1].progress.state
    cores = state.groups.cores["ratio-0.8"].values()
    assert all(torch.equal(core, torch.eye(len(core))) for core in cores)
    assert "ratio-0.8" not in state.groups.shares() and sum(state.groups.shares().values()) == pytest.approx(1)
    assert all(not torch.equal(core, torch.eye(len(core))) for core in state.groups.cores["ratio-0.5"].values())
    assert played[0].metrics["train"]["bases"]["ratio-0.8"] is None


@pytest.mark.parametrize("kind", ["shape", "nan", "exception", "late"])
def test_a_failing_client_is_survived(kind: str) -> None:
    played = play(federation(SLM, faults=(Fault("c0", 1, kind),)))  # type: ignore[arg-type]
    assert [len(one.metrics["answered"]) for one in played] == [4, 5, 0]
    assert played[-1].metrics["global"]["pooled"]["examples"] == 40


def test_clients_that_only_train_alone_may_have_any_base_model_and_tests_of_their_own_tokens() -> None:
    short = OwnTests(text(8, seed=5), {"more": text(6, seed=6)})
    last = play(federation(LocalOnly(), own_tests={"ratio-0.8": short}))[-1].metrics["personal"]
    assert last["bases"]["ratio-0.8"]["pooled"]["examples"] == 8
    assert last["bases"]["ratio-0.8"]["more"]["more"]["examples"] == 6
    assert last["bases"]["base"]["pooled"]["examples"] == 40 and "more" not in last["bases"]["base"]


def test_a_method_of_one_base_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"FedIT trains one base model, but c0 has 'ratio-0\.5' and c2 has"):
        federation(FedIT())
