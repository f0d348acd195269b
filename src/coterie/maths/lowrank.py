"""Best low-rank approximations of sums of low-rank products, from the factors alone.

Letters: D = sum_i c_i B_i A_i with B_i (..., m, r_i) and A_i (..., r_i, n), r_tot = sum_i r_i, R the rank of
the approximation.
QR and SVD run in float64 unless `dtype` says otherwise; results come back in the dtype of the factors.
Nothing here is to be differentiated: singular vectors have no gradient where singular values coincide.
Sums, norms and distances of products, which are differentiable, come from `stacking` and `gram`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from coterie.maths.gram import (
    distance,
    inner,
    lower_gram,
    mixture_distance,
    mixture_squared_norm,
    squared_distance,
    squared_norm,
)
from coterie.maths.keys import Key
from coterie.maths.randomised import range_factors
from coterie.maths.stacking import Factors, cast, common_dtype, stack_factors, stack_one_sided

__all__ = [
    "BestRank",
    "Factors",
    "balanced",
    "best_rank",
    "canonical_signs",
    "core_svd",
    "distance",
    "energy_rank",
    "inner",
    "mixture_distance",
    "mixture_squared_norm",
    "orthonormal_rows_completed",
    "squared_distance",
    "squared_norm",
    "stack_factors",
    "stack_one_sided",
    "truncate",
    "truncate_energy",
]

Method = Literal["auto", "exact", "randomised"]

RANDOMISED_ABOVE = 1 / 3
"""`best_rank(method="auto")` stays exact while r_tot is at most this share of min(m, n)."""

RANDOMISED_FROM = 128
"""... and while r_tot is below this: exact then takes milliseconds, and sampling errs most on a small D."""

GRAM_FROM = 128
"""Rank of a core from which few leading triples may come from eigenvectors of a Gram matrix ..."""

GRAM_ABOVE = 1e-6
"""... where the last one's squared singular value, and all squares after it together, exceed this share of the first.

So three digits of sixteen are lost at most, and neither a small singular value nor a small tail is taken for another.
"""


@dataclass(frozen=True, eq=False)
class BestRank:
    """A rank-R approximation BA of D.

    Fields:
        B: (..., m, R) = left singular vectors times singular values; columns are orthogonal.
        A: (..., R, n) = right singular vectors; rows are orthonormal.
        singular_values: (..., R), descending, those of BA.
        tail: (...,), ||D - BA||_F.

    Where D has a rank below R, the columns of B, the rows of A and the singular values beyond it are 0.
    """

    B: Tensor
    A: Tensor
    singular_values: Tensor
    tail: Tensor


def canonical_signs(U: Tensor, Vh: Tensor) -> Factors:
    """Flip pairs of singular vectors so that the largest-magnitude entry of each left one is positive.

    Singular vectors are unique only up to a common sign, which differs between LAPACK builds. Of entries of
    equal magnitude the one with the lowest index decides; a zero vector keeps its sign.

    Args:
        U: (..., m, q), left vectors in columns.
        Vh: (..., q, n), right vectors in rows.

    Returns:
        U and Vh, of the same shapes and dtypes.
    """
    if U.shape[-2] == 0:
        return U, Vh
    largest = U.gather(-2, U.abs().argmax(dim=-2, keepdim=True))
    sign = torch.where(largest < 0, -1, 1).to(U.dtype)
    return U * sign, Vh * sign.mT


@torch.no_grad()
def core_svd(B: Tensor, A: Tensor, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """SVD of the product BA: reduced QR of B and of A^T, then the SVD of the core R_B R_A^T.

    Cost (m + n) r^2 + r^3. Right also for r above m or n: the core is min(m, r) x min(n, r).
    Source: FedPA-LoRA, Eqs. 5-6; SeFoRA, Algorithm 4, lines 4-5.

    Args:
        B, A: factors (..., m, r) and (..., r, n), leading axes broadcast.
        dtype: of the computation, float64 or float32.

    Returns:
        U (..., m, q), S (..., q) descending, Vh (..., q, n) with q = min(m, n, r), BA = U diag(S) Vh,
        signs canonical, in the factors' dtype.

    Raises:
        ValueError: shapes that do not fit.
        torch.linalg.LinAlgError: entries that are not finite.
    """
    U, S, Vh = _core_svd(stack_factors([(B, A)], [1.0], dtype=dtype))
    out = common_dtype((B, A))
    return U.to(out), S.to(out), Vh.to(out)


@torch.no_grad()
def best_rank(
    factors: Sequence[Factors],
    coefficients: Sequence[float],
    rank: int,
    *,
    method: Method = "auto",
    oversample: int = 2,
    power: int = 0,
    key: Key | None = None,
    dtype: torch.dtype = torch.float64,
) -> BestRank:
    """The best rank-R approximation of D = sum_i c_i B_i A_i in the Frobenius norm, never forming D.

    exact: `core_svd` of the stacked factors, cost (m + n) r_tot^2 + r_tot^3. Its tail is the root of the
    discarded squared singular values. In float64, few triples of a core of rank 128 or more come from eigenvectors
    of a Gram matrix where neither sigma_R nor the tail is below 1e-3 sigma_1: to within three digits as exact.

    randomised: `range_factors` with R + `oversample` directions, then the SVD of the projected product and
    its rank-R part; each product with D costs (m + n) r_tot (R + oversample). With p = oversample >= 2 and
    power 0, E||BA - D||_2 <= [2 + 4 sqrt((R + p) min(m, n)) / (p - 1)] sigma_{R+1}(D). BA is D projected on R
    orthonormal directions, so the tail is the root of ||D||_F^2 - ||BA||_F^2, with ||D||_F^2 from Gram
    matrices in float64. It has no sampling error; below about 1e-8 ||D||_F (1e-4 with float32) it is
    rounding, or 0. The Gram matrices cost (m + n) r_tot^2: far cheaper than QR, yet most of the time at large
    r_tot.

    auto: randomised where a key is given, R + `oversample` < min(m, n, r_tot), r_tot > min(m, n) / 3 and
    r_tot >= 128; else exact. Without a key nothing is ever random. On one core the randomised form was 2 to 6
    times as fast there (m = n from 256 to 4096, R = 8). Its tail lay 0.5% to 6% above the least one for clients
    that agree in nothing, and up to twice it for ten of rank 16 that share a rank-16 part at m = n = 384: where the
    spectrum has a gap at R, take power steps or the exact form.

    Source: FedPA-LoRA, Eqs. 4-6, and Remark 2 (randomised; Halko et al. 2011, Theorem 1.1).

    Args:
        factors: pairs B_i (..., m, r_i), A_i (..., r_i, n); ranks may differ, leading axes broadcast.
        coefficients: one c_i >= 0 per pair; a pair with c_i = 0 is left out.
        rank: R >= 0; may exceed what D can have.
        method: see above.
        oversample: sampled directions beyond R, >= 0 (randomised only).
        power: power steps of the range finder, >= 0 (randomised only).
        key: of the test matrix (randomised only).
        dtype: of the computation, float64 or float32.

    Returns:
        B (..., m, R), A (..., R, n), singular values and tail, in the factors' dtype. Columns and rows beyond
        the rank of D, as far as rounding lets it be known, are 0, so the shapes never depend on the values.

    Raises:
        ValueError: as `stack_factors`; a negative rank, oversample or power; randomised without a key.
        torch.linalg.LinAlgError: entries that are not finite.
    """
    if rank < 0 or oversample < 0 or power < 0:
        raise ValueError(f"rank {rank}, oversample {oversample} and power {power} must not be negative")
    if method not in get_args(Method):
        raise ValueError(f"best_rank has no method {method!r}; known: {', '.join(get_args(Method))}")
    if method == "randomised" and key is None:
        raise ValueError("best_rank(method='randomised') draws a test matrix: give it a key")
    D = stack_factors(factors, coefficients, dtype=dtype)
    m, r_tot, n = D[0].shape[-2], D[0].shape[-1], D[1].shape[-1]
    size = rank + oversample
    large = r_tot >= RANDOMISED_FROM and r_tot > RANDOMISED_ABOVE * min(m, n)
    saves = large and size < min(m, n, r_tot)
    if key is not None and (method == "randomised" or (method == "auto" and saves)):
        U, S, Vh = _core_svd(range_factors(*D, size, key, power=power), rank)
        S = _above_rounding(S, D)
        left_out = squared_norm(*cast(D, torch.float64)) - S[..., :rank].double().square().sum(dim=-1)
        tail = left_out.clamp(min=0).sqrt()
    else:
        U, S, Vh = _core_svd(D, rank)
        S = _above_rounding(S, D)
        tail = torch.linalg.vector_norm(S[..., rank:], dim=-1)
    return _leading(U, S, Vh, rank, tail, common_dtype(*factors))


def truncate(B: Tensor, A: Tensor, rank: int, *, dtype: torch.dtype = torch.float64) -> BestRank:
    """The best rank-`rank` approximation of one product BA, exact; shapes and errors as in `best_rank`."""
    return best_rank([(B, A)], [1.0], rank, method="exact", dtype=dtype)


def energy_rank(singular_values: Tensor, tau: float) -> Tensor:
    """The smallest r' >= 1 with sum_{j <= r'} sigma_j^2 > tau sum_j sigma_j^2, or q where no r' exceeds it.

    No energy at all gives 1, and so does q = 0. Source: SeFoRA, Algorithm 4, line 6.

    Args:
        singular_values: (..., q), descending.
        tau: share of the energy, 0 <= tau <= 1.

    Returns:
        (...,), int64.

    Raises:
        ValueError: tau outside [0, 1].
    """
    if not 0 <= tau <= 1:
        raise ValueError(f"tau is {tau}: a share of the energy lies between 0 and 1")
    q = singular_values.shape[-1]
    cumulative = singular_values.double().square().cumsum(dim=-1)
    total = cumulative[..., -1:]
    short = (cumulative <= tau * total).sum(dim=-1)
    has_energy = (total > 0).any(dim=-1)
    return torch.where(has_energy, (short + 1).clamp(max=max(q, 1)), 1)


@torch.no_grad()
def truncate_energy(B: Tensor, A: Tensor, tau: float, *, dtype: torch.dtype = torch.float64) -> BestRank:
    """The best approximation of BA of the rank that `energy_rank` finds in its spectrum.

    With leading axes each product has its own r'; R is the largest, and what lies beyond its own r' is 0.
    Shapes and errors as in `best_rank` and `energy_rank`. Source: SeFoRA, Algorithm 4.
    """
    D = stack_factors([(B, A)], [1.0], dtype=dtype)
    U, S, Vh = _core_svd(D)
    S = _above_rounding(S, D)
    ranks = energy_rank(S, tau)
    beyond = torch.arange(S.shape[-1], device=S.device) >= ranks[..., None]
    tail = torch.linalg.vector_norm(S.where(beyond, 0), dim=-1)
    return _leading(U, S.where(~beyond, 0), Vh, int(ranks.max()), tail, common_dtype((B, A)))


def balanced(best: BestRank) -> Factors:
    """U sqrt(S) (..., m, R) and sqrt(S) Vh (..., R, n): the same product, its scale split evenly.

    Source: SeFoRA, Algorithm 4, line 7.
    """
    root = best.singular_values.sqrt()
    inverse = torch.where(root > 0, 1 / root, 0)
    return best.B * inverse[..., None, :], root[..., :, None] * best.A


@torch.no_grad()
def orthonormal_rows_completed(A: Tensor, rank: int, key: Key, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """A with `rank` rows: its own non-zero rows as they are, random orthonormal ones for the rest.

    Zero rows that `best_rank` returned become trainable again, while the product, with zero columns in B,
    stays what it was. The new rows are orthonormal and orthogonal to every row of A: QR of [A^T, Gaussian],
    of which only the extra columns are taken (the leading ones may come back with flipped signs).

    Args:
        A: (..., r, n), its non-zero rows linearly independent.
        rank: r <= rank <= n.
        key: of the Gaussian, shared by all leading axes.
        dtype: of the computation.

    Returns:
        (..., rank, n) in A's dtype.

    Raises:
        ValueError: rank below r or above n.
    """
    r, n = A.shape[-2], A.shape[-1]
    if not r <= rank <= n:
        raise ValueError(f"cannot complete {r} rows of length {n} to {rank}: rank must lie between {r} and {n}")
    padded = _padded(A, rows=rank - r)
    missing = (padded == 0).all(dim=-1)
    # QR makes each column orthogonal to those before it, so A's own rows have to come first.
    order = missing.to(torch.int8).argsort(dim=-1, stable=True)[..., None].expand_as(padded)
    gaussian = key.normal((rank, n)).to(device=A.device, dtype=dtype)
    rows = torch.where(missing[..., None], gaussian, padded.to(dtype)).gather(-2, order)
    Q = torch.linalg.qr(rows.mT).Q.mT
    completed = torch.empty_like(Q).scatter(-2, order, Q)
    return torch.where(missing[..., None], completed.to(A.dtype), padded)


def _core_svd(D: Factors, rank: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`core_svd` with all singular values but only the first `rank` vectors.

    Q_B and Q_A stay products of reflections, applied to those few vectors: half the work of forming them.
    """
    B, A = D
    size = min(B.shape[-2], *A.shape[-2:])
    found = None
    if rank is not None and 0 < 4 * rank <= size and size >= GRAM_FROM and B.dtype == torch.float64:
        found = _by_gram(D, rank)
    if found is None:
        reflections_B, R_B = _qr(B)
        reflections_A, R_A = _qr(A.mT)
        U, S, Vh = torch.linalg.svd(R_B @ R_A.mT, full_matrices=False)
        found = _apply_Q(reflections_B, U[..., :rank]), S, _apply_Q(reflections_A, Vh[..., :rank, :].mT)
    U, S, V = found
    U, Vh = canonical_signs(U, V.mT)
    return U, S, Vh


def _by_gram(D: Factors, rank: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """The leading triples of D = BA from eigenvectors of a Gram matrix, or None where `GRAM_ABOVE` forbids it.

    With A^T = Q R, the eigenvectors of N^T N for N = B R^T: two thirds of the time of two QR and an SVD. Where n is
    above m, the same of the transposed product. The vectors' errors are those of an SVD times sigma_1 / sigma_rank at
    most. The leading values are exact again, those of N on the span of the vectors; the others, which make the tail,
    err by an ulp of sigma_1^2 / sigma_j.

    Returns:
        U (..., m, rank), S (..., min(m, n, r_tot)) and V (..., n, rank).
    """
    B, A = D
    if A.shape[-1] > B.shape[-2]:
        turned = _by_gram((A.mT, B.mT), rank)
        return turned and turned[::-1]
    reflections, R = _qr(A.mT)
    N = _times_triangle(B, R)
    energy, W = torch.linalg.eigh(lower_gram(N))
    energy, W = energy.flip(-1).clamp(min=0), W.flip(-1)[..., :rank]
    least = GRAM_ABOVE * energy[..., 0]
    if not bool(((energy[..., rank - 1] > least) & (energy[..., rank:].sum(dim=-1) > least)).all()):
        return None
    Q, core = torch.linalg.qr(N @ W)
    U, S, Vh = torch.linalg.svd(core)
    return Q @ U, torch.cat([S, energy[..., rank:].sqrt()], dim=-1), _apply_Q(reflections, W @ Vh.mT)


def _times_triangle(B: Tensor, R: Tensor) -> Tensor:
    """B R^T (..., m, q) for B (..., m, r) and R (..., q, r) that is 0 below its diagonal."""
    q = R.shape[-2]
    step = -(-q // 4)
    return torch.cat([B[..., top:] @ R[..., top : top + step, top:].mT for top in range(0, q, step)], dim=-1)


def _qr(X: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The reflections (packed, tau) of Q and the triangle R (..., min(m, r), r) of X (..., m, r)."""
    packed, tau = torch.geqrf(X)
    return (packed, tau), packed[..., : tau.shape[-1], :].triu()


def _apply_Q(reflections: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """Q x (..., m, k) for the reduced Q (..., m, q) of `_qr` and x (..., q, k)."""
    packed, tau = reflections
    return torch.ormqr(packed, tau, _padded(x, rows=packed.shape[-2] - x.shape[-2]))


def _above_rounding(S: Tensor, D: Factors) -> Tensor:
    """S with 0 for what rounding alone can make of the product D.

    Column by column, QR errs by a few ulp of sum_j ||b_j|| ||a_j||, whatever the factors' scales; the largest
    error seen over dependent and cancelling factors was 3 ulp of it.
    """
    B, A = D
    scale = (torch.linalg.vector_norm(B, dim=-2) * torch.linalg.vector_norm(A, dim=-1)).sum(dim=-1)
    rounding = 10 * torch.finfo(S.dtype).eps * scale[..., None]
    return S.masked_fill(S.le(rounding), 0)


def _leading(U: Tensor, S: Tensor, Vh: Tensor, rank: int, tail: Tensor, dtype: torch.dtype) -> BestRank:
    """The first `rank` triples as B = U S and A = Vh: zero where S is, and beyond the last triple."""
    U, S, Vh = U[..., :rank], S[..., :rank], Vh[..., :rank, :]
    extra = rank - S.shape[-1]
    A = Vh.where(S[..., :, None] > 0, 0)
    return BestRank(
        B=_padded(U * S[..., None, :], columns=extra).to(dtype),
        A=_padded(A, rows=extra).to(dtype),
        singular_values=_padded(S, columns=extra).to(dtype),
        tail=tail.to(dtype),
    )


def _padded(x: Tensor, *, rows: int = 0, columns: int = 0) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns, 0, rows) if rows else (0, columns))
