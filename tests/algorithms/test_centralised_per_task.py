"""A model for each task or group: whose data each is trained on, whose it is, and how much work it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance.harness import cards, server
from engines.world import FAST, base, play, pooled, world

from algorithms.fixtures import GROUPS, used
from coterie.algorithms import CentralisedPerTask
from coterie.engines.in_process import InProcess
from coterie.engines.sites import Volatile
from coterie.errors import ConfigError
from coterie.maths.keys import root_key
from coterie.protocol import Client, Federation, Memory, Server, copied
from coterie.wire.codec import encode
from coterie.wire.ledger import Ledger


def test_each_group_has_a_model_and_a_head_of_its_own_and_its_sites_use_them() -> None:
    run = world(CentralisedPerTask(), **GROUPS)  # type: ignore[arg-type]
    last = play(run)[-1]
    state, heads, sites = last.progress.state, last.progress.heads, used(run, last)
    assert set(state.models) == {"x", "y"} and set(heads) == {"base/all", "base/x", "base/y"}
    for name, group in (("c0", "x"), ("c1", "y"), ("c2", "x")):
        model, head = sites[name]
        assert encode(model["lora"]) == encode(state.models[group])
        assert encode(head) == encode(heads[f"base/{group}"])
    assert encode(state.models["x"]) != encode(state.models["y"])
    assert encode(heads["base/x"]) != encode(heads["base/y"])
    assert encode(heads["base/all"]) == encode(base().head)
    assert last.metrics["global"] is None and set(last.metrics["personal"]["clients"]["accuracy"]) == set(sites)


def test_a_group_s_training_does_not_depend_on_other_groups() -> None:
    """Of whole batches, so that only data and steps count: y alone is y beside x."""
    train = replace(FAST, batch_size=64)
    both = play(world(CentralisedPerTask(), ranks=(4, 4, 4), train=train, rounds=2, **GROUPS))[-1]  # type: ignore[arg-type]
    run = world(CentralisedPerTask(), ranks=(4, 4, 4), train=train, rounds=2, **GROUPS)  # type: ignore[arg-type]
    alone = {"c1": run.setting.sites["c1"]}
    setting = replace(run.setting, sites=alone, server_data=pooled(alone))
    one = play(InProcess(setting, run.executor, Volatile(), Ledger()))[-1]
    for layer, term in one.progress.state.models["y"].items():
        assert torch.allclose(both.progress.state.models["y"][layer].product(), term.product(), atol=1e-6)


def test_of_clients_with_several_tasks_each_model_has_the_steps_of_its_share_of_them() -> None:
    members = tuple(cards(dict.fromkeys("abcdefg", 2)))  # all of the group "all", which no data set is for
    for tasks, steps in ((("x", "y"), 3), (("x", "y", "z"), 2), (tuple("qrstuvwxyz"), 1)):
        there: Server = server(0, ("pooled", *(f"pooled/{task}" for task in tasks)))
        state = CentralisedPerTask().start(Federation(members, 1), there)
        assert state.mixed and state.clients == dict.fromkeys(tasks, steps)


def test_a_client_of_several_tasks_has_a_model_for_each_of_them_and_else_the_base() -> None:
    members, method = tuple(cards({"a": 2, "b": 2})), CentralisedPerTask()
    state = method.start(Federation(members, 1), server(0, ("pooled", "pooled/x", "pooled/y")))
    download = method.send(state, members[0])
    site = Client(members[0], Memory({}, copied), ("train",), root_key(0).fold, 1, "main")
    assert set(method.part_models(site, download)) == {"x", "y"} and method.site_model(site, download).terms == {}
    alone = {"all": download["x"]}
    assert method.part_models(site, alone) == {} and set(method.site_model(site, alone).terms) == {"lora"}


def test_a_group_without_data_is_told() -> None:
    members = cards({"a": 2, "b": 2})
    grouped = Federation((members[0], replace(members[1], group="y")), 1)
    with pytest.raises(ConfigError, match="no data set 'pooled/y'"):
        CentralisedPerTask().start(grouped, server(0, ("pooled", "pooled/all")))
