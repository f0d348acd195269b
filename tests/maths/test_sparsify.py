"""Importance, adaptive pruning and random masks: fixture N29, the slow twin, counts, mass."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense_fedsrd as slow

from coterie.maths.keys import root_key
from coterie.maths.sparsify import (
    at_least_quantile,
    importance_of_A,
    importance_of_B,
    kept_count,
    kurtosis,
    pruning_ratio,
    random_count,
    random_mask,
    same_mass,
)

SIZES = st.integers(2, 9)


def matrix(name: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return root_key(seed).fold(name).normal((rows, columns), dtype=torch.float64)


def test_one_entry_among_four_has_kurtosis_seven_thirds_and_ratio_0_9347() -> None:
    """N29."""
    values = torch.tensor([0.0, 0.0, 0.0, 1.0])
    assert kurtosis(values) == pytest.approx(7 / 3)
    assert pruning_ratio(values, 0.85, 0.1, 0.11) == pytest.approx(0.9347, abs=5e-5)
    assert pruning_ratio(values, 0.85, 0.1, 0.05) == pytest.approx(0.9)


def test_equal_entries_have_the_least_kurtosis_and_prune_no_more_than_the_base() -> None:
    assert kurtosis(torch.full((3, 4), 0.7)) == 1.0 and kurtosis(torch.zeros(5)) == 1.0
    assert pruning_ratio(torch.zeros(5), 0.85, 0.1, 0.11) == 0.85
    assert kurtosis(root_key(0).normal((100_000,))) == pytest.approx(3.0, rel=0.05)


@given(m=SIZES, n=SIZES, r=st.integers(1, 4), seed=st.integers(0, 50))
def test_importance_ratio_and_pruning_equal_the_slow_twin(m: int, n: int, r: int, seed: int) -> None:
    B, A, dB, dA = matrix("B", m, r, seed), matrix("A", r, n, seed), matrix("dB", m, r, seed), matrix("dA", r, n, seed)
    for factor, delta, found in (("A", dA, importance_of_A(dA, B)), ("B", dB, importance_of_B(dB, A))):
        expected = slow.importance(delta, B if factor == "A" else A, factor)
        assert torch.allclose(found, expected, atol=1e-12)
        share = pruning_ratio(found, 0.5, 0.1, 0.11)
        assert share == pytest.approx(slow.ratio(expected, 0.5, 0.1, 0.11))
        mask = at_least_quantile(found, share)
        assert torch.allclose(same_mass(delta, mask), slow.sparsified(delta, expected, share), atol=1e-12)


@given(rows=SIZES, columns=SIZES, ratio=st.floats(0, 0.99), seed=st.integers(0, 50))
def test_so_many_entries_are_kept_as_said_and_the_l1_norm_stays(
    rows: int, columns: int, ratio: float, seed: int
) -> None:
    delta = matrix("delta", rows, columns, seed)
    mask = at_least_quantile(delta.abs(), ratio)
    assert int(mask.sum()) == kept_count(delta.numel(), ratio) >= 1
    assert float(same_mass(delta, mask).abs().sum()) == pytest.approx(float(delta.abs().sum()))


def test_nothing_pruned_is_the_identity() -> None:
    delta = matrix("delta", 5, 4)
    mask = at_least_quantile(delta.abs(), 0.0)
    assert bool(mask.all()) and torch.equal(same_mass(delta, mask), delta)


def test_entries_that_tie_with_the_threshold_are_kept() -> None:
    values = torch.tensor([1.0, 2.0, 2.0, 2.0, 3.0])
    assert at_least_quantile(values, 0.75).tolist() == [False, True, True, True, True]
    assert torch.equal(same_mass(torch.zeros(3), torch.ones(3, dtype=torch.bool)), torch.zeros(3))


def test_a_random_mask_has_its_size_and_every_entry_the_same_chance() -> None:
    total = torch.zeros(6, 5)
    for number in range(2000):
        mask = random_mask((6, 5), 0.8, root_key(number))
        assert int(mask.sum()) == random_count(30, 0.8) == 6
        total += mask
    share, spread = 6 / 30, math.sqrt(0.2 * 0.8 / 2000)
    assert float((total / 2000 - share).abs().max()) < 5 * spread
    first = root_key(1).permutation(30)[:6].tolist()
    assert random_mask((6, 5), 0.8, root_key(1)).flatten().nonzero().flatten().tolist() == sorted(first)
    assert bool(random_mask((6, 5), 0.0, root_key(1)).all())
    assert random_count(5, 0.99) == 1
