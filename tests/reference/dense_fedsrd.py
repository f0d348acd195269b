"""FedSRD's client and server halves with whole matrices and loops, in fp64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def importance(delta: Tensor, other: Tensor, factor: str) -> Tensor:
    """|delta| times the norm of what each entry is multiplied with, entry by entry."""
    made = torch.zeros_like(delta)
    for row in range(delta.shape[0]):
        for column in range(delta.shape[1]):
            beside = other[:, row] if factor == "A" else other[column]
            made[row, column] = delta[row, column].abs() * beside.square().sum().sqrt()
    return made


def ratio(values: Tensor, base: float, growth: float, most: float) -> float:
    """The share to leave out, from the moments of the values."""
    listed = values.flatten().tolist()
    mean = sum(listed) / len(listed)
    second, fourth = (sum((x - mean) ** power for x in listed) / len(listed) for power in (2, 4))
    return base + min(most, growth * math.log(max(fourth / second**2, 1.0)))


def sparsified(delta: Tensor, importance: Tensor, share: float) -> Tensor:
    """Entries below the quantile set to zero, the L1 norm restored."""
    left = torch.where(importance >= torch.quantile(importance, share), delta, torch.zeros_like(delta))
    return left * (delta.abs().sum() / left.abs().sum())


def cut(W: Tensor, rank: int) -> Tensor:
    """The best approximation of this rank."""
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    return U[:, :rank] @ torch.diag(S[:rank]) @ Vh[:rank]


def step(W: Tensor, B: Tensor, A: Tensor, factor: str) -> Tensor:
    """The least-squares solution (of least norm) of (B + dB) A = W for dB, or B (A + dA) = W for dA."""
    apart = W - B @ A
    if factor == "A":
        return torch.linalg.lstsq(B, apart, driver="gelsd").solution
    return torch.linalg.lstsq(A.mT, apart.mT, driver="gelsd").solution.mT
