"""Procrustes rotations: fixture N10, what they minimise, and what a part of the way is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.random_factors import bounded, normal
from torch import Tensor

from coterie.maths.rotation import partial, procrustes

QUARTER = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
EYE = torch.eye(2, dtype=torch.float64)
seeds, sizes = st.integers(0, 10_000), st.integers(1, 5)


def orthogonal(seed: int, r: int) -> Tensor:
    return torch.linalg.qr(normal(seed, r, r)).Q


def test_n10_a_quarter_turn_against_the_identity_is_found_and_undone() -> None:
    R = procrustes(QUARTER.mT, EYE)  # A_i^T onto A_ref^T
    assert torch.allclose(R, QUARTER) and torch.allclose(R.mT @ QUARTER, EYE)


def test_half_of_a_quarter_turn_has_entries_of_0_7071() -> None:
    half = partial(QUARTER, 0.5)
    assert torch.allclose(half.abs(), torch.full((2, 2), math.sqrt(0.5), dtype=torch.float64))
    assert torch.allclose(half @ half, QUARTER)


def test_a_reflection_is_undone_only_where_it_need_not_be_proper() -> None:
    A = torch.diag(torch.tensor([2.0, -1.0], dtype=torch.float64))
    hard, soft = procrustes(A.mT, EYE), partial(procrustes(A.mT, EYE, proper=True), 1.0)
    assert torch.allclose(hard.mT @ A, torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64)))
    assert torch.allclose(soft.mT @ A, A)


@given(seed=seeds, k=st.integers(1, 7), r=sizes, proper=st.booleans())
@bounded
def test_no_other_rotation_comes_nearer(seed: int, k: int, r: int, proper: bool) -> None:
    X, Y = normal(seed, k, r), normal(seed + 1, k, r)
    R = procrustes(X, Y, proper=proper)
    torch.testing.assert_close(R.mT @ R, torch.eye(r, dtype=torch.float64))
    assert not proper or abs(float(torch.linalg.det(R)) - 1) < 1e-10
    for other in range(5):
        Q = orthogonal(seed + 10 + other, r)
        if proper and torch.linalg.det(Q) < 0:
            Q = torch.cat([Q[:, :-1], -Q[:, -1:]], dim=1)
        assert float((X @ R - Y).norm()) <= float((X @ Q - Y).norm()) + 1e-10


@given(seed=seeds, r=sizes, strength=st.floats(0, 1))
@bounded
def test_a_part_of_the_way_is_the_nearest_orthogonal_matrix_to_the_mixture(seed: int, r: int, strength: float) -> None:
    R = procrustes(normal(seed, 6, r), normal(seed + 1, 6, r), proper=True)
    made, mixed = partial(R, strength), (1 - strength) * torch.eye(r, dtype=torch.float64) + strength * R
    torch.testing.assert_close(made.mT @ made, torch.eye(r, dtype=torch.float64))
    for other in range(5):
        assert float((made - mixed).norm()) <= float((orthogonal(seed + other, r) - mixed).norm()) + 1e-10


@given(seed=seeds, r=sizes)
@bounded
def test_the_ends_of_the_way_are_the_identity_and_the_rotation(seed: int, r: int) -> None:
    R = procrustes(normal(seed, 6, r), normal(seed + 1, 6, r), proper=True)
    torch.testing.assert_close(partial(R, 1.0), R)
    torch.testing.assert_close(partial(R, 0.0), torch.eye(r, dtype=torch.float64))


def test_at_rank_one_a_proper_rotation_is_the_identity() -> None:
    assert procrustes(-torch.ones(3, 1), torch.ones(3, 1), proper=True).item() == 1.0
    assert procrustes(-torch.ones(3, 1), torch.ones(3, 1)).item() == -1.0


def test_against_nothing_nothing_is_turned() -> None:
    assert torch.equal(procrustes(normal(1, 4, 3), torch.zeros(4, 3)), torch.eye(3, dtype=torch.float64))


def test_leading_axes_are_problems_of_their_own() -> None:
    X, Y = normal(1, 3, 5, 2), normal(2, 3, 5, 2)
    for proper in (False, True):
        each = torch.stack([procrustes(x, y, proper=proper) for x, y in zip(X, Y, strict=True)])
        torch.testing.assert_close(procrustes(X, Y, proper=proper), each)


def test_shapes_that_do_not_fit_and_strengths_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 3\) cannot be turned onto Y \(4, 2\)"):
        procrustes(torch.zeros(4, 3), torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"between 0 and 1, not 1\.5"):
        partial(EYE, 1.5)
