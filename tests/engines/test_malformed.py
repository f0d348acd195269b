"""A malformed client is that client's failure: it is named, left out, and nothing of it stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conformance.harness import best, cards, dense, gap, ideal, play, random_training

from coterie.algorithms import FedIT, FedPALoRA, FlexLoRA, FLoRA, LocalOnly
from coterie.engines.in_process import InProcess
from coterie.engines.setting import Fault, Setting, Site
from coterie.engines.sites import Volatile, load_record
from coterie.errors import ConfigError, ModelError, RunError
from coterie.protocol import Client, Fit, Layer, LowRank, Model, Once, Upload
from coterie.training.asks import Plan
from coterie.training.executor import Executor
from coterie.wire.codec import encode
from coterie.wire.ledger import Ledger
from engines.throwaway import TwoStage
from engines.world import base, sites, text, with_sites, world
from engines.world import play as play_run

Odd = Callable[[Client, Any], Any]


def with_odd_client(base_class: type, odd: Odd) -> Any:
    """The method, whose client c1 does something odd."""

    class Odd(base_class):  # type: ignore[misc]
        def local(self, client: Client, download: Any) -> Any:
            return odd(client, download) if client.card.id == "c1" else super().local(client, download)

    return Odd()


def fitted_upload(change: Callable[[dict[str, LowRank]], Any]) -> Odd:
    def local(client: Client, download: Any) -> Any:
        fitted = yield Fit(Model(lora=getattr(download, "reference", download)))
        return Upload(change(fitted.model["lora"]))

    return local


def yields(request: Callable[[Any], Any]) -> Odd:
    def local(client: Client, download: Any) -> Any:
        yield request(download)
        return Upload(None)

    return local


def keeps_a_set(client: Client, download: Any) -> Any:
    fitted = yield Fit(Model(lora=download))
    client.memory["seen"] = {1, 2}
    return Upload(fitted.model["lora"])


def raises_after_the_fit(client: Client, download: Any) -> Any:
    fitted = yield Fit(Model(lora=download))
    client.memory["half"] = fitted.model["lora"]
    raise OSError("the disk of this site is full")


ODD: dict[str, tuple[Odd, str]] = {
    "a request of a dict": (yields(lambda download: Fit(download)), "attribute"),
    "a penalty that is none": (yields(lambda d: Fit(Model(lora=d), penalties=[None])), "signature"),  # type: ignore[list-item]
    "a penalty outside a list": (yields(lambda d: Fit(Model(lora=d), penalties=3)), "iterable"),  # type: ignore[arg-type]
    "no request at all": (yields(lambda d: "train"), "may yield requests"),
    "a memory that cannot be stored": (keeps_a_set, "set"),
    "an error after the fit": (raises_after_the_fit, "OSError: the disk of this site is full"),
    "nothing uploaded": (fitted_upload(lambda lora: None), "expected, not NoneType"),
    "a layer missing": (fitted_upload(lambda lora: dict(list(lora.items())[1:])), "one term for each of"),
    "a foreign entry": (fitted_upload(lambda lora: lora | {"loss": float("nan")}), "loss is nan"),
    "another scale": (
        fitted_upload(lambda lora: {n: replace(t, scale=7.0) for n, t in lora.items()}),
        "scale 7.0 where the client's is 2",
    ),
    "a scale that is no number": (
        fitted_upload(lambda lora: {n: replace(t, scale=float("nan")) for n, t in lora.items()}),
        "scale is nan",
    ),
    "half precision": (
        fitted_upload(lambda lora: {n: replace(t, B=t.B.half(), A=t.A.half()) for n, t in lora.items()}),
        "float16",
    ),
}


@pytest.mark.parametrize("made", [FedIT, FlexLoRA])
@pytest.mark.parametrize("odd", ODD)
def test_a_malformed_client_is_left_out_and_the_rest_goes_on_as_without_it(made: type, odd: str) -> None:
    local, reason = ODD[odd]
    store = Volatile()
    played = play_run(world(with_odd_client(made, local), rounds=1, store=store))[0]
    assert played.metrics["answered"] == ["c0", "c2"]
    assert reason in played.metrics["failed"]["c1"]
    assert encode(load_record(store, "c1")) == encode(load_record(Volatile(), "c1"))
    absent = play_run(world(made(), rounds=1, faults=(Fault("c1", 1, "exception"),)))[0]
    assert encode(played.progress.state) == encode(absent.progress.state)


def test_a_site_whose_set_up_failed_is_named_in_the_evaluation_and_ends_nothing() -> None:
    faults = (Fault("c1", 1, "exception"),)
    run = world(TwoStage(), faults=faults, server_data={"public/toy": text(16, seed=50)}, rounds=1)
    played = play_run(run)
    assert list(played[0].metrics["personal"]["failed"]) == ["c1"]
    assert set(played[0].metrics["personal"]["clients"]["accuracy"]) == {"c0", "c2"}
    assert "KeyError" in played[1].metrics["failed"]["c1"]


def test_a_client_that_writes_in_its_download_changes_nobody_else() -> None:
    """Also in a part that it holds from earlier rounds."""

    @dataclass(frozen=True)
    class Scribbler(LocalOnly):
        def send(self, state: Any, card: Any) -> Any:
            return {"key": Once(state.init_key), "table": Once(SHARED)}

        def local(self, client: Client, download: Any) -> Any:
            download["table"].add_(1.0)
            return super().local(client, download["key"])

        def site_model(self, client: Client, download: Any) -> Any:
            download["table"].add_(1.0)
            return super().site_model(client, download["key"])

    for strict in (False, True):
        SHARED.zero_()
        play_run(world(Scribbler(), strict=strict))
        assert float(SHARED.abs().max()) == 0.0


SHARED = torch.zeros(3)


def test_what_a_program_does_to_its_answers_moves_no_measurement() -> None:
    def spoil(client: Client, download: Any) -> Any:
        fitted = yield Fit(Model(lora=download))
        sent = {name: replace(term, B=term.B.clone()) for name, term in fitted.model["lora"].items()}
        for term in fitted.model["lora"].values():
            term.B.mul_(10)
        return Upload(sent)

    plain = play_run(world(FedIT(), rounds=2))
    spoilt = play_run(world(with_odd_client(FedIT, spoil), rounds=2))
    assert [p.metrics for p in plain] == [p.metrics for p in spoilt]


def test_a_round_that_breaks_off_leaves_ledger_and_store_as_they_were() -> None:
    faults = tuple(Fault(name, 2, "exception") for name in ("c0", "c1"))
    store, ledger = Volatile(), Ledger()
    run = world(FedPALoRA(), faults=faults, min_replies=2, store=store, ledger=ledger)
    first = run.play(run.begin())
    rows = ledger.rows()
    kept = {name: encode(load_record(store, name)) for name in run.cards}
    for _ in range(2):
        with pytest.raises(RunError, match="1 of 3 clients answered"):
            run.play(first.progress)
    assert ledger.rows() == rows
    assert {name: encode(load_record(store, name)) for name in run.cards} == kept


def test_playing_one_round_on_a_fresh_engine_brings_the_base_up_to_date_first() -> None:
    run = world(FLoRA())
    first, second, _ = run.rounds(run.begin())
    store = Volatile()
    run_to_first = world(FLoRA(), store=store)
    run_to_first.play(run_to_first.begin())
    again = world(FLoRA(), store=store).play(first.progress)
    assert again.metrics == second.metrics


def test_beginning_does_not_depend_on_what_the_base_was_used_for_before() -> None:
    network = base()
    options: dict[str, Any] = {"server_data": {"public/toy": text(16, seed=50)}}
    clean = world(TwoStage(), **options).begin()
    play_run(world(FLoRA(), network=network, rounds=1))
    assert encode(world(TwoStage(), network=network, **options).begin()) == encode(clean)


class Everywhere(FLoRA):
    traits = replace(FLoRA.traits, bases="any")


def test_all_bases_in_use_are_patched_and_have_heads_of_their_own() -> None:
    one, two = base(0), base(1)
    setting = world(Everywhere(), network=one).setting
    made = dict(setting.sites)
    made["c2"] = Site(replace(made["c2"].card, spec="other"), made["c2"].data)
    setting = replace(setting, sites=made, heads={"base": one.head, "other": two.head})
    train, plan = world(FLoRA()).executor.settings, Plan()
    run = InProcess(setting, Executor({"base": one, "other": two}, train, plan), Volatile(), Ledger())
    *_, last = run.rounds(run.begin())
    assert one.version == two.version == 3
    assert set(last.progress.heads) == {"base/all", "other/all"}
    assert not torch.equal(last.progress.heads["base/all"]["classifier.weight"], one.head["classifier.weight"])


def test_layers_that_only_some_clients_have_are_averaged_over_those() -> None:
    """And none is lost because the first client lacks it."""
    run = world(FlexLoRA(), ranks=(4, 4, 4), rounds=1)
    names = sorted(run.cards["c0"].layers)
    own = sites((4, 4, 4), base().layers)
    few = {name: own["c0"].card.layers[name] for name in names[:2]}
    own["c0"] = Site(replace(own["c0"].card, layers=few), own["c0"].data)
    played = play_run(with_sites(run, own))[0]
    assert played.metrics["answered"] == ["c0", "c1", "c2"]
    assert set(played.progress.state.lora) == set(names)
    assert all(float(term.product().norm()) > 0 for term in played.progress.state.lora.values())


def test_one_layer_name_with_two_shapes_is_refused_by_client() -> None:
    odd = [replace(card, layers={"w": Layer(4, 4 + i)}) for i, card in enumerate(cards({"a": 1, "b": 1}))]
    with pytest.raises(ModelError, match="layer w is 4 x 4 for one client and 4 x 5 for client b"):
        play(FedIT(), odd, random_training())


def test_no_client_may_be_called_server() -> None:
    setting: Setting = world(FedIT()).setting
    with pytest.raises(ConfigError, match="no client may be called 'server'"):
        replace(setting, sites={"server": setting.sites["c0"]})


def test_a_base_log_may_only_grow() -> None:
    class Rewriter(FLoRA):
        def aggregate(self, state: Any, uploads: Any, server: Any) -> Any:
            grown = super().aggregate(state, uploads, server)
            return replace(grown, base=replace(grown.base, patches=grown.base.patches[-1:]))

    with pytest.raises(RunError, match="log may only grow"):
        play_run(world(Rewriter()))


def test_an_aggregate_without_its_yield_is_named() -> None:
    class Forgetful(FedIT):
        def aggregate(self, state: Any, uploads: Any, server: Any) -> Any:
            return None

    with pytest.raises(RunError, match="aggregate must return the new state, not NoneType"):
        play_run(world(Forgetful()))


def test_two_fits_of_a_list_may_not_both_train_the_head() -> None:
    def twice(client: Client, download: Any) -> Any:
        yield [Fit(Model(lora=download)), Fit(Model(lora=download))]
        return Upload(None)

    played = play_run(world(with_odd_client(FedIT, twice), rounds=1))[0]
    assert "only one Fit of a list may train the head" in played.metrics["failed"]["c1"]


def test_a_head_that_nobody_trained_is_not_averaged_in() -> None:
    def idle_head(client: Client, download: Any) -> Any:
        fitted = yield Fit(Model(lora=download), head=False)
        return Upload(fitted.model["lora"])

    run = world(with_odd_client(FedIT, idle_head), rounds=1)
    play_run(run)
    sent = {row["client"] for row in run.ledger.rows() if row["kind"] == "head" and row["direction"] == "up"}
    assert sent == {"c0", "c2"}


def test_flexlora_is_exact_also_where_the_stacked_rank_is_large() -> None:
    ranks = {f"c{i:02d}": 16 for i in range(10)}
    members = cards(ranks, layers={"w": Layer(96, 80)})
    outcome = play(FlexLoRA(), members, random_training(), weights=dict.fromkeys(ranks, 1.0))
    made = {name: dense(term) for name, term in outcome.state.lora.items()}
    assert gap(made, best(ideal(outcome, dict.fromkeys(ranks, 1.0)), 16)) < 2e-6


def test_the_joint_objective_takes_the_new_reference_and_the_local_one_that_of_training() -> None:
    """FedPA-LoRA, Eq. 20 against Eq. 81; the server's step never raises it at equal ranks (Eq. 60)."""
    for played in play_run(world(FedPALoRA(lam=5.0), ranks=(4, 4, 4), weights="uniform")):
        found = played.metrics["objective"]
        assert found["task"] < found["joint"] <= found["local"] * (1 + 1e-6)
