"""Two-sided Gaussian sketches of low-rank products: Y = W Omega and Z = Psi W, and W back from them.

Letters: W = B A (m, n), Omega (n, s) with s columns, Psi (k, m) with k rows, both standard normal. A sketch is linear
in W, so the mean of sketches is the sketch of the mean, whatever the ranks of what was sketched.
QR, solves and SVD run in float64 and come back in the dtype of what was given; leading axes are allowed everywhere.
Source: Tropp, Yurtsever, Udell, Cevher 2017; SeFoRA (arXiv 2608.10144), Algorithm 1 and Lemma 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.maths.keys import Key
from coterie.maths.lowrank import canonical_signs
from coterie.maths.stacking import check_product

RIDGE = 1e-10
"""Share of the mean squared singular value of Psi Q that is added where Psi Q has dependent columns (F9)."""

PRIOR = 0.5
"""How far `unsketch_shrunk` trusts the spectrum that it reads off Y; the rest of its prior is flat.

Chosen among 0, 0.5, 0.9 and 0.97 on random clients (r from 4 to 16, k = r + 2 and 2 r). Larger values gain up to a
sixth where client spectra decay, and lose against plain least squares where they are flat and clients agree.
"""


class SketchMatrices(NamedTuple):
    """Omega (n, s) and Psi (k, m), float32."""

    Omega: Tensor
    Psi: Tensor


def sketch_matrices(key: Key, m: int, n: int, columns: int, rows: int) -> SketchMatrices:
    """Omega (n, columns) and Psi (rows, m) of one layer shape: a stream for each shape, of which sizes are slices (F8).

    So fewer columns or rows are the first ones of more, and layers of equal shape share them. Standard normal, drawn
    in float32 (the same bits on every machine), independent of each other.
    """
    Omega = key.fold("Omega", m, n).normal((columns, n)).mT.contiguous()
    return SketchMatrices(Omega, key.fold("Psi", m, n).normal((rows, m)))


@torch.no_grad()
def sketch(B: Tensor, A: Tensor, Omega: Tensor, Psi: Tensor) -> tuple[Tensor, Tensor]:
    """Y = B (A Omega) (..., m, s) and Z = (Psi B) A (..., k, n), from the inside out: no m x n matrix is formed.

    Cost (m + n) r (s + k). Source: SeFoRA, Algorithm 2, line 25.

    Args:
        B, A: factors (..., m, r) and (..., r, n).
        Omega: (n, s). Psi: (k, m).

    Returns:
        Both in the factors' dtype, computed in float64.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_product(B, A)
    if Omega.shape[-2] != A.shape[-1] or Psi.shape[-1] != B.shape[-2]:
        raise ValueError(
            f"Omega {tuple(Omega.shape)} and Psi {tuple(Psi.shape)} do not fit a product of "
            f"{B.shape[-2]} x {A.shape[-1]}: expected ({A.shape[-1]}, s) and (k, {B.shape[-2]})"
        )
    dtype = torch.promote_types(B.dtype, A.dtype)
    B, A = B.double(), A.double()
    return (B @ (A @ Omega.double())).to(dtype), ((Psi.double() @ B) @ A).to(dtype)


@torch.no_grad()
def unsketch(Y: Tensor, Z: Tensor, Psi: Tensor) -> tuple[Tensor, Tensor]:
    """Q (..., m, s) with orthonormal columns and the A that solves Psi Q A = Z by least squares, so that W is near Q A.

    Exact where rank(W) <= s <= k. Source: SeFoRA, Algorithm 1; a ridge steps in where Psi Q has dependent columns (F9).

    Args:
        Y: (..., m, s), s <= m. Z: (..., k, n). Psi: (k, m).

    Raises:
        ValueError: shapes that do not fit, or fewer rows than columns.
    """
    check_sketch(Y, Z, Psi)
    Q = torch.linalg.qr(Y.double()).Q  # line 4
    A = _solved(Psi.double() @ Q, Z.double())  # lines 5-6
    return Q.to(Y.dtype), A.to(Z.dtype)


@torch.no_grad()
def unsketch_shrunk(Y: Tensor, Z: Tensor, Omega: Tensor, Psi: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Orthonormal B (..., m, rank) and A (..., rank, n) from the same sketch, of which s may exceed `rank`.

    Much nearer to W than `unsketch` where W has energy beyond s directions and k is hardly above s; where it has
    little, about as near, a tenth farther in the mean at worst of what was tried. Lemma 2 is not proved for it.

    With W = Q A + E, Q the range of Y: what `unsketch` loses is E, which enters its least squares through Psi and is
    blown up where k is hardly above s. Two things are known and not used there. Y says what A does on the span of
    Omega, exactly (A Omega = R, and E Omega = 0). And on the rest the residual of the least squares says how large E is
    (k - s of k dimensions are pure noise), so there A is the posterior mean under A ~ N(0, C), Psi E ~ N(0, sigma^2):
        A = R Omega^+ + C M^T (M C M^T + sigma^2 I)^-1 Z_rest,  M = Psi Q,
    with C in the proportions of R R^T (`PRIOR`) and in the size that ||Z_rest||^2 leaves for it. Where there is no
    noise nothing is shrunk: exact where `unsketch` is. In the end the best rank-`rank` part of Q A is kept.

    Args:
        Y: (..., m, s). Z: (..., k, n). Omega: (n, s). Psi: (k, m). rank: at most s.

    Returns:
        B with orthonormal columns, A = S V^T, so that B A is a truncated SVD, signs canonical.

    Raises:
        ValueError: as `unsketch`, or a rank outside 1 ... s.
    """
    check_sketch(Y, Z, Psi)
    s, n = Y.shape[-1], Z.shape[-1]
    if tuple(Omega.shape) != (n, s) or not 1 <= rank <= s:
        raise ValueError(f"Omega {tuple(Omega.shape)} where ({n}, {s}) is expected, or rank {rank} outside 1 ... {s}")
    Q, R = torch.linalg.qr(Y.double())
    M, Z64 = Psi.double() @ Q, Z.double()
    P, T = _orthonormal(Omega.double())
    known = torch.linalg.solve_triangular(T, R, upper=True, left=False) @ P.mT  # R Omega^+
    rest = Z64 - (Z64 @ P) @ P.mT
    A = known + _posterior(M, R, rest, n - s)
    V, core = torch.linalg.qr(A.mT)  # LAPACK's SVD of a wide A takes two to three times as long
    U, S, Vh = torch.linalg.svd(core.mT, full_matrices=False)
    B, Vh = canonical_signs(Q @ U[..., :rank], Vh[..., :rank, :] @ V.mT)
    return B.to(Y.dtype), (S[..., :rank, None] * Vh).to(Z.dtype)


def check_sketch(Y: Tensor, Z: Tensor, Psi: Tensor) -> None:
    """Raises ValueError unless Y (..., m, s), Z (..., k, n) and Psi (k, m) fit, with s <= m and s <= k."""
    s, m, k = Y.shape[-1], Y.shape[-2], Z.shape[-2]
    if tuple(Psi.shape) != (k, m):
        raise ValueError(f"Psi {tuple(Psi.shape)} does not fit Y {tuple(Y.shape)} and Z {tuple(Z.shape)}")
    if s > m or s > k:
        raise ValueError(f"a sketch of {s} columns needs as many rows of Y and of Z at least, not {m} and {k}")


def tail_energies(spectrum: Tensor) -> Tensor:
    """tau^2_j = sum_{i >= j} sigma_i^2 for j = 1 ... q + 1, the last one 0: (..., q), descending, to (..., q + 1).

    In float64. Source: SeFoRA, Lemma 2.
    """
    squared = spectrum.double().square()
    return torch.nn.functional.pad(squared.flip(-1).cumsum(-1).flip(-1), (0, 1))


def error_bound(spectrum: Tensor, r: int, k: float) -> Tensor:
    """Lemma 2: E||What - W||_F^2 is at most this for `unsketch` with r columns and k rows; (...,), float64.

    (1 + r / (k - r - 1)) min over rho <= r - 2 of (1 + rho / (r - rho - 1)) tau^2_{rho + 1}(W).

    Args:
        spectrum: singular values of W (..., q), descending.
        r: columns, >= 2. k: rows, > r + 1; infinity gives what no number of rows goes below.

    Raises:
        ValueError: outside these ranges, in which there is no bound.
    """
    if r < 2 or not k > r + 1:
        raise ValueError(f"Lemma 2 needs r >= 2 and k > r + 1, not r = {r} and k = {k}")
    tails = tail_energies(spectrum)
    tails = torch.nn.functional.pad(tails, (0, max(0, r - 1 - tails.shape[-1])))[..., : r - 1]
    rho = torch.arange(r - 1, dtype=torch.float64, device=tails.device)
    return (1 + r / (k - r - 1)) * ((1 + rho / (r - rho - 1)) * tails).amin(dim=-1)


def _solved(M: Tensor, Z: Tensor) -> Tensor:
    """The least-squares solution of M A = Z for M (..., k, s), by QR; by a small ridge where columns are dependent."""
    U, T = torch.linalg.qr(M)
    pivots = T.diagonal(dim1=-2, dim2=-1).abs()
    dependent = pivots.amin(dim=-1) <= M.shape[-2] * torch.finfo(M.dtype).eps * pivots.amax(dim=-1)
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    if not bool(dependent.any()):
        solution: Tensor = torch.linalg.solve_triangular(T, U.mT @ Z, upper=True)
        return solution
    safe = torch.where(dependent[..., None, None], eye, T)
    gram = M.mT @ M
    size = gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None].clamp(min=torch.finfo(M.dtype).tiny)
    ridge = torch.linalg.solve(gram + RIDGE * size * eye, M.mT @ Z)
    return torch.where(dependent[..., None, None], ridge, torch.linalg.solve_triangular(safe, U.mT @ Z, upper=True))


def _orthonormal(X: Tensor) -> tuple[Tensor, Tensor]:
    """P with orthonormal columns and an upper triangular T with X = P T, for the columns of a Gaussian matrix.

    By Cholesky, a third of the time of reflections, where columns are so far from dependent that it is as accurate.
    """
    L, failed = torch.linalg.cholesky_ex(X.mT @ X)
    pivots = L.diagonal(dim1=-2, dim2=-1)
    if bool(((failed == 0) & (pivots.amin(dim=-1) > 0.5 * pivots.amax(dim=-1))).all()):
        return torch.linalg.solve_triangular(L, X.mT, upper=False).mT, L.mT
    P, T = torch.linalg.qr(X)
    return P, T


def _posterior(M: Tensor, R: Tensor, rest: Tensor, free: int) -> Tensor:
    """The mean of A (..., s, n) on what Omega does not span, of dimension `free`; see `unsketch_shrunk`."""
    k, s = M.shape[-2:]
    if free <= 0:
        return _solved(M, rest)
    U, T = torch.linalg.qr(M)
    seen, total = U.mT @ rest, rest.square().sum(dim=(-2, -1))
    # Where k = s nothing tells noise from signal; then s is m or n as a rule, and there is no noise.
    left = (total - seen.square().sum(dim=(-2, -1))).clamp(min=0)
    noise = left / (k - s) if k > s else torch.zeros_like(total)
    signal = (total / k - noise).clamp(min=1e-12 * total / k)  # sums over the entries of A and of E in one row of Psi
    eye = torch.eye(s, dtype=M.dtype, device=M.device)
    gram = R @ R.mT
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None]
    shape = torch.where(trace > 0, PRIOR * gram / trace, 0.0) + (1 - PRIOR) / s * eye  # C, up to `signal`
    ratio = torch.where(total > 0, noise / signal, 0.0)[..., None, None]
    # (M^T M + (noise / signal) C^-1)^-1 M^T rest, written without M's dependent columns being inverted.
    L = torch.linalg.cholesky(shape)
    stacked = torch.cat([T @ L, ratio.sqrt() * eye.expand(T.shape)], dim=-2)
    shrink = L @ _solved(stacked, torch.nn.functional.pad(eye.expand(T.shape), (0, 0, 0, s)))  # of U^T rest
    mean: Tensor = shrink @ seen
    return mean
