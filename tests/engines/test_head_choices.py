"""Clients that choose their head group: which head they train, whose mean it enters, and what they may not name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from coterie.algorithms import FedIT, ServerOptimised
from coterie.algorithms.base import Program
from coterie.engines.sites import Volatile, load_record
from coterie.maths.server_optim import ServerOptimizer
from coterie.protocol import Card, Client, Fit, Model, Upload
from engines.world import base, play, world


@dataclass(frozen=True)
class Choosing(FedIT):
    """FedIT with two heads, between which clients choose by their names."""

    fit: str | None = None
    upload: str | None = None

    def head_group(self, state: Any, card: Card) -> str:
        return "even"

    def head_choices(self, state: Any, card: Card) -> tuple[str, ...]:
        return ("even", "odd")

    def local(self, client: Client, download: Any) -> Program:
        own = ("even", "odd")[int(client.card.id[1:]) % 2]
        fitted = yield Fit(Model(lora=download), head=self.fit or own)
        return Upload(fitted.model["lora"], head_group=self.upload or own)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], value) for name, value in second.items())


def test_each_groups_head_is_the_mean_of_those_who_chose_it_and_is_what_they_start_from() -> None:
    store = Volatile()
    run = world(Choosing(), ranks=(4, 4, 4), weights="uniform", store=store)
    first, second, _ = play(run)
    heads = first.progress.heads
    assert not same(heads["base/even"], heads["base/odd"]) and not same(heads["base/odd"], base().head)
    assert {name: load_record(store, name).head_group for name in run.cards} == {
        "c0": "even",
        "c1": "odd",
        "c2": "even",
    }
    assert not same(second.progress.heads["base/odd"], heads["base/odd"])


def test_a_group_that_nobody_chose_keeps_the_initial_head() -> None:
    run = world(Choosing(fit="odd", upload="odd"), ranks=(4, 4, 4), rounds=1)
    (played,) = play(run)
    assert "base/even" not in played.progress.heads and "base/odd" in played.progress.heads


def test_a_choice_that_was_not_offered_is_that_clients_failure() -> None:
    for bad, told in (
        (Choosing(upload="third"), "chose the head group 'third', which it was not offered"),
        (Choosing(fit="third"), "only the server's Fit may name a head group, not 'third'"),
    ):
        with pytest.raises(Exception, match=told):
            play(world(bad, ranks=(4, 4, 4), rounds=1))


def test_local_and_frozen_heads_know_no_groups() -> None:
    for policy in ("local", "frozen"):
        store = Volatile()
        run = world(Choosing(), ranks=(4, 4, 4), rounds=1, head=policy, store=store)
        (played,) = play(run)
        assert set(played.progress.heads) == {"base/all"}
        assert all((load_record(store, name).head is not None) == (policy == "local") for name in run.cards)


def test_a_wrapped_method_chooses_as_it_does_alone() -> None:
    plain = ServerOptimised(Choosing(), ServerOptimizer("sgd", lr=1.0, momentum=0.0))
    mine, theirs = play(world(plain, ranks=(4, 4, 4))), play(world(Choosing(), ranks=(4, 4, 4)))
    assert [p.metrics for p in mine] == [p.metrics for p in theirs]
