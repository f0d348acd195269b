"""The server's heads by group: which Fit trains which, who may name one, and that they are kept."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from coterie.algorithms.factors import initial_adapter
from coterie.engines.driver import Party, drive_one
from coterie.errors import RunError
from coterie.protocol import Fit, Fitted, Model
from coterie.training.asks import Head, Plan
from coterie.training.executor import Executor
from engines.world import FAST, base, key, text

EXECUTOR = Executor({"base": base()}, FAST, Plan(clients_per_step=3))
INITIAL = EXECUTOR.bases["base"].head
MODEL = Model(lora=initial_adapter(EXECUTOR.bases["base"].layers, 4, 2.0, key("init")))


def server(trains: bool = True, groups: dict[str, Head] | None = None, is_server: bool = True) -> Party:
    data = {"pooled/x": text(12, seed=1, share=0.8), "pooled/y": text(12, seed=2, share=0.2)}
    return Party("server", "base", data, INITIAL, key("r"), trains, is_server, group_heads=dict(groups or {}))


def asking(*fits: Fit) -> Generator[Any, Any, list[Fitted]]:
    return (yield list(fits))


def equal(first: Head | None, second: Head | None) -> bool:
    assert first is not None and second is not None
    return all(torch.equal(first[name], value) for name, value in second.items())


def test_fits_of_one_list_train_the_heads_of_their_groups_and_no_other() -> None:
    party = server()
    drive_one(asking(Fit(MODEL, head="x", data="pooled/x"), Fit(MODEL, head="y", data="pooled/y")), party, EXECUTOR)
    assert set(party.group_heads) == {"x", "y"} and equal(party.head, INITIAL)
    assert not equal(party.group_heads["x"], party.group_heads["y"])
    assert not equal(party.group_heads["x"], INITIAL)


def test_a_group_goes_on_with_its_own_head() -> None:
    once, twice, straight = server(), server(), server()
    fit = Fit(MODEL, head="x", data="pooled/x", train=("lora.*",))
    drive_one(asking(fit), once, EXECUTOR)
    drive_one(asking(fit), twice, EXECUTOR)
    drive_one(asking(fit), twice, EXECUTOR)
    again = server(groups=once.group_heads)
    again.counts = once.counts
    drive_one(asking(fit), again, EXECUTOR)
    assert equal(again.group_heads["x"], twice.group_heads["x"])
    drive_one(asking(fit), straight, EXECUTOR)
    assert equal(straight.group_heads["x"], once.group_heads["x"])
    assert not equal(twice.group_heads["x"], once.group_heads["x"])


def test_naming_all_is_the_head_of_all() -> None:
    named, plain = server(), server()
    drive_one(asking(Fit(MODEL, head="all", data="pooled/x")), named, EXECUTOR)
    drive_one(asking(Fit(MODEL, data="pooled/x")), plain, EXECUTOR)
    assert equal(named.head, plain.head) and not equal(named.head, INITIAL) and named.group_heads == {}


def test_frozen_heads_stay_and_a_list_may_not_train_one_head_twice() -> None:
    frozen = server(trains=False)
    drive_one(asking(Fit(MODEL, head="x", data="pooled/x")), frozen, EXECUTOR)
    assert frozen.group_heads == {} and equal(frozen.head, INITIAL)
    for pair in (("x", "x"), (True, "all")):
        fits = [Fit(MODEL, head=head, data="pooled/x") for head in pair]
        with pytest.raises(RunError, match="only one Fit of a list may train the head"):
            drive_one(asking(*fits), server(), EXECUTOR)


def test_a_client_may_not_name_a_head_group() -> None:
    with pytest.raises(RunError, match="only the server's Fit may name a head group, not 'x'"):
        drive_one(asking(Fit(MODEL, head="x", data="pooled/x")), server(is_server=False), EXECUTOR)
