"""Who holds which example of a task: each at most once, enough for everybody, from the seed alone."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.data.partition import PARTITIONERS, make_partition, split
from coterie.data.tasks import Examples, Task
from coterie.errors import ConfigError, DataError
from coterie.experiments.config import Config, parse
from coterie.experiments.shares import Shares, share_out
from coterie.maths.keys import root_key

#: A mixture leaves examples to nobody; see test_mixed_shares.py.
KINDS = sorted(PARTITIONERS.keys() - {"mixture"})


def examples(labels: Any, groups: Any = None, name: str = "text") -> Examples:
    values = np.asarray(labels, dtype=np.int64)
    return Examples(tuple(f"{name} {i}" for i in range(len(values))), None, values, groups and tuple(groups))


def task(labels: Any, groups: Any = None) -> Task:
    names = tuple(f"class {kind}" for kind in range(int(max(labels)) + 1))
    return Task("toy", examples(labels, groups), examples([0, 1], name="test"), names, "", ())


def config(**sections: Any) -> Config:
    return parse({"method": "fedit", "task": {"name": "file"}, **sections})


def held(shares: Shares) -> list[int]:
    parts = [*shares.server.values(), *(part for own in shares.clients.values() for part in own.values())]
    return sorted(itertools.chain(*parts))


@given(
    kind=st.sampled_from(KINDS),
    labels=st.lists(st.integers(0, 3), min_size=30, max_size=150),
    clients=st.integers(1, 8),
    minimum=st.integers(1, 6),
    validation=st.sampled_from([0.0, 0.1, 0.25]),
    test=st.sampled_from([0.0, 0.2, 0.5]),
    public=st.none() | st.integers(1, 30),
    unlabeled=st.none() | st.integers(1, 30),
    seed=st.integers(0, 9),
)
def test_every_example_is_placed_once_and_every_share_is_as_large_as_it_is_to_be(
    kind: str,
    labels: list[int],
    clients: int,
    minimum: int,
    validation: float,
    test: float,
    public: int | None,
    unlabeled: int | None,
    seed: int,
) -> None:
    made = task(labels, [f"g{i % 3}" for i in range(len(labels))])
    chosen = config(
        seed=seed,
        clients={"count": clients},
        partition={"kind": kind, "minimum": minimum, "validation_fraction": validation, "test_fraction": test},
        server_data={"public": public, "unlabeled": unlabeled},
    )
    try:
        shares = share_out(chosen, made)
    except DataError as error:
        left = len(labels) - (public or 0) - (unlabeled or 0)
        assert "\n" not in str(error)
        assert left < max(clients * minimum, 1) or kind in ("shards", "natural")
        return
    assert held(shares) == list(range(len(labels)))
    assert {name: len(part) for name, part in shares.server.items()} == {
        name: count for name, count in (("public/toy", public), ("unlabeled", unlabeled)) if count is not None
    }
    for own in shares.clients.values():
        whole = sum(map(len, own.values()))
        assert whole >= minimum and len(own["train"]) >= 1
        assert set(own) == {"train"} | {n for n, share in (("validation", validation), ("test", test)) if share}
        for name, share in (("validation", validation), ("test", test)):
            # One more may be missing where the only example was given back to an empty train part.
            assert abs(len(own.get(name, ())) - share * whole) < 1 + (whole * (1 - validation - test) < 1)
    recorded = {client["id"]: client for client in shares.record["clients"]}
    assert json.loads(json.dumps(shares.record)) == shares.record and list(recorded) == list(shares.clients)
    for name, own in shares.clients.items():
        assert {part: recorded[name][part] for part in own} == {part: places.tolist() for part, places in own.items()}
    for name, places in shares.server.items():
        assert shares.record["server"][name] == {"examples": len(places), "indices": places.tolist()}


@given(st.sampled_from(KINDS), st.integers(0, 2**32), st.integers(0, 2**32))
def test_the_seed_alone_decides_who_holds_what(kind: str, seed: int, other: int) -> None:
    made = task(np.arange(120) % 4, [f"g{i % 5}" for i in range(120)])

    def record(seed: int, **sections: Any) -> dict[str, Any]:
        partition = {"kind": kind, "minimum": 5, "validation_fraction": 0.2}
        chosen = config(
            seed=seed,
            clients={"count": 6},
            partition=partition,
            server_data={"public": 20, "unlabeled": 10},
            **sections,
        )
        return share_out(chosen, made).record

    one = record(seed)
    assert record(seed) == one
    assert record(seed, rounds=3, train={"lr": 0.5}, federation={"head": "local"}) == one
    if other != seed:
        assert record(other)["clients"] != one["clients"] and record(other)["server"] != one["server"]


def test_what_the_server_gets_depends_on_no_partition_and_has_the_classes_in_proportion() -> None:
    made = task(np.repeat([0, 1, 2], [300, 150, 150]))
    server_data = {"public": 40, "unlabeled": 80}
    taken = [
        share_out(config(server_data=server_data, partition=partition, clients=clients), made).server
        for partition, clients in (({"kind": "iid"}, {"count": 3}), ({"kind": "shards", "minimum": 1}, {"count": 9}))
    ]
    for name, count in (("public/toy", 40), ("unlabeled", 80)):
        assert np.array_equal(taken[0][name], taken[1][name]) and len(taken[0][name]) == count
        shares = np.bincount(made.train.labels[taken[0][name]]) / count
        assert np.abs(shares - [0.5, 0.25, 0.25]).max() < 2 / count


def test_without_server_data_and_validation_partition_and_split_are_of_all_examples() -> None:
    labels = np.arange(90) % 3
    key = root_key(7).fold("partition")
    parts = make_partition("dirichlet", labels, 4, key=key, minimum=5, beta=0.5)
    shares = share_out(config(seed=7, clients={"count": 4}, partition={"minimum": 5}), task(labels))
    for name, part in zip(shares.clients, parts, strict=True):
        expected = split(part, labels, {"train": 0.8, "test": 0.2}, key.fold("split", name))
        assert all(np.array_equal(shares.clients[name][one], expected[one]) for one in expected)
    assert shares.server == {} and shares.record["server"] == {}


def test_with_validation_each_class_is_in_all_three_shares_in_proportion() -> None:
    made = task(np.repeat([0, 1], [400, 200]))
    partition = {"kind": "iid", "validation_fraction": 0.25, "test_fraction": 0.25}
    shares = share_out(config(clients={"count": 2}, partition=partition), made)
    for own in shares.clients.values():
        whole = np.concatenate(list(own.values()))
        for name, fraction in (("train", 0.5), ("validation", 0.25), ("test", 0.25)):
            counts = np.bincount(made.train.labels[own[name]], minlength=2)
            assert np.abs(counts - fraction * np.bincount(made.train.labels[whole])).max() < 2


def test_of_a_natural_partition_a_client_of_one_group_has_it_as_its_own() -> None:
    # Four groups for three clients: the two smallest go together. Then the server takes some, and nothing changes.
    belongs = ["a"] * 40 + ["b"] * 30 + ["c"] * 15 + ["d"] * 12
    made = task(np.arange(97) % 2, belongs)
    for server_data in ({}, {"public": 9}):
        natural = {"kind": "natural", "minimum": 10}
        shares = share_out(config(clients={"count": 3}, partition=natural, server_data=server_data), made)
        assert sorted(shares.groups.values()) == ["a", "all", "b"]
        for name, own in shares.clients.items():
            of = {belongs[i] for part in own.values() for i in part}
            assert of == ({"c", "d"} if shares.groups[name] == "all" else {shares.groups[name]})
    assert set(share_out(config(clients={"count": 3}, partition={"minimum": 5}), made).groups.values()) == {"all"}


def test_given_groups_are_dealt_out_in_turn_whatever_the_partition() -> None:
    made = task(np.arange(120) % 2, [f"g{i % 5}" for i in range(120)])
    for kind in ("iid", "natural"):
        chosen = config(clients={"count": 5, "groups": ["x", "y"]}, partition={"kind": kind, "minimum": 10})
        assert list(share_out(chosen, made).groups.values()) == ["x", "y", "x", "y", "x"]


def test_more_for_the_server_than_there_is_and_too_little_for_clients_is_told_in_one_line() -> None:
    made = task(np.arange(60) % 2)
    with pytest.raises(DataError, match="server_data takes 60 of 60 training examples, which leaves none") as caught:
        share_out(config(server_data={"public": 40, "unlabeled": 20}), made)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="35 examples do not give 2 clients 20 each"):
        share_out(config(server_data={"public": 25}, clients={"count": 2}), made)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"partition": {"validation_fraction": 0.5, "test_fraction": 0.5}}, "leave nothing to train on"),
        ({"partition": {"validation_fraction": 1.0}}, "partition.validation_fraction: must be less than 1"),
        ({"partition": {"validation_fracton": 0.1}}, "did you mean 'partition.validation_fraction'?"),
        ({"server_data": {"public": 0}}, "server_data.public: must be greater than or equal to 1"),
        ({"server_data": {"unlabelled": 5}}, "did you mean 'server_data.unlabeled'?"),
        ({"clients": {"groups": []}}, "clients.groups"),
        ({"clients": {"groups": ["a", ""]}}, "clients.groups[1]"),
    ],
)
def test_settings_that_cannot_be_meant_are_named(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_the_record_notices_another_text_in_any_set() -> None:
    made = task(np.arange(60) % 2)
    further = replace(made, more_tests={"more": examples([0, 1], name="more")})
    changed = replace(made, more_tests={"more": examples([0, 1], name="other")})
    chosen = config(clients={"count": 2})
    assert len({share_out(chosen, one).record["data"] for one in (made, further, changed)}) == 3
