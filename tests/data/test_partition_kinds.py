"""Every partitioner: each example placed once, minimum met, the same seed the same manifest; and what each is for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coterie.data import partition as module
from coterie.data.holdings import manifest, statistics
from coterie.data.partition import (
    PARTITIONERS,
    Partition,
    dirichlet,
    iid,
    make_partition,
    natural,
    partition_options,
    quantity,
    shards,
    split,
)
from coterie.errors import ConfigError, DataError
from coterie.maths.keys import root_key

KEY = root_key(0)
LABELS = st.lists(st.integers(-1, 4), min_size=1, max_size=120)
quick = settings(deadline=None, max_examples=60)

#: A value for every option that some partitioner takes.
OPTIONS: dict[str, Any] = {"beta": 0.3, "shards": 2, "alpha": 5.0, "weights": None, "floor": 0.05}

#: Those that place every example; a mixture leaves some to nobody (test_mixtures.py).
WHOLE = sorted(PARTITIONERS.keys() - {"mixture"})


def made(kind: str, labels: np.ndarray, clients: int, seed: int, minimum: int, groups: list[str]) -> Partition:
    options = {name: OPTIONS[name] for name in partition_options(kind)}
    return make_partition(kind, labels, clients, key=root_key(seed), minimum=minimum, groups=groups, **options)


@quick
@given(st.sampled_from(WHOLE), LABELS, st.integers(1, 12), st.integers(0, 5), st.integers(0, 9))
def test_every_example_is_placed_once_and_every_minimum_met_or_refused_in_one_line(
    kind: str, labels: list[int], clients: int, minimum: int, seed: int
) -> None:
    values = np.array(labels)
    groups = [f"g{label % 3}" for label in labels]
    try:
        parts = made(kind, values, clients, seed, minimum, groups)
    except DataError as error:
        assert "\n" not in str(error)
        # Where all have enough, only shards need more examples, and only whole groups can stand in the way.
        assert clients * minimum > len(labels) or kind in ("shards", "natural")
        return
    assert len(parts) == clients
    assert sorted(itertools.chain(*parts)) == list(range(len(labels)))
    for part in parts:
        assert part.dtype == np.int64 and len(part) >= minimum and np.array_equal(part, np.sort(part))


@quick
@given(st.sampled_from(sorted(PARTITIONERS)), st.integers(1, 8), st.integers(0, 9))
def test_the_same_seed_gives_the_same_manifest_and_splits(kind: str, clients: int, seed: int) -> None:
    labels = np.arange(90) % 5
    groups = [f"g{i % 7}" for i in range(90)]

    def record() -> str:
        parts = made(kind, labels, clients, seed, 3, groups)
        key = root_key(seed).fold("split")
        fractions = {"train": 0.6, "validation": 0.2, "test": 0.2}
        splits = [split(part, labels, fractions, key.fold(client)) for client, part in enumerate(parts)]
        how = {"kind": kind, "seed": seed}
        return json.dumps(manifest(parts, labels, how=how, splits=splits, groups=groups))

    assert record() == record()


def test_another_seed_gives_another_partition() -> None:
    labels = np.arange(200) % 4
    groups = [f"g{i % 3}" for i in range(200)]
    for kind in PARTITIONERS:
        one, other = (made(kind, labels, 9, seed, 1, groups) for seed in (1, 2))
        assert not all(map(np.array_equal, one, other))


@quick
@given(st.integers(0, 2**32), st.integers(2, 6))
def test_for_a_large_beta_sizes_and_label_shares_converge_to_equal(seed: int, clients: int) -> None:
    labels = np.arange(6000) % 3
    key = root_key(seed)
    # The share of a client has a standard deviation below 0.5 / sqrt(clients * beta) = 0.0036; that of the error 7 x.
    for parts in (quantity(labels, clients, 1e4, key), dirichlet(labels, clients, 1e4, key)):
        assert max(abs(len(part) / 6000 - 1 / clients) for part in parts) < 0.025
    histogram = np.array(statistics(dirichlet(labels, clients, 1e4, key), labels)["histogram"])
    assert np.abs(histogram / histogram.sum(axis=1, keepdims=True) - 1 / 3).max() < 0.05


@pytest.mark.parametrize("beta", [0.1, 1.0, 10.0])
def test_sizes_spread_as_a_dirichlet_does_while_labels_stay_mixed(beta: float) -> None:
    labels, clients = np.arange(8000) % 4, 20
    drawn = [quantity(labels, clients, beta, root_key(seed), minimum=0) for seed in range(60)]
    variance = np.mean([(len(part) / 8000 - 1 / clients) ** 2 for parts in drawn for part in parts])
    # The variance of one share of a symmetric Dirichlet.
    assert variance == pytest.approx((1 / clients) * (1 - 1 / clients) / (clients * beta + 1), rel=0.2)
    for part in itertools.chain(*drawn[:5]):
        if len(part) > 500:
            assert np.abs(np.bincount(labels[part], minlength=4) / len(part) - 0.25).max() < 0.1


@quick
@given(LABELS, st.integers(1, 8), st.integers(1, 4), st.integers(0, 9))
def test_shards_leave_each_client_few_classes_and_all_equal_sizes(
    labels: list[int], clients: int, count: int, seed: int
) -> None:
    assume(clients * count <= len(labels))
    values = np.array(labels)
    parts = shards(values, clients, count, root_key(seed))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= count
    # Sorted by label there are (classes - 1) borders, each of which cuts at most one piece in two.
    held = sum(len(np.unique(values[part])) for part in parts)
    assert held <= clients * count + len(np.unique(values)) - 1


def test_shards_of_equal_classes_hold_one_class_each() -> None:
    labels = root_key(4).permutation(1000) % 10
    parts = shards(labels, 50, 2, KEY)
    assert all(len(part) == 20 and len(np.unique(labels[part])) <= 2 for part in parts)


GROUPS = st.lists(st.integers(0, 6), min_size=1, max_size=80)


@quick
@given(GROUPS, st.integers(1, 20), st.integers(0, 9))
def test_natural_groups_are_whole_or_a_client_holds_one(belongs: list[int], clients: int, seed: int) -> None:
    groups = np.array([f"g{number}" for number in belongs])
    assume(clients <= len(groups))
    parts = natural(np.zeros(len(groups), int), clients, groups, root_key(seed), minimum=0)
    owners = {name: [i for i, part in enumerate(parts) if name in groups[part]] for name in np.unique(groups)}
    if clients <= len(owners):
        assert all(len(held) == 1 for held in owners.values())
    else:
        assert all(len(np.unique(groups[part])) <= 1 for part in parts)
    if clients == len(owners):
        assert [owners[name] for name in sorted(owners)] == [[i] for i in range(clients)]


def best_smallest(sizes: list[int], clients: int) -> int:
    """Twin: by trying every number of clients for every group, the largest possible smallest part."""
    choices = itertools.product(range(1, clients + 1), repeat=len(sizes))
    fair = (many for many in choices if sum(many) == clients)
    return max(min(size // number for size, number in zip(sizes, many, strict=True)) for many in fair)


@quick
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 4))
def test_more_clients_than_groups_share_so_that_the_smallest_part_is_largest(sizes: list[int], more: int) -> None:
    clients = len(sizes) + more
    many = module._clients_of_groups(np.array(sizes), clients)
    assert many.sum() == clients and many.min() >= 1
    smallest = min(size // number for size, number in zip(sizes, many.tolist(), strict=True))
    assert smallest == best_smallest(sizes, clients)


def test_fewer_clients_than_groups_get_nearly_equal_shares_of_whole_groups() -> None:
    sizes = [50, 40, 30, 30, 20, 20, 10]
    groups = [f"g{i}" for i, size in enumerate(sizes) for _ in range(size)]
    parts = natural(np.zeros(200, int), 3, groups, KEY, minimum=60)
    assert sorted(map(len, parts)) == [60, 70, 70]


def test_the_manifest_names_the_groups_of_each_client() -> None:
    groups = ["b", "a", "b", "a", "a"]
    parts = natural([0, 1, 0, 1, 1], 2, groups, KEY)
    record = manifest(parts, [0, 1, 0, 1, 1], how={}, groups=groups)
    assert [client["groups"] for client in record["clients"]] == [{"a": 3}, {"b": 2}]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: quantity([0, 1] * 5, 4, 0.5, KEY, 3), "10 examples do not give 4 clients 3 each"),
        (lambda: quantity([0, 1], 2, 0.0, KEY), "beta is 0.0; it must be a positive number"),
        (lambda: shards([0, 1] * 5, 4, 3, KEY), "10 examples are not enough for 4 clients with 3 shards each"),
        (lambda: shards([0, 1] * 5, 4, 0, KEY), "at least 1 and at most 2 shards"),
        (lambda: natural([0] * 9, 3, list("aaaaaaabc"), KEY, 2), r"one would hold 1 \('b'\)"),
        (lambda: natural([0] * 9, 4, list("aaaaaaaab"), KEY, 2), r"one would hold 1 \('b'\)"),
        (lambda: natural([0] * 4, 2, list("abc"), KEY), "3 groups for 4 examples"),
        (lambda: make_partition("natural", [0, 1], 2, key=KEY), "needs to know what each example belongs to"),
    ],
)
def test_what_cannot_be_dealt_is_one_line_with_the_way_out(make: Callable[[], Partition], said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_the_registry_says_which_options_each_takes() -> None:
    found = {kind: partition_options(kind) for kind in PARTITIONERS}
    assert found == {
        "iid": (),
        "dirichlet": ("beta",),
        "quantity": ("beta",),
        "shards": ("shards",),
        "natural": (),
        "mixture": ("alpha", "weights", "floor"),
    }
    with pytest.raises(ConfigError, match="did you mean 'quantity'"):
        partition_options("quantitty")
    for kind, options in found.items():
        for option in options:
            with pytest.raises(ConfigError, match=f"'{kind}' needs the option '{option}'"):
                make_partition(kind, [0, 1], 1, key=KEY, **{other: 1 for other in options if other != option})


def test_iid_is_even_in_labels_too() -> None:
    labels = np.repeat([0, 1], [9000, 1000])
    for part in iid(labels, 5, KEY):
        assert abs((labels[part] == 1).mean() - 0.1) < 0.03


@pytest.mark.parametrize("kind", ["quantity", "shards", "natural"])
def test_thousands_of_clients_are_dealt_at_once(kind: str) -> None:
    labels = np.arange(20_000) % 10
    groups = [f"g{i % 37}" for i in range(20_000)]
    parts = made(kind, labels, 4000, 0, 2, groups)
    assert len(parts) == 4000 and sorted(itertools.chain(*parts)) == list(range(20_000))
