"""Inner products, norms and distances of low-rank products, from Gram matrices of the factors.

<BA, B'A'>_F = tr((B^T B')(A' A^T)) costs (m + n) r r' where the dense form costs m n (r + r'). The Gram form
is a difference of large numbers when two products nearly coincide: in float64 it resolves a squared distance
down to about 1e-16 (||B|| ||A||)^2. `distance` and `mixture_distance` factor the difference instead and
resolve the *distance* down to about 1e-16 ||B|| ||A||, at the price of two QR and no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.maths.stacking import Factors, cast, check_products, common_dtype, stack_factors, stack_one_sided

BLOCKS = 4
"""Into how many a Gram matrix is cut so that what is known by symmetry is not computed: 5/8 of the work with 4."""


def lower_gram(X: Tensor) -> Tensor:
    """X^T X (..., q, q) of X (..., m, q) on and below its diagonal; above it, what the blocks hold, or 0."""
    q = X.shape[-1]
    gram = X.new_zeros(*X.shape[:-2], q, q)
    for rows in _blocks(q):
        gram[..., rows, : rows.stop] = X[..., rows].mT @ X[..., : rows.stop]
    return gram


def whole_gram(X: Tensor) -> Tensor:
    """X^T X (..., q, q) of X (..., m, q), at the cost of `lower_gram`."""
    gram = lower_gram(X)
    for rows in _blocks(X.shape[-1]):
        gram[..., : rows.start, rows] = gram[..., rows, : rows.start].mT
    return gram


def _blocks(q: int) -> list[slice]:
    step = max(1, -(-q // BLOCKS))
    return [slice(top, min(top + step, q)) for top in range(0, q, step)]


def inner(B: Tensor, A: Tensor, B2: Tensor, A2: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """<BA, B2 A2>_F, differentiable in all four.

    Args:
        B, A: factors (..., m, r) and (..., r, n).
        B2, A2: factors (..., m, r2) and (..., r2, n); r2 may differ from r, leading axes broadcast.
        dtype: of the computation. float64 also keeps autocast from lowering the Gram matrices to bfloat16.

    Returns:
        (...,) in the factors' dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    return _inner(cast((B, A), dtype), cast((B2, A2), dtype)).to(common_dtype((B, A), (B2, A2)))


def squared_norm(B: Tensor, A: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """||BA||_F^2, differentiable; shapes, dtype and errors as in `inner`."""
    product = cast((B, A), dtype)
    return _inner(product, product).to(common_dtype((B, A)))


def squared_distance(B: Tensor, A: Tensor, B2: Tensor, A2: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """||BA - B2 A2||_F^2 >= 0, differentiable in all four; shapes, dtype and errors as in `inner`.

    Rounding may take the difference of the Gram terms below 0: the value is then 0, while the gradient
    (2 (B A A^T - B2 A2 A^T) with respect to B) stays what it is. Source: FedPA-LoRA, Eq. 3.
    """
    first, second = cast((B, A), dtype), cast((B2, A2), dtype)
    raw = _inner(first, first) - 2 * _inner(first, second) + _inner(second, second)
    return (raw + (raw.clamp(min=0) - raw).detach()).to(common_dtype((B, A), (B2, A2)))


def cosine(B: Tensor, A: Tensor, B2: Tensor, A2: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """<BA, B2 A2> / (||BA|| ||B2 A2||), 0 where a product vanishes, differentiable elsewhere in all four.

    Shapes, dtype and errors as in `inner`. Source: LoRA-FAIR (arXiv 2411.14961).
    """
    first, second = cast((B, A), dtype), cast((B2, A2), dtype)
    squares = _inner(first, first) * _inner(second, second)
    alive = squares > 0
    value = torch.where(alive, _inner(first, second) / torch.where(alive, squares, 1).sqrt(), 0)
    return value.to(common_dtype((B, A), (B2, A2)))


@torch.no_grad()
def distance(B: Tensor, A: Tensor, B2: Tensor, A2: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """||BA - B2 A2||_F, accurate also when the products nearly coincide; not differentiable.

    QR of [B, B2] and [A; -A2]^T, then the norm of the core R_B R_A^T. Shapes, dtype and errors as in `inner`.
    """
    B_both, A_both = stack_one_sided([(B, A), (B2, A2)], [1.0, -1.0], dtype=dtype)
    R_B = torch.linalg.qr(B_both, mode="r").R
    R_A = torch.linalg.qr(A_both.mT, mode="r").R
    norm: Tensor = torch.linalg.matrix_norm(R_B @ R_A.mT)
    return norm.to(common_dtype((B, A), (B2, A2)))


def mixture_squared_norm(
    factors: Sequence[Factors], coefficients: Sequence[float], *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """||sum_i c_i B_i A_i||_F^2 = sum_uv c_u c_v <B_u A_u, B_v A_v>, differentiable in the factors.

    Args:
        factors: pairs B_i (..., m, r_i), A_i (..., r_i, n).
        coefficients: one c_i >= 0 per pair.
        dtype: of the computation.

    Returns:
        (...,) in the factors' dtype.

    Raises:
        ValueError: as `stack_factors`.
    """
    stacked = stack_factors(factors, coefficients, dtype=dtype)
    return _inner(stacked, stacked).to(common_dtype(*factors))


@torch.no_grad()
def mixture_distance(
    B: Tensor,
    A: Tensor,
    factors: Sequence[Factors],
    coefficients: Sequence[float],
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """||BA - sum_i c_i B_i A_i||_F, accurate also when it nearly vanishes; not differentiable.

    Args:
        B, A: factors (..., m, r) and (..., r, n) of what stands for the mixture.
        factors: pairs B_i (..., m, r_i), A_i (..., r_i, n).
        coefficients: one c_i >= 0 per pair.
        dtype: of the computation.

    Returns:
        (...,) in the dtype of B and A.

    Raises:
        ValueError: as `stack_factors`, or B, A that do not fit.
    """
    mixture = stack_factors(factors, coefficients, dtype=dtype)
    return distance(B, A, *mixture, dtype=dtype).to(common_dtype((B, A)))


def _inner(first: Factors, second: Factors) -> Tensor:
    check_products([first, second])
    (B, A), (B2, A2) = first, second
    return ((B.mT @ B2) * (A @ A2.mT)).sum(dim=(-2, -1))
