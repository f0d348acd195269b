"""Updates that experts reconstruct: exact mixtures, points off the simplex, the experts' own plane."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coterie.maths.keys import root_key
from coterie.theory.fedsee.geometry import barycentres, distances
from coterie.theory.fedsee.reconstruction import (
    affine_weights,
    convex_weights,
    derangements,
    plane_coordinates,
    residuals,
)

ALPHA = torch.tensor([[1, 0, 0], [0, 0.5, 0.5], [0.6, 0.2, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64)


def experts(seed: int, M: int = 3, common: float = 0.0) -> Tensor:
    return root_key(seed).normal((M, 7, 2), dtype=torch.float64) + common


@given(seed=st.integers(0, 50), common=st.sampled_from([0.0, 1e3]))
def test_exact_mixtures_have_no_residual_and_give_their_weights_back(seed: int, common: float) -> None:
    B = experts(seed, common=common)
    updates = barycentres(ALPHA, B)
    assert float(residuals(updates, B, ALPHA).max()) < 1e-9
    torch.testing.assert_close(convex_weights(updates, B), ALPHA, atol=1e-6, rtol=0)
    torch.testing.assert_close(affine_weights(updates, B), ALPHA, atol=1e-9, rtol=0)
    shuffled = torch.stack([residuals(updates, B, weights) for weights in derangements(ALPHA)])
    assert float(shuffled.min()) > 0.01


@given(seed=st.integers(0, 50))
def test_the_best_fits_are_the_best_among_their_own(seed: int) -> None:
    B, updates = experts(seed), 0.8 * root_key(seed).fold("updates").normal((5, 7, 2), dtype=torch.float64)
    affine = residuals(updates, B, affine_weights(updates, B))
    convex = residuals(updates, B, convex_weights(updates, B))
    assert bool((affine <= convex + 1e-9).all())
    steps = torch.linspace(0, 1, 41, dtype=torch.float64)
    grid = torch.tensor([[a, b, 1 - a - b] for a in steps for b in steps if a + b <= 1 + 1e-12], dtype=torch.float64)
    for client in range(5):
        every = residuals(updates[client].expand(len(grid), 7, 2), B, grid)
        assert float(convex[client]) <= float(every.min()) + 1e-9
        assert float(every.min()) - float(convex[client]) < 0.05
    off = updates - barycentres(affine_weights(updates, B), B)
    inner = torch.einsum("nlr,mlr->nm", off, B[1:] - B[0])
    torch.testing.assert_close(inner, torch.zeros_like(inner), atol=1e-9, rtol=0)


def test_residuals_are_distances_over_the_largest_distance_of_two_experts() -> None:
    B = torch.zeros(3, 2, 1, dtype=torch.float64)
    B[1, 0], B[2, 1] = 3.0, 4.0  # sides 3, 4 and 5
    update = torch.tensor([[[3.0], [4.0]]], dtype=torch.float64)
    third = torch.full((1, 3), 1 / 3, dtype=torch.float64)
    assert float(residuals(update, B, third)) == pytest.approx((2**2 + (8 / 3) ** 2) ** 0.5 / 5)
    torch.testing.assert_close(affine_weights(update, B), torch.tensor([[-1.0, 1.0, 1.0]], dtype=torch.float64))
    torch.testing.assert_close(convex_weights(update, B), torch.tensor([[0, 0.36, 0.64]], dtype=torch.float64))


@given(seed=st.integers(0, 50), M=st.integers(2, 4))
def test_the_plane_keeps_the_experts_distances_and_its_axes(seed: int, M: int) -> None:
    B = experts(seed, M)
    found = plane_coordinates(B, B)
    apart = distances(B, B)
    torch.testing.assert_close(torch.cdist(found, found), apart / apart.max(), atol=1e-9, rtol=1e-9)
    assert found.shape == (M, M - 1) and float(found[0].abs().max()) < 1e-12
    for m in range(1, M):  # expert m + 1 lies on the first m axes, forwards on its own
        assert float(found[m, m:].abs().sum()) < 1e-9 and float(found[m, m - 1]) > 0
    weights = torch.full((1, M), 1 / M, dtype=torch.float64)
    torch.testing.assert_close(plane_coordinates(barycentres(weights, B), B), weights @ found)


def test_experts_without_a_simplex_are_refused() -> None:
    B = experts(0)
    with pytest.raises(ValueError, match="must not be zero"):
        residuals(B, B[:1].expand(3, 7, 2), ALPHA[:3])
    line = torch.stack([B[0], B[1], (B[0] + B[1]) / 2])
    with pytest.raises(ValueError, match="span fewer than 2"):
        plane_coordinates(B, line)


def test_a_derangement_moves_every_entry() -> None:
    moved = derangements(torch.tensor([[0.7, 0.2, 0.1]]))
    torch.testing.assert_close(moved, torch.tensor([[[0.1, 0.7, 0.2]], [[0.2, 0.1, 0.7]]]))
