"""Figures of a round worked out a second time: weights, averages, objectives and measures, on numbers made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.harness import best, cards, gap, ideal, play, random_training

from coterie.algorithms import FedIT, FedPALoRA, LocalOnly
from coterie.algorithms.factors import cut_for
from coterie.engines.in_process import InProcess
from coterie.engines.measures import initialisation_mismatch, spread
from coterie.engines.setting import Fault, Measuring, Site
from coterie.engines.sites import load_record
from coterie.errors import ModelError, RunError
from coterie.maths.keys import Key
from coterie.protocol import Card, Client, Evaluate, Fit, LowRank, Model, Score, Server, SiteRecord, Upload, Uploads
from coterie.training.asks import Ask, Done, Head, Plan
from coterie.training.evaluation import training_batches
from coterie.training.executor import Executor
from coterie.wire.codec import encode
from engines.throwaway import TwoStage
from engines.world import FAST, base, text, with_sites, world
from engines.world import play as play_run

Answers = list[tuple[Ask, Any]]

TELLING = replace(FAST, optimizer="adamw", lr=0.01, steps=10)
"""Training after which models differ in accuracy too, not in loss alone."""


def watched(run: InProcess, change: Callable[[Ask, Any], Any] = lambda ask, done: done) -> Answers:
    """What the run asks from now on with the answers that it gets, which `change` may replace."""
    answer, seen = run.executor.answer, []

    def answered(asks: Any) -> list[Any]:
        found = [change(ask, done) for ask, done in zip(asks, answer(asks), strict=True)]
        seen.extend(zip(asks, found, strict=True))
        return found

    run.executor.answer = answered  # type: ignore[method-assign]
    return seen


def fits(seen: Answers) -> dict[str, list[tuple[Ask, Any]]]:
    """The Fits among them, by party and in order."""
    found: dict[str, list[tuple[Ask, Any]]] = {}
    for ask, done in seen:
        if isinstance(ask.request, Fit):
            found.setdefault(ask.party, []).append((ask, done))
    return found


def filled(value: float) -> Head:
    return {name: torch.full_like(tensor, value) for name, tensor in base().head.items()}


def constant(head: Head) -> float:
    """The one value that all of a head's entries have."""
    (value,) = {float(entry) for tensor in head.values() for entry in tensor.flatten()}
    return value


def heads_of(values: dict[str, float]) -> Callable[[Ask, Any], Any]:
    """Every client's Fit ends at a head of one known value."""
    return lambda ask, done: (
        replace(done, head=filled(values[ask.party])) if isinstance(ask.request, Fit) and ask.party in values else done
    )


def three_to_one(algorithm: Any, **fields: Any) -> InProcess:
    """Two clients of 30 and 10 examples by their cards."""
    run = world(algorithm, ranks=(4, 4), **{"rounds": 1, **fields})
    chosen = {
        name: Site(replace(site.card, examples=examples), site.data)
        for (name, site), examples in zip(run.setting.sites.items(), (30, 10), strict=True)
    }
    return with_sites(run, chosen)


def large_shares(run: InProcess) -> InProcess:
    """With 120 test examples at each site: a few may be classified alike by two models."""
    made = {
        name: Site(site.card, {**site.data, "test": text(120, seed=60 + place)})
        for place, (name, site) in enumerate(run.setting.sites.items())
    }
    return with_sites(run, made)


def score(model: Model, head: Head, data: Any) -> Score:
    """The figures of this model and head, from an executor of one's own."""
    ask = Ask("direct", Evaluate(model, "test"), "base", head, data, Key(0))
    (done,) = Executor({"base": base()}, FAST, Plan()).answer([ask])
    assert isinstance(done, Done) and isinstance(done.answer, Score)
    return done.answer


def weighing(made: type) -> tuple[Any, list[dict[str, float]]]:
    """The method with Fits of 1 and 3 steps (4 and 12 examples); it notes the weights that its server is given."""

    class Weighing(made):  # type: ignore[misc]
        def local(self, client: Client, download: Any) -> Any:
            steps = {"c0": 1, "c1": 3}[client.card.id]
            fitted = yield Fit(Model(lora=getattr(download, "reference", download)), steps=steps)
            return Upload(fitted.model["lora"])

        def aggregate(self, state: Any, uploads: Uploads, server: Server) -> Any:
            weights.append({card.id: weight for card, _, weight in uploads.items()})
            return super().aggregate(state, uploads, server)

    weights: list[dict[str, float]] = []
    return Weighing(), weights


@pytest.mark.parametrize(
    ("made", "policy", "expected"),
    [
        (FedPALoRA, "paper", (0.5, 0.5)),
        (FedIT, "paper", (0.75, 0.25)),
        (FedIT, "uniform", (0.5, 0.5)),
        (FedPALoRA, "examples", (0.75, 0.25)),
        (FedIT, "processed", (0.25, 0.75)),
        (FedPALoRA, "processed", (0.25, 0.75)),
    ],
)
def test_clients_weigh_what_the_policy_says(made: type, policy: Any, expected: tuple[float, float]) -> None:
    method, weights = weighing(made)
    play_run(three_to_one(method, weights=policy))
    assert weights == [dict(zip(("c0", "c1"), expected, strict=True))]


def test_heads_are_averaged_with_the_clients_weights() -> None:
    run = three_to_one(FedIT())
    watched(run, heads_of({"c0": 1.0, "c1": 5.0}))
    (played,) = play_run(run)
    assert {name: constant(head) for name, head in played.progress.heads.items()} == {"base/all": 2.0}


def test_clients_of_a_group_share_the_average_of_their_own_heads() -> None:
    class Grouped(FedIT):
        def head_group(self, state: Any, card: Card) -> str:
            return "odd" if card.id == "c1" else "even"

    run = world(Grouped(), rounds=2, weights="uniform")
    seen = watched(run, heads_of({"c0": 1.0, "c1": 6.0, "c2": 2.0}))
    first, _ = play_run(run)
    assert {name: constant(head) for name, head in first.progress.heads.items()} == {
        "base/all": 3.0,
        "base/even": 1.5,
        "base/odd": 6.0,
    }
    entered = {party: constant(asked[1][0].head) for party, asked in fits(seen).items()}
    assert entered == {"c0": 1.5, "c1": 6.0, "c2": 1.5}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda tensor: tensor[..., :-1], "other tensors than the one sent"),
        (lambda tensor: torch.full_like(tensor, float("nan")), "values that are not finite"),
    ],
)
def test_a_head_that_is_not_sound_fails_its_client_alone(spoil: Any, reason: str) -> None:
    def change(ask: Ask, done: Any) -> Any:
        if not isinstance(ask.request, Fit):
            return done
        bad = {name: spoil(tensor) for name, tensor in filled(9.0).items()}
        return replace(done, head=bad if ask.party == "c1" else filled(1.0))

    run = world(FedIT(), rounds=1)
    watched(run, change)
    (played,) = play_run(run)
    assert played.metrics["answered"] == ["c0", "c2"]
    assert reason in played.metrics["failed"]["c1"]
    assert constant(played.progress.heads["base/all"]) == 1.0


def test_an_upload_that_the_method_refuses_fails_its_client_alone() -> None:
    class Choosy(FedIT):
        def check(self, payload: Any, card: Card) -> None:
            if card.id == "c1":
                raise ModelError(f"client {card.id}: not to my taste")

    (played,) = play_run(world(Choosy(), rounds=1))
    assert played.metrics["failed"] == {"c1": "client c1: not to my taste"}
    assert played.metrics["answered"] == ["c0", "c2"]


def test_late_clients_do_not_count_among_those_who_answered_in_time() -> None:
    late = tuple(Fault(name, 1, "late") for name in ("c0", "c1"))
    with pytest.raises(RunError, match=r"1 of 3 .* min_replies is 2 \(c0: answered too late; c1: answered too late\)"):
        play_run(world(FedIT(), rounds=1, faults=late, min_replies=2))
    assert play_run(world(FedIT(), rounds=1, faults=late, min_replies=1))[0].metrics["answered"] == ["c2"]


def test_a_head_that_the_server_trains_is_kept_at_the_start_in_every_round_and_at_the_end() -> None:
    class Finishing(TwoStage):
        def finish(self, state: Any, server: Server) -> Any:
            yield Fit(Model(shared=state.shared), train=("shared.*",), data="public/toy", steps=1)
            return state

    trained: list[float] = []

    def count(ask: Ask, done: Any) -> Any:
        if not isinstance(ask.request, Fit) or ask.party != "server":
            return done
        trained.append(len(trained) + 10.0)
        return replace(done, head=filled(trained[-1]))

    run = world(Finishing(), rounds=1, server_data={"public/toy": text(16, seed=50)})
    watched(run, count)
    progress, kept = run.begin(), []
    kept.append(constant(progress.heads["base/all"]))
    kept += [constant(played.progress.heads["base/all"]) for played in run.rounds(progress)]
    # start, survey (nobody trains), main, polish and finish (both in the last round)
    assert kept == [10.0, 10.0, 11.0, 13.0] and trained == [10.0, 11.0, 12.0, 13.0]


def test_the_finish_program_makes_the_last_state_which_is_the_one_evaluated() -> None:
    class Marking(FedIT):
        def finish(self, state: Any, server: Server) -> Any:
            assert server.phase == "finish"
            return replace(state, lora={name: replace(t, B=torch.ones_like(t.B)) for name, t in state.lora.items()})

    first, last = play_run(world(Marking(), rounds=2))
    marked = [all(bool((t.B == 1).all()) for t in p.progress.state.lora.values()) for p in (first, last)]
    assert marked == [False, True]
    found = score(Model(lora=last.progress.state.lora), last.progress.heads["base/all"], text(40, seed=999))
    assert last.metrics["global"]["pooled"]["loss"] == pytest.approx(found.loss, rel=1e-9)


def test_two_fits_of_one_program_draw_different_batches() -> None:
    """Whether they are asked one after the other or in one list."""

    class Thrice(FedIT):
        def local(self, client: Client, download: Any) -> Any:
            one = Fit(Model(lora=download), head=False)
            fitted = yield one
            yield [one, one]
            return Upload(fitted.model["lora"])

    run = world(Thrice(), ranks=(4, 4), rounds=1)
    seen = watched(run)
    play_run(run)
    for asked in fits(seen).values():
        drawn = [[batch.indices.tolist() for batch in training_batches(a.data, FAST, a.key)] for a, _ in asked]
        assert len(drawn) == 3 and drawn[0] != drawn[1] != drawn[2] != drawn[0]
        assert len({done.answer.mean_loss for _, done in asked}) == 3


def test_a_frozen_head_does_not_move_inside_a_round_either() -> None:
    class Headless(FedIT):
        def local(self, client: Client, download: Any) -> Any:
            fitted = yield Fit(Model(lora=download), head=False)
            return Upload(fitted.model["lora"])

    frozen, headless = play_run(world(FedIT(), head="frozen", rounds=1)), play_run(world(Headless(), rounds=1))
    assert encode(frozen[0].progress.state) == encode(headless[0].progress.state)
    trained = play_run(world(FedIT(), head="averaged", rounds=1))
    assert encode(trained[0].progress.state) != encode(headless[0].progress.state)


def test_the_objectives_are_the_task_losses_with_the_penalties_of_the_old_and_of_the_new_reference() -> None:
    lam = 20.0
    run = three_to_one(FedPALoRA(lam=lam), weights="examples", rounds=2)
    seen = watched(run)
    first, second = play_run(run)
    last = {name: asked[1][1] for name, asked in fits(seen).items()}
    task = local = joint = 0.0
    for name, weight in (("c0", 0.75), ("c1", 0.25)):
        model, data = last[name].answer.model, run.setting.sites[name].data["train"].select(range(8))
        task += weight * score(model, last[name].head, data).loss
        local += weight * lam / 2 * apart(model, first.progress.state.reference)
        joint += weight * lam / 2 * apart(model, second.progress.state.reference)
    found = second.metrics["objective"]
    assert found["task"] == pytest.approx(task, rel=1e-9)
    assert found["local"] - found["task"] == pytest.approx(local, rel=1e-4) and local > 1e-3
    assert found["joint"] - found["task"] == pytest.approx(joint, rel=1e-4) and joint < 0.9 * local


def apart(model: Model, reference: dict[str, LowRank]) -> float:
    """sum over layers of ||B A - B_g A_g||_F^2, densely and without scales."""
    return sum(
        float((t.B.double() @ t.A.double() - reference[n].B.double() @ reference[n].A.double()).square().sum())
        for n, t in model["lora"].items()
    )


def test_with_local_heads_the_pooled_score_is_the_mean_over_clients_with_their_own() -> None:
    run = three_to_one(FedIT(), head="local")
    (played,) = play_run(run)
    heads = [load_record(run.store, name).head for name in run.cards]
    losses = [score(Model(lora=played.progress.state.lora), head, text(40, seed=999)).loss for head in heads]
    assert played.metrics["global"]["pooled"]["loss"] == pytest.approx(sum(losses) / 2, rel=1e-9)


def test_the_clients_global_scores_are_those_of_the_global_model_on_their_own_shares() -> None:
    run = large_shares(world(FedIT(), ranks=(2, 4), rounds=2, train=TELLING))
    *_, last = play_run(run)
    head, model = last.progress.heads["base/all"], Model(lora=last.progress.state.lora)
    expected = {name: score(model, head, site.data["test"]).accuracy for name, site in run.setting.sites.items()}
    assert last.metrics["global"]["clients"]["accuracy"] == expected


class EarlyFedIT(FedIT):
    traits = replace(FedIT.traits, evaluated="before aggregation")


OWN_MODELS: dict[str, tuple[Any, Callable[[Any, Card, SiteRecord], Any]]] = {
    "fedit": (FedIT(), lambda state, card, record: cut_for(state.lora, card)),
    "fedit, before aggregation": (EarlyFedIT(), lambda state, card, record: cut_for(state.lora, card)),
    "fedpa": (FedPALoRA(), lambda state, card, record: cut_for(state.reference, card)),
    "local-only": (LocalOnly(), lambda state, card, record: record.memory["factors"]),
}


@pytest.mark.parametrize("which", OWN_MODELS)
def test_personal_scores_are_those_of_the_models_and_heads_that_the_sites_use(which: str) -> None:
    """Those of this round's download or of the next one's, as the method says; its own factors where it has some."""
    algorithm, own = OWN_MODELS[which]
    run = large_shares(world(algorithm, ranks=(2, 4), rounds=2, train=TELLING))
    first, last = play_run(run)
    progress = first.progress if algorithm.traits.evaluated == "before aggregation" else last.progress
    pooled, losses = text(40, seed=999), []
    for name, card in run.cards.items():
        record = load_record(run.store, name)
        model = Model(lora=own(progress.state, card, record))
        head = record.head or progress.heads["base/all"]
        losses.append(score(model, head, pooled).loss)
        share = score(model, head, run.setting.sites[name].data["test"])
        assert last.metrics["personal"]["clients"]["accuracy"][name] == share.accuracy
    assert last.metrics["personal"]["pooled"]["loss"] == pytest.approx(sum(losses) / 2, rel=1e-9)


def test_a_site_evaluated_with_its_rounds_download_is_sent_nothing_more_than_once() -> None:
    """Only sites outside the cohort need a download for their evaluation."""
    run = world(EarlyFedIT(), sample=2, rounds=2)
    for played in play_run(run):
        rows = [row for row in run.ledger.rows() if row["round"] == played.progress.round]
        sent = {row["client"] for row in rows if row["kind"] == "evaluation"}
        assert len(sent) == 1 and sent == set(run.cards) - set(played.metrics["cohort"])


def test_the_pooled_limit_ends_with_the_last_round_for_the_global_model_but_not_for_the_sites() -> None:
    first, last = play_run(world(FedIT(), rounds=2, measuring=Measuring(pooled_limit=10)))
    assert first.metrics["global"]["pooled"]["examples"] == 10
    assert last.metrics["global"]["pooled"]["examples"] == 40
    assert last.metrics["personal"]["pooled"]["examples"] == 10


def test_fedpa_reconstructs_the_unscaled_mean_of_products_and_keeps_the_common_scale() -> None:
    members, weights = cards({"a": 2, "b": 3}, scale=2.0), {"a": 0.75, "b": 0.25}
    outcome = play(FedPALoRA(), members, random_training(), weights=weights)
    reference = outcome.state.reference
    assert {term.scale for term in reference.values()} == {2.0}
    unscaled = {name: matrix / 2.0 for name, matrix in ideal(outcome, weights).items()}
    assert gap({n: t.B.double() @ t.A.double() for n, t in reference.items()}, best(unscaled, 3)) < 1e-6


def test_the_initialisation_mismatch_is_relative_to_what_enters_the_next_round() -> None:
    """And a change of rank counts as rows and columns of zeros; the mean is over layers."""
    one = LowRank(torch.full((2, 1), 1.0), torch.full((1, 3), 3.0))
    two = LowRank(torch.full((2, 1), 4.0), torch.full((1, 3), 2.0))
    assert initialisation_mismatch({"w": one}, {"w": two}) == pytest.approx({"B": 3 / 4, "A": 1 / 2})
    assert initialisation_mismatch({"w": two}, {"w": one}) == pytest.approx({"B": 3.0, "A": 1 / 3})
    both = initialisation_mismatch({"v": one, "w": one}, {"v": one, "w": two})
    assert both == pytest.approx({"B": 3 / 8, "A": 1 / 4})
    assert initialisation_mismatch({"w": one}, {"w": one.padded(2)}) == {"B": 0.0, "A": 0.0}


def test_the_worst_half_and_quarter_are_means_of_the_lowest_rounded_up() -> None:
    values = {"a": 0.9, "b": 0.1, "c": 0.5, "d": 0.3, "e": 0.7}
    assert spread(values) == pytest.approx({"mean": 0.5, "worst_50": 0.3, "worst_25": 0.2})
    assert spread({"a": 0.25}) == {"mean": 0.25, "worst_50": 0.25, "worst_25": 0.25}
