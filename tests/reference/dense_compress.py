"""Truncations the slow way: whole matrices, all inputs at once, one rank at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def truncated(M: Tensor, k: int) -> Tensor:
    """The best approximation of M of rank k."""
    U, S, Vh = torch.linalg.svd(M, full_matrices=False)
    return (U[:, :k] * S[:k]) @ Vh[:k]


def dense_asvd(W: Tensor, X: Tensor, k: int, alpha: float) -> Tensor:
    """X: (d_in, T)."""
    S = torch.diag(X.abs().mean(dim=1) ** alpha + 1e-6)
    return truncated(W @ S, k) @ torch.linalg.inv(S)


def dense_svd_llm(W: Tensor, X: Tensor, k: int) -> Tensor:
    """The rank-k matrix nearest to W on X: W projected on the first left singular vectors of W X."""
    U = torch.linalg.svd(W @ X, full_matrices=False).U[:, :k]
    return U @ U.mT @ W


def dense_dobi(W: Tensor, batches: Sequence[Tensor], k: int) -> Tensor:
    """W projected on the first eigenvectors of the sum of each batch's projector; batches (d_in, T_b)."""
    pooled = torch.zeros(len(W), len(W), dtype=W.dtype)
    for X in batches:
        _, S, V = torch.linalg.svd((W @ X).mT, full_matrices=False)
        V = V[:k][S[:k] > 1e-6 * S[0]]  # no more directions than the batch has
        pooled += V.mT @ V
    F = torch.linalg.eigh(pooled).eigenvectors[:, -k:]
    return F @ F.mT @ W


def dense_left(W: Tensor, V: Tensor, X: Tensor) -> Tensor:
    """The least-squares U of W X ~ U V X."""
    return torch.linalg.lstsq((V @ X).mT, (W @ X).mT).solution.mT


def output_error(W: Tensor, other: Tensor, X: Tensor) -> float:
    """||(W - W') X||_F."""
    return float(torch.linalg.matrix_norm((W - other) @ X))
