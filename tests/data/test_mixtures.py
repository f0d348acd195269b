"""Compound heterogeneity: mixtures on the simplex, allocations within supply, sets that match them (FedSEE, B.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.data.mixtures import (
    allocation,
    composition,
    matched_tests,
    mixture,
    pure_allocation,
    wanted_mixtures,
)
from coterie.errors import DataError
from coterie.maths.keys import root_key

KEY = root_key(0)
GLUE = {"boolq": 5000, "cola": 5000, "qnli": 5000, "qqp": 5000, "sst2": 5000, "wic": 4428}
NAMES = sorted(GLUE)
SUPPLY = np.array([GLUE[name] for name in NAMES])
GROUPS = np.repeat(NAMES, SUPPLY)

SIMPLEX = st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any).map(lambda w: np.array(w) / sum(w))


def made(alpha: float | None = None, clients: int = 12, seed: int = 0, **given: Any) -> list[np.ndarray]:
    options: dict[str, Any] = {"weights": None, "floor": 0.05, "minimum": 1, "groups": GROUPS, **given}
    labels = np.zeros(len(options["groups"]), dtype=int)
    return mixture(labels, clients, alpha=alpha, key=root_key(seed), **options)


def held(parts: list[np.ndarray]) -> np.ndarray:
    """(clients, M) counts of the six tasks."""
    return np.stack([composition(part, NAMES, GROUPS) for part in parts])


def test_the_pure_end_point_has_the_first_column_of_table_7() -> None:
    counts = held(made(alpha=0))
    assert dict(zip(NAMES, counts.sum(axis=0).tolist(), strict=True)) == GLUE
    for client, row in enumerate(counts):
        task = NAMES[client % 6]
        assert np.flatnonzero(row).tolist() == [client % 6] and row.sum() == GLUE[task] // 2


def test_at_the_pure_end_point_the_last_client_of_a_group_has_the_remainder() -> None:
    assert pure_allocation(np.array([11, 7]), 5).tolist() == [[3, 0], [0, 3], [3, 0], [0, 4], [5, 0]]


def test_the_pure_end_point_draws_examples_but_no_mixtures() -> None:
    one, other = made(alpha=0, seed=1), made(alpha=0, seed=2)
    assert np.array_equal(held(one), held(other)) and not np.array_equal(one[0], other[0])


@given(st.sampled_from([0.1, 0.5, 1.0, 50.0]), st.integers(1, 14), st.integers(0, 2**32))
def test_drawn_mixtures_lie_on_the_simplex_and_have_no_weight_below_the_floor(
    alpha: float, clients: int, seed: int
) -> None:
    drawn = wanted_mixtures(NAMES, clients, alpha, None, 0.05, root_key(seed))
    free = wanted_mixtures(NAMES, clients, alpha, None, 0.0, root_key(seed))
    assert drawn.shape == (clients, 6) and np.abs(drawn.sum(axis=1) - 1).max() < 1e-12
    assert ((drawn == 0) == (free < 0.05)).all()
    kept = np.where(free < 0.05, 0, free)
    assert np.abs(drawn - kept / kept.sum(axis=1, keepdims=True)).max() < 1e-15


def test_a_clients_draw_depends_on_no_other_client() -> None:
    few, many = (wanted_mixtures(NAMES, clients, 0.5, None, 0.05, KEY) for clients in (3, 9))
    assert np.array_equal(few, many[:3])


def test_draws_have_the_spread_of_the_symmetric_dirichlet() -> None:
    drawn = wanted_mixtures(NAMES, 20_000, 0.5, None, 0.0, KEY)
    # Mean 1 / M and variance (1 / M)(1 - 1 / M) / (M alpha + 1); seven standard errors of the mean are 0.008.
    assert np.abs(drawn.mean(axis=0) - 1 / 6).max() < 0.008
    assert np.abs(drawn.var(axis=0) / (5 / 36 / 4) - 1).max() < 0.1


@given(st.lists(SIMPLEX, min_size=1, max_size=7), st.lists(st.integers(0, 60), min_size=3, max_size=3))
def test_allocations_keep_to_the_supply_and_to_what_was_asked_for(
    points: list[np.ndarray], supplied: list[int]
) -> None:
    mixtures, supply = np.stack(points), np.array(supplied)
    counts = allocation(mixtures, supply)
    budget = supply.sum() // len(mixtures)
    asked = mixtures * budget
    assert (counts >= 0).all() and (counts[mixtures == 0] == 0).all()
    for m in range(3):
        total = counts[:, m].sum()
        assert total <= supply[m]
        # Each request is a whole number within one of the mixture's share of the budget.
        if asked[:, m].sum() + len(mixtures) <= supply[m]:
            assert (np.abs(counts[:, m] - asked[:, m]) < 1 + 1e-9).all()
        if asked[:, m].sum() >= supply[m] + len(mixtures):
            assert total == supply[m]
            factor = supply[m] / asked[:, m].sum()
            assert (np.abs(counts[:, m] - factor * asked[:, m]) < 3).all()


def test_requests_above_the_supply_are_reduced_in_proportion_and_the_rest_stays_unallocated() -> None:
    # A budget of 100 each: of the first group 80 + 60 + 100 are asked for where 120 are, of the second 20 + 40 of 180.
    counts = allocation(np.array([[0.8, 0.2], [0.6, 0.4], [1.0, 0.0]]), np.array([120, 180]))
    assert counts.tolist() == [[40, 20], [30, 40], [50, 0]]


def test_prescribed_points_are_taken_as_they_are() -> None:
    thirds = [1 / 3, 1 / 3, 1 / 3]
    weights = [[1, 0, 0], {"c": 0.5, "a": 0.5}, thirds, [0.02, 0.98, 0.0]]
    points = wanted_mixtures(["a", "b", "c"], 4, None, weights, 0.05, KEY)
    assert points.tolist() == [[1, 0, 0], [0.5, 0, 0.5], thirds, [0.02, 0.98, 0.0]]
    groups = ["b"] * 400 + ["a"] * 400 + ["c"] * 400
    parts = made(clients=4, weights=weights, groups=groups)
    # With a budget of 300, of a 300 + 150 + 100 + 6 are asked for where 400 are; b and c suffice.
    counts = [composition(part, ["a", "b", "c"], groups).tolist() for part in parts]
    assert counts == [[216, 0, 0], [108, 0, 150], [72, 100, 100], [4, 294, 0]]


def test_examples_are_given_once_and_only_from_the_clients_groups() -> None:
    parts = made(alpha=0.1)
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything) < len(GROUPS)
    for part in parts:
        assert part.dtype == np.int64 and np.array_equal(part, np.sort(part))
    wanted = wanted_mixtures(NAMES, 12, 0.1, None, 0.05, root_key(0))
    assert ((held(parts) > 0) == (wanted > 0)).all()


def test_classes_of_a_group_are_dealt_at_random() -> None:
    labels = np.tile([0, 1, 1, 1], 5000)
    parts = mixture(labels, 2, ["a"] * 20_000, alpha=0, weights=None, floor=0.05, key=KEY)
    assert [len(part) for part in parts] == [10_000, 10_000]
    for part in parts:
        assert abs(labels[part].mean() - 0.75) < 7 * (0.75 * 0.25 / 10_000) ** 0.5


@given(
    st.lists(SIMPLEX, min_size=1, max_size=6),
    st.integers(1, 20),
    st.lists(st.integers(20, 45), min_size=3, max_size=3),
    st.integers(0, 9),
)
def test_tests_match_the_mixture_repeat_nothing_and_overlap_only_where_they_must(
    points: list[np.ndarray], size: int, pool: list[int], seed: int
) -> None:
    names, groups = ["a", "b", "c"], np.repeat(["b", "a", "c"], pool)
    tests = matched_tests(np.stack(points), names, groups, size, root_key(seed))
    counts = np.stack([composition(test, names, groups) for test in tests])
    for test, row, point in zip(tests, counts, points, strict=True):
        assert len(test) == size == len(set(test.tolist())) and np.array_equal(test, np.sort(test))
        assert (np.abs(row - size * point) < 1 + 1e-9).all()
    places = np.concatenate(tests)
    for m, name in enumerate(names):
        own = places[groups[places] == name]
        assert len(np.unique(own)) == min(counts[:, m].sum(), (groups == name).sum())


def test_too_small_a_test_pool_is_told_with_the_way_out() -> None:
    groups = ["a"] * 30 + ["b"] * 90
    with pytest.raises(DataError, match=r"client 1 .* 50 examples of 'a', .* has 30; lower test_size to at most 60"):
        matched_tests(np.array([[0.1, 0.9], [0.5, 0.5]]), ["a", "b"], groups, 100, KEY)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "needs alpha or weights, one of them"),
        ({"alpha": 0.5, "weights": [[1, 0]]}, "needs alpha or weights, one of them"),
        ({"alpha": -1.0}, "alpha must be at least 0"),
        ({"alpha": float("nan")}, "alpha must be at least 0"),
        ({"alpha": 0, "clients": 5}, "5 clients cannot hold 6 groups; take at least 6 clients"),
        ({"alpha": 50.0, "floor": 0.5}, "leaves a client without any of 6 groups; take one below 1 / 6"),
        ({"weights": [[1, 0, 0, 0, 0, 0]]}, "1 mixtures for 12 clients"),
        ({"weights": [[1, 0]], "clients": 1}, "2 numbers for the groups boolq, cola, qnli, qqp, sst2, wic"),
        ({"weights": [{"sst": 1}], "clients": 1}, "no group 'sst'; did you mean 'sst2'"),
        ({"weights": [{"sst2": 0.5}], "clients": 1}, "client 0 sum to 0.5; they must be"),
        ({"weights": [{"sst2": 1.5, "wic": -0.5}], "clients": 1}, "must be at least 0 and sum to 1"),
        ({"weights": [{"sst2": float("nan")}], "clients": 1}, "must be at least 0 and sum to 1"),
        ({"alpha": 0.1, "minimum": 3000}, "and the minimum is 3000; lower the minimum"),
        ({"alpha": 0.1, "groups": [*GROUPS[:50].tolist(), "x"], "minimum": 9}, "and the minimum is 9"),
    ],
)
def test_what_cannot_be_meant_is_told_in_one_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError) as caught:
        made(**given)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_there_must_be_a_group_for_each_example() -> None:
    with pytest.raises(DataError, match="2 groups for 3 examples"):
        mixture([0, 1, 0], 1, ["a", "b"], alpha=0, weights=None, floor=0.05, key=KEY)
