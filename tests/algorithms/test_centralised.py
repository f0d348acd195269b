"""Centralised references: what they train on, how much, with which heads, and how they compare with local training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.harness import cards, server
from engines.world import FAST, base, play, world

from algorithms.fixtures import GROUPS, used
from coterie.algorithms import METHODS, Centralised, CentralisedPerTask, LocalOnly
from coterie.engines.in_process import InProcess, Played
from coterie.engines.sites import Volatile, load_record
from coterie.errors import ConfigError
from coterie.experiments.methods import algorithm
from coterie.protocol import Federation, Fit
from coterie.report.catalogue import catalogue
from coterie.training.asks import Ask
from coterie.wire.codec import encode


def asked(run: InProcess) -> tuple[list[Ask], list[Played]]:
    """The Fits of a run with what they were asked on, and the rounds."""
    answer, seen = run.executor.answer, list[Ask]()

    def watched(asks: Any) -> Any:
        seen.extend(ask for ask in asks if isinstance(ask.request, Fit))
        return answer(asks)

    run.executor.answer = watched  # type: ignore[method-assign]
    played = play(run)
    run.executor.answer = answer  # type: ignore[method-assign]
    return seen, played


def test_a_round_takes_as_many_mini_batches_as_all_clients_would() -> None:
    steps = [one.metrics["train"]["steps"] for one in play(world(Centralised()))]
    assert steps == [{"pooled": 9}] * 3  # three clients, three steps each
    per_task = play(world(CentralisedPerTask(), **GROUPS))  # type: ignore[arg-type]
    assert [one.metrics["train"]["steps"] for one in per_task] == [{"pooled/x": 6, "pooled/y": 3}] * 3
    assert play(world(Centralised(steps=5)))[0].metrics["train"]["steps"] == {"pooled": 5}
    assert play(world(Centralised(), sample=1))[0].metrics["train"]["steps"] == {"pooled": 9}


def test_epochs_are_passes_over_the_pooled_data_and_are_not_multiplied() -> None:
    run = world(Centralised(), train=replace(FAST, steps=None, epochs=2), rounds=1)
    examples = sum(len(site.data["train"]) for site in run.setting.sites.values())
    assert play(run)[0].metrics["train"]["steps"] == {"pooled": 2 * -(-examples // 4)}


def test_only_the_server_trains_and_the_ledger_knows_evaluation_alone() -> None:
    for method in (Centralised(), CentralisedPerTask()):
        run = world(method)
        for played in play(run):
            assert played.metrics["cohort"] == [] and played.metrics["train"]["loss"] > 0
        assert {row["kind"] for row in run.ledger.rows()} == {"evaluation"}


def test_with_one_client_it_is_local_training_up_to_the_keys_of_the_batches() -> None:
    """Equal initial factors, head, data and number of steps; with local training's key, equal bits."""
    (alone, *_), _ = asked(world(LocalOnly(), ranks=(4,), rounds=1))
    central = world(Centralised(), ranks=(4,), rounds=1, network=base())
    (there, *_), _ = asked(central)
    assert encode(there.request.initial) == encode(alone.request.initial)
    assert encode(dict(there.head or {})) == encode(dict(alone.head or {}))
    assert there.key != alone.key
    made = [central.executor.answer([replace(one, key=alone.key)])[0] for one in (there, alone)]
    assert encode(made[0].answer.model) == encode(made[1].answer.model)  # type: ignore[union-attr]
    assert encode(made[0].head) == encode(made[1].head)  # type: ignore[union-attr]


def test_with_one_client_and_whole_batches_it_is_local_training_to_rounding() -> None:
    """Where every batch is the whole set, its order is all that the keys decide."""
    train, store = replace(FAST, batch_size=64), Volatile()
    play(world(LocalOnly(), ranks=(4,), train=train, store=store))
    there = play(world(Centralised(), ranks=(4,), train=train))[-1].progress
    record = load_record(store, "c0")
    for layer, term in record.memory["factors"].items():
        assert torch.allclose(there.state.models["all"][layer].product(), term.product(), atol=1e-6)
        assert float(term.product().norm()) > 1e-3
    for name, value in (record.head or {}).items():
        assert torch.allclose(there.heads["base/all"][name], value, atol=1e-6)


def test_one_model_and_one_head_are_every_site_s_and_the_global_ones() -> None:
    run = world(Centralised(), **GROUPS)  # type: ignore[arg-type]
    last = play(run)[-1]
    whole = encode(run.algorithm.global_model(last.progress.state))
    for model, head in used(run, last).values():
        assert encode(model) == whole
        assert encode(head) == encode(last.progress.heads["base/all"])
    assert not torch.equal(last.progress.heads["base/all"]["classifier.weight"], base().head["classifier.weight"])
    assert last.metrics["global"]["pooled"]["examples"] == 40


@pytest.mark.parametrize(("policy", "trained"), [("frozen", False), ("averaged", True), ("local", True)])
@pytest.mark.parametrize("method", [Centralised(), CentralisedPerTask()])
def test_the_server_s_heads_are_trained_unless_all_heads_are_frozen(
    method: Centralised, policy: Any, trained: bool
) -> None:
    run = world(method, head=policy, rounds=1, **GROUPS)  # type: ignore[arg-type]
    last = play(run)[-1]
    for _, head in used(run, last).values():
        assert head is not None
        assert (encode(head) != encode(base().head)) == trained


def test_the_factors_have_the_largest_rank_and_its_scale() -> None:
    members = cards({"a": 2, "b": 8, "c": 4}, scale={"a": 4.0, "b": 1.0, "c": 2.0})
    state = Centralised().start(Federation(tuple(members), 1), server(0, ("pooled",)))
    assert {(term.rank, term.scale) for term in state.models["all"].values()} == {(8, 1.0)}


def test_what_it_cannot_do_is_told() -> None:
    with pytest.raises(ConfigError, match="no data set 'pooled'"):
        Centralised().start(Federation(tuple(cards({"a": 2, "b": 2})), 1), server(0))
    with pytest.raises(ConfigError, match="steps must be at least 1"):
        algorithm("centralised", {"steps": 0})


def test_on_data_that_no_client_has_all_of_it_learns_more_than_a_client_alone() -> None:
    train = replace(FAST, optimizer="adamw", lr=3e-3, batch_size=8, steps=10)
    central = play(world(Centralised(), ranks=(4,) * 4, train=train, rounds=6))[-1].metrics
    alone = play(world(LocalOnly(), ranks=(4,) * 4, train=train, rounds=6))[-1].metrics
    assert central["global"]["pooled"]["accuracy"] > alone["personal"]["pooled"]["accuracy"] + 0.03


def test_the_list_of_methods_tells_references_from_federations() -> None:
    pooling = {name for name, kind in METHODS.items() if kind.traits.pools_data}
    assert {one.name for one in catalogue(METHODS) if one.model == "reference"} == pooling
    assert {"centralised", "centralised-per-task"} <= pooling
