"""What is kept of the inputs of a layer while text runs through it: sums of a size that does not grow with the text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Moments:
    """Of the inputs x of one batch: gram X X^T (d_in, d_in) and absolute sum_t |x_t| (d_in,) in float64; tokens T."""

    gram: Tensor
    absolute: Tensor
    tokens: int


def moments(rows: Tensor) -> Moments:
    """Of inputs (T, d_in) of any dtype."""
    wide = rows.double()
    return Moments(wide.mT @ wide, wide.abs().sum(dim=0), len(wide))


class Inputs:
    """The sum of the moments of all batches that a layer has seen."""

    def __init__(self) -> None:
        self._sum: Moments | None = None

    def add(self, batch: Moments) -> None:
        """One more batch."""
        before = self._sum
        self._sum = (
            batch
            if before is None
            else Moments(before.gram + batch.gram, before.absolute + batch.absolute, before.tokens + batch.tokens)
        )

    @property
    def gram(self) -> Tensor:
        """G = X X^T, (d_in, d_in), float64."""
        return self._seen.gram

    @property
    def magnitude(self) -> Tensor:
        """mean_t |x_tj|, (d_in,), float64."""
        return self._seen.absolute / self._seen.tokens

    @property
    def tokens(self) -> int:
        """T."""
        return self._seen.tokens

    @property
    def _seen(self) -> Moments:
        assert self._sum is not None, "no batch has been seen"
        return self._sum


def energy(W: Tensor, gram: Tensor) -> float:
    """||W X||_F."""
    wide = W.double()
    return float(((wide @ gram) * wide).sum().clamp(min=0).sqrt())


SHIFT = 1e-10
"""What an eigenvalue 0 of a Gram matrix is raised to, as a share of the largest: above what rounding leaves there."""


def factor_of(gram: Tensor) -> Tensor:
    """L (lower) with L L^T = G, where G is not positive definite after a shift of its diagonal.

    The shift is SHIFT lambda_max - min(lambda_min, 0), so that c G has the factor sqrt(c) L. Source: SVD-LLM's code
    (arXiv 2403.07378), which adds 1e-6 - lambda_min whatever the size of the inputs.
    """
    L: Tensor
    L, failed = torch.linalg.cholesky_ex(gram)
    if int(failed) == 0:
        return L
    values = torch.linalg.eigvalsh(gram)
    # A layer without any input: any shift will do.
    shift = float(SHIFT * values[-1] - values[0].clamp(max=0)) or 1.0
    L = torch.linalg.cholesky(gram + shift * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return L
