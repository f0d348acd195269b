"""Partitions are disjoint, complete, feasible, and follow from the key; splits keep the classes' shares."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data import partition as module
from coterie.data.holdings import manifest, mean_from_pooled, mean_total_variation, statistics
from coterie.data.partition import dirichlet, iid, make_partition, split
from coterie.errors import ConfigError, DataError
from coterie.maths.apportion import largest_remainder, log_gamma_variates
from coterie.maths.keys import root_key

KEY = root_key(0)
LABELS = st.lists(st.integers(-1, 4), min_size=1, max_size=120)
quick = settings(deadline=None, max_examples=80)


def assert_partition(parts: list[np.ndarray], count: int, clients: int, minimum: int) -> None:
    assert len(parts) == clients
    assert sorted(itertools.chain(*parts)) == list(range(count))
    for part in parts:
        assert part.dtype == np.int64 and len(part) >= minimum and np.array_equal(part, np.sort(part))


@quick
@given(
    LABELS,
    st.integers(1, 12),
    st.integers(0, 5),
    st.integers(0, 9),
    st.sampled_from([None, 1e-3, 0.3, 1.0, 1e4]),
)
def test_every_example_has_one_owner_and_every_client_its_minimum(
    labels: list[int], clients: int, minimum: int, seed: int, beta: float | None
) -> None:
    minimum = min(minimum, len(labels) // clients)
    key = root_key(seed)
    if beta is None:
        parts = iid(labels, clients, key, minimum)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    else:
        parts = dirichlet(labels, clients, beta, key, minimum)
    assert_partition(parts, len(labels), clients, minimum)


def test_the_same_key_gives_the_same_partition_and_another_another() -> None:
    labels = np.arange(200) % 4
    for make in (lambda key: iid(labels, 7, key), lambda key: dirichlet(labels, 7, 0.5, key)):
        first, again, other = make(root_key(1)), make(root_key(1)), make(root_key(2))
        assert all(map(np.array_equal, first, again))
        assert not all(map(np.array_equal, first, other))


def test_extreme_skew_stays_finite_and_feasible() -> None:
    labels = np.array([0] * 500 + [1] * 499 + [2])
    for beta in (1e-300, 1e-6, 1e-3, 1e6):
        parts = dirichlet(labels, 50, beta, KEY, minimum=10)
        assert_partition(parts, 1000, 50, 10)


def test_small_beta_is_skewed_and_large_beta_even() -> None:
    labels = np.arange(4000) % 4
    distance = [
        statistics(dirichlet(labels, 20, beta, KEY), labels)["mean_total_variation"] for beta in (0.05, 1, 1000)
    ]
    assert distance[0] > 0.7 > distance[1] > 0.2 > distance[2]


def test_thousands_of_clients_are_dealt_even_at_the_last_possible_minimum() -> None:
    labels = np.arange(20_000) % 10
    parts = dirichlet(labels, 4000, 0.1, KEY, minimum=5)
    assert_partition(parts, 20_000, 4000, 5)


def test_no_donor_falls_below_those_it_fills() -> None:
    counts = np.array([[9, 0, 0, 3], [2, 0, 1, 0]])
    filled = module._fill(counts, 3)
    assert filled.sum(axis=1).tolist() == [12, 3]
    assert filled.sum(axis=0).tolist() == [6, 3, 3, 3]
    assert filled.tolist() == [[4, 3, 2, 3], [2, 0, 1, 0]]


@pytest.mark.parametrize("beta", [0.02, 0.5, 1.0, 3.0])
def test_gamma_variates_have_the_gamma_distribution(beta: float) -> None:
    logs = log_gamma_variates(100_000, beta, root_key(3))
    assert np.isfinite(logs).all()
    # Kolmogorov-Smirnov: their places in the distribution are uniform.
    places = torch.special.gammainc(torch.tensor(beta, dtype=torch.float64), torch.from_numpy(np.exp(logs)))
    steps = torch.arange(len(logs) + 1) / len(logs)
    sorted_places = places.sort().values
    gap = torch.maximum(steps[1:] - sorted_places, sorted_places - steps[:-1]).max()
    assert gap * len(logs) ** 0.5 < 1.63  # exceeded once in a hundred samples


def test_impossible_partitions_say_what_to_change() -> None:
    for make in (iid, lambda *given: dirichlet(given[0], given[1], 0.5, *given[2:])):
        with pytest.raises(DataError, match=r"10 examples .* at most 3 clients, a minimum of at most 2, or more"):
            make(np.zeros(10, int), 4, KEY, 3)
    for beta in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match="positive"):
            dirichlet([0, 1], 2, beta, KEY)
    with pytest.raises(DataError, match="there must be a client"):
        iid([0, 1], 0, KEY)


def test_partitioners_are_found_by_name_and_their_options_checked() -> None:
    labels = np.arange(60) % 3
    by_name = make_partition("dirichlet", labels, 5, key=KEY, beta=0.3, minimum=2)
    assert all(map(np.array_equal, by_name, dirichlet(labels, 5, 0.3, KEY, 2)))
    with pytest.raises(ConfigError, match="did you mean 'dirichlet'"):
        make_partition("dirichlett", labels, 5, key=KEY)
    with pytest.raises(ConfigError, match=r"no option 'betta'; did you mean 'beta'"):
        make_partition("dirichlet", labels, 5, key=KEY, betta=0.3)
    with pytest.raises(ConfigError, match="needs the option 'beta'"):
        make_partition("dirichlet", labels, 5, key=KEY)


@quick
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(0, 500))
def test_largest_remainder_is_within_one_and_sums_exactly(weights: list[float], total: int) -> None:
    shares = (np.array(weights) + 1e-9) / (np.array(weights) + 1e-9).sum()
    numbers = largest_remainder(shares * total, total)
    assert numbers.sum() == total
    assert (np.abs(numbers - shares * total) < 1 + 1e-9).all()


FRACTIONS = st.sampled_from(
    [
        {"train": 0.8, "test": 0.2},
        {"train": 0.6, "test": 0.2, "validation": 0.2},
        {"test": 0.9, "train": 0.1},
        {"train": 1.0},
        {"train": 0.0, "test": 1.0},
        {"train": 0.1, "a": 0.2, "b": 0.3, "c": 0.4},
    ]
)


@quick
@given(LABELS, FRACTIONS, st.integers(0, 9))
def test_a_split_shares_out_all_examples_in_proportion(
    labels: list[int], fractions: dict[str, float], seed: int
) -> None:
    values = np.array(labels * 2)
    held = np.arange(0, len(values), 2)
    parts = split(held, values, fractions, root_key(seed))
    assert list(parts) == list(fractions)
    assert sorted(itertools.chain(*parts.values())) == held.tolist()
    assert len(parts["train"]) >= 1
    rescued = len(held) * fractions["train"] < 1  # one example may have been moved into an empty train part
    for name, fraction in fractions.items():
        assert np.array_equal(parts[name], np.sort(parts[name]))
        assert abs(len(parts[name]) - fraction * len(held)) < 1 + rescued
        for kind in np.unique(values):
            share = fraction * (values[held] == kind).sum()
            assert abs((values[parts[name]] == kind).sum() - share) < 2 + rescued


def test_a_split_draws_by_key_and_leaves_no_class_aside() -> None:
    labels = np.repeat([0, 1], [90, 10])
    tests = [split(np.arange(100), labels, {"train": 0.8, "test": 0.2}, root_key(s))["test"] for s in range(40)]
    assert all((labels[part] == 1).sum() in (1, 2, 3) for part in tests)
    chosen = np.bincount(np.concatenate(tests), minlength=100)
    assert chosen.min() >= 1 and chosen.max() <= 20  # 8 expected of each example


def test_a_split_refuses_what_cannot_be_meant() -> None:
    with pytest.raises(DataError, match="without examples"):
        split([], [0, 1], {"train": 1.0}, KEY)
    for wrong in ({"train": 0.8, "test": 0.1}, {"train": 1.2, "test": -0.2}, {}, {"train": float("nan")}):
        with pytest.raises(DataError, match="sum to 1"):
            split([0, 1], [0, 1], wrong, KEY)


def slow_total_variation(histogram: np.ndarray) -> float:
    """Twin: the mean over all pairs, one by one."""
    rows = [row / row.sum() for row in histogram if row.sum()]
    pairs = [0.5 * np.abs(a - b).sum() for a, b in itertools.combinations(rows, 2)]
    return float(np.mean(pairs)) if pairs else 0.0


@quick
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=9))
def test_total_variation_equals_its_slow_twin(rows: list[list[int]]) -> None:
    histogram = np.array(rows)
    assert mean_total_variation(histogram) == pytest.approx(slow_total_variation(histogram), abs=1e-12)


def test_total_variation_knows_its_ends() -> None:
    assert mean_total_variation(np.eye(4, dtype=int)) == 1.0
    assert mean_total_variation(np.ones((4, 3), dtype=int)) == 0.0


@quick
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=9))
def test_distance_from_the_pooled_labels_equals_its_slow_twin(rows: list[list[int]]) -> None:
    pooled = np.sum(rows, axis=0)
    held = [np.array(row) for row in rows if sum(row)]
    apart = [0.5 * sum(abs(x / row.sum() - y / pooled.sum()) for x, y in zip(row, pooled, strict=True)) for row in held]
    assert mean_from_pooled(np.array(rows)) == pytest.approx(np.mean(apart) if apart else 0.0, abs=1e-12)


def test_distance_from_the_pooled_labels_of_stored_counts_is_what_its_definition_gives() -> None:
    # Shares (1, 0) and (1/3, 2/3), pooled (1/2, 1/2): distances 1/2 and 1/6. A client without examples is left out.
    assert mean_from_pooled(np.array([[1, 0], [1, 2], [0, 0]])) == pytest.approx(1 / 3)
    assert mean_from_pooled(np.full((4, 3), 7)) == 0.0


def test_the_manifest_says_who_holds_what_and_survives_json() -> None:
    labels = np.array([3, 3, 7, 7, 7, 3])
    parts = [np.array([0, 2, 4]), np.array([1, 3, 5])]
    splits = [{"train": part[:2], "test": part[2:]} for part in parts]
    record = manifest(parts, labels, how={"name": "own", "seed": 1}, splits=splits)
    assert json.loads(json.dumps(record)) == record
    assert record["clients"][1] == {"client": 1, "train": [1, 3], "test": [5]}
    assert record["statistics"] == {
        "clients": 2,
        "examples": 6,
        "sizes": [3, 3],
        "classes": [3, 7],
        "histogram": [[1, 2], [2, 1]],
        "mean_total_variation": pytest.approx(1 / 3),
        "mean_from_pooled": pytest.approx(1 / 6),
    }
    assert manifest(parts, labels, how={})["clients"][0] == {"client": 0, "indices": [0, 2, 4]}
    with pytest.raises(ValueError, match="client 0"):
        manifest(parts, labels, how={}, splits=list(reversed(splits)))
