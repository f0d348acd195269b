"""Sums of low-rank products written as one product of stacked factors, without forming a dense matrix."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Factors = tuple[Tensor, Tensor]
"""B (..., m, r) and A (..., r, n) of a product BA (..., m, n); r may be 0."""


def check_product(B: Tensor, A: Tensor) -> None:
    """Refuse factors that cannot be multiplied.

    Raises:
        ValueError: with both shapes, unless B is (..., m, r) and A is (..., r, n).
    """
    if B.dim() < 2 or A.dim() < 2 or B.shape[-1] != A.shape[-2]:
        raise ValueError(f"B {tuple(B.shape)} and A {tuple(A.shape)} are not factors (..., m, r) and (..., r, n)")


def check_products(factors: Sequence[Factors]) -> None:
    """Refuse an empty list and products that cannot be added.

    Raises:
        ValueError: with the position and the shapes of the first pair that does not fit the pair 0.
    """
    if not factors:
        raise ValueError("no factors: the sum of no products has no shape; give at least one pair (B, A)")
    for i, (B, A) in enumerate(factors):
        check_product(B, A)
        first_B, first_A = factors[0]
        if (B.shape[-2], A.shape[-1]) != (first_B.shape[-2], first_A.shape[-1]):
            raise ValueError(
                f"product {i} is {B.shape[-2]} x {A.shape[-1]} but product 0 is "
                f"{first_B.shape[-2]} x {first_A.shape[-1]}: they cannot be added"
            )


def cast(factors: Factors, dtype: torch.dtype) -> Factors:
    """Both factors in `dtype`."""
    return factors[0].to(dtype), factors[1].to(dtype)


def common_dtype(*factors: Factors) -> torch.dtype:
    """The dtype that torch promotes all the factors to."""
    dtypes = [x.dtype for pair in factors for x in pair]
    return functools.reduce(torch.promote_types, dtypes)


def stack_factors(
    factors: Sequence[Factors], coefficients: Sequence[float], *, dtype: torch.dtype | None = None
) -> Factors:
    """B_cat = [sqrt(c_1) B_1, ...] and A_cat = [sqrt(c_1) A_1; ...], so that B_cat A_cat = sum_i c_i B_i A_i.

    The square root stands on both sides: the two stacks are balanced and neither alone carries the weights.
    Source: FedPA-LoRA, Eq. 4.

    Args:
        factors: pairs B_i (..., m, r_i), A_i (..., r_i, n); ranks may differ, leading axes broadcast.
        coefficients: one c_i >= 0 per pair; a pair with c_i = 0 is left out.
        dtype: of the weighting and of the result; that of the factors if None.

    Returns:
        B_cat (..., m, r_tot) and A_cat (..., r_tot, n); r_tot is the sum of the r_i that are kept (0 if every
        coefficient is 0).

    Raises:
        ValueError: no factors, shapes that do not fit, a coefficient that is negative or not finite.
    """
    for i, c in enumerate(coefficients):
        if c < 0:
            raise ValueError(f"coefficient {i} is {c}: weights of an average must not be negative")
    roots = [math.sqrt(c) for c in _finite(factors, coefficients)]
    return _stack(factors, roots, roots, dtype)


def stack_one_sided(
    factors: Sequence[Factors], coefficients: Sequence[float], *, dtype: torch.dtype | None = None
) -> Factors:
    """B_cat = [B_1, ...] and A_cat = [c_1 A_1; ...], so that B_cat A_cat = sum_i c_i B_i A_i, any real c_i.

    Shapes, dtype and errors as in `stack_factors`, but a coefficient may be negative (differences).
    Source: FLoRA (arXiv 2409.05976).
    """
    weights = _finite(factors, coefficients)
    return _stack(factors, [1.0] * len(weights), weights, dtype)


def _finite(factors: Sequence[Factors], coefficients: Sequence[float]) -> list[float]:
    if len(factors) != len(coefficients):
        raise ValueError(f"{len(factors)} pairs of factors but {len(coefficients)} coefficients")
    for i, c in enumerate(coefficients):
        if not math.isfinite(c):
            raise ValueError(f"coefficient {i} is {c}: it must be a finite number")
    return [float(c) for c in coefficients]


def _stack(
    factors: Sequence[Factors], on_B: Sequence[float], on_A: Sequence[float], dtype: torch.dtype | None
) -> Factors:
    check_products(factors)
    batch = np.broadcast_shapes(*(x.shape[:-2] for pair in factors for x in pair))
    dtype = dtype or common_dtype(*factors)
    kept = [i for i, c in enumerate(on_A) if c != 0]
    if not kept:
        B, A = factors[0]
        return (
            B.new_zeros((*batch, B.shape[-2], 0), dtype=dtype),
            A.new_zeros((*batch, 0, A.shape[-1]), dtype=dtype),
        )
    left = torch.cat([factors[i][0].expand(*batch, -1, -1) for i in kept], dim=-1).to(dtype)
    right = torch.cat([factors[i][1].expand(*batch, -1, -1) for i in kept], dim=-2).to(dtype)

    def per_rank(weights: Sequence[float]) -> Tensor:
        # Weights never in half precision: rounding one would move a whole client, not just its last bits.
        repeated = [weights[i] for i in kept for _ in range(factors[i][0].shape[-1])]
        return torch.tensor(repeated, dtype=torch.promote_types(dtype, torch.float32), device=left.device)

    # In place, since `cat` made both; weights of 1, as on one side of a one-sided stack, leave it as it is.
    return left if set(on_B) == {1.0} else left.mul_(per_rank(on_B)), right.mul_(per_rank(on_A)[:, None])
