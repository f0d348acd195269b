"""Projection onto simplices and Sinkhorn scaling by blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.dense_extraction import nearest_by_bisection, scaled_one_by_one

from coterie.maths.keys import root_key
from coterie.maths.simplex import balanced, block_sums, project_rows

WIDE = torch.float64


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 30), st.integers(0, 10**6), st.sampled_from([1e-3, 1.0, 50.0]))
def test_the_projection_is_the_nearest_point_of_the_simplex(rows: int, width: int, seed: int, std: float) -> None:
    values = root_key(seed).normal((rows, width), std, WIDE)
    found = project_rows(values)
    assert float(found.min()) >= 0 and torch.allclose(found.sum(dim=1), torch.ones(rows, dtype=WIDE), atol=1e-12)
    assert torch.allclose(found, nearest_by_bisection(values), atol=1e-9)


def test_points_of_the_simplex_stay_and_far_ones_become_corners() -> None:
    there = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]], dtype=WIDE)
    assert torch.allclose(project_rows(there), there, atol=1e-15)
    assert project_rows(torch.tensor([[9.0, 1.0, 1.0]])).tolist() == [[1.0, 0.0, 0.0]]
    with pytest.raises(ValueError, match="no entries"):
        project_rows(torch.zeros(2, 0))


def test_n25_block_scaling_of_the_specification() -> None:
    """Pool of clients (0, 0, 1), M = N = 2; proportions within a client's block stay."""
    omega = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=WIDE)
    owners = torch.tensor([0, 0, 1])
    found = balanced(omega, owners, 2)
    expected = torch.tensor([[0.443814, 0.266288, 0.289898], [0.144949, 0.144949, 0.710102]], dtype=WIDE)
    assert torch.allclose(found, expected, atol=1e-6)
    C = torch.tensor([[0.710102, 0.289898], [0.289898, 0.710102]], dtype=WIDE)
    assert torch.allclose(block_sums(found, owners, 2), C, atol=1e-6)
    assert float(found[0, 0] / found[0, 1]) == pytest.approx(0.5 / 0.3, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(0, 10**6))
def test_scaled_weights_have_the_marginals_and_are_the_dense_twins(M: int, blocks: list[int], seed: int) -> None:
    owners = torch.repeat_interleave(torch.arange(len(blocks)), torch.tensor(blocks))
    omega = root_key(seed).uniform((M, len(owners)), 0.1, 1.0, WIDE)
    found = balanced(omega, owners, len(blocks))
    assert torch.allclose(found, scaled_one_by_one(omega, owners.tolist(), 20), atol=1e-12)
    assert torch.allclose(found.sum(dim=1), torch.ones(M, dtype=WIDE), atol=1e-14)
    columns = block_sums(found, owners, len(blocks)).sum(dim=0)
    assert torch.allclose(columns, torch.full_like(columns, M / len(blocks)), atol=1e-6)
    again = balanced(found, owners, len(blocks))
    assert torch.allclose(again, found, atol=1e-6)


def test_weights_that_were_clipped_to_zero_do_not_stop_the_scaling() -> None:
    omega = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=WIDE)
    found = balanced(omega, torch.tensor([0, 1, 1]), 2)
    assert bool(found.isfinite().all()) and torch.allclose(found.sum(dim=1), torch.ones(2, dtype=WIDE))
    assert torch.allclose(found[:, 1], found[:, 2])


def test_a_client_without_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match="of 2 clients only 1"):
        balanced(torch.ones(1, 2), torch.tensor([0, 0]), 2)


def test_block_sums_of_the_pool_are_the_contributions() -> None:
    omega = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    assert block_sums(omega, torch.tensor([0, 0, 1]), 2).tolist() == [[0.8, 0.2]]
