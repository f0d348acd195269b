"""Dense twins of the factored routines: form every m x n matrix, in float64, and read the formula off."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mixture(factors: Sequence[tuple[Tensor, Tensor]], coefficients: Sequence[float]) -> Tensor:
    """sum_i c_i B_i A_i, (..., m, n)."""
    products = [c * (B.double() @ A.double()) for (B, A), c in zip(factors, coefficients, strict=True)]
    return torch.stack(products).sum(dim=0)


def best_rank(D: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The truncated SVD of D as a product (..., m, n), singular values (..., q), and ||D - product||_F."""
    U, S, Vh = torch.linalg.svd(D, full_matrices=False)
    product = (U[..., :rank] * S[..., None, :rank]) @ Vh[..., :rank, :]
    return product, S, torch.linalg.matrix_norm(D - product)


def inner(B: Tensor, A: Tensor, B2: Tensor, A2: Tensor) -> Tensor:
    """<BA, B2 A2>_F, entry by entry."""
    return ((B @ A) * (B2 @ A2)).sum(dim=(-2, -1))


def squared_distance(B: Tensor, A: Tensor, B2: Tensor, A2: Tensor) -> Tensor:
    """||BA - B2 A2||_F^2, entry by entry."""
    return (B @ A - B2 @ A2).square().sum(dim=(-2, -1))


def energy_rank(singular_values: Sequence[float], tau: float) -> int:
    """Count singular values until their squared sum exceeds a share tau of the whole."""
    total = sum(s * s for s in singular_values)
    for rank in range(1, len(singular_values) + 1):
        if sum(s * s for s in singular_values[:rank]) > tau * total:
            return rank
    return max(len(singular_values), 1) if total > 0 else 1
