"""Experts and mixtures out of a pool of uploads, by convex programs on simplices: Eqs. 8 and 57, and D.9's coupling.

All are least squares in weights w on a simplex, 1/2 w^T Q w - b^T w. Eq. 8 and Eq. 57 are solved as in Appendix B.1.1,
by FISTA with exact projection; the balanced program, whose rows share column sums, by an interior-point method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.maths.simplex import project_rows
from coterie.theory.fedsee.synthetic import Moments

STEPS, TOLERANCE = 20_000, 1e-13
POLISH = 500
"""Steps between two attempts to solve on the support that was found, which flat programs need."""


class Extracted(NamedTuple):
    """Experts (M, l, r) and the weights (M, N) of the uploads in them, rows on the simplex."""

    experts: Tensor
    omega: Tensor


class TaskLoss(NamedTuple):
    """tr(theta H theta^T) - 2 <theta, G>, a task's loss up to what theta does not change; H (M, r, r), G (M, l, r)."""

    H: Tensor
    G: Tensor


def population_losses(Theta: Tensor, Phi: Tensor) -> TaskLoss:
    """The tasks' population losses: ||theta - theta_m*||_Phi^2 up to constants."""
    return TaskLoss(Phi.expand(len(Theta), *Phi.shape), Theta @ Phi)


def public_losses(sets: Sequence[Moments]) -> TaskLoss:
    """The mean losses on public sets, one a task."""
    return TaskLoss(
        torch.stack([each.S / each.count for each in sets]), torch.stack([each.X / each.count for each in sets])
    )


def extract(pool: Tensor, losses: TaskLoss) -> Extracted:
    """Each task's expert as the best convex combination of the pool (N, l, r): Eq. 8, every task on its own."""
    omega = simplex_least_squares(*_quadratics(pool, losses))
    return Extracted(torch.einsum("mn,nlr->mlr", omega, pool), omega)


def extract_balanced(pool: Tensor, losses: TaskLoss) -> Extracted:
    """The same jointly, every upload's weights summing to M / N over tasks: the balanced program of Eq. 13, exactly.

    Public losses add up; each upload is a client's only one. FedSEE itself goes some Sinkhorn-projected steps towards
    this optimum (`coterie.algorithms`).
    """
    omega = transport_least_squares(*_quadratics(pool, losses))
    return Extracted(torch.einsum("mn,nlr->mlr", omega, pool), omega)


def mixtures(uploads: Tensor, experts: Tensor, Phi: Tensor) -> Tensor:
    """The barycentric estimates of the clients' mixtures, (N, M): Eq. 57. uploads (N, l, r), experts (M, l, r)."""
    weighted = experts @ Phi
    Q = 2 * torch.einsum("mlr,klr->mk", weighted, experts)
    b = 2 * torch.einsum("nlr,mlr->nm", uploads, weighted)
    return simplex_least_squares(Q.expand(len(uploads), *Q.shape), b)


def simplex_least_squares(Q: Tensor, b: Tensor) -> Tensor:
    """argmin of 1/2 w^T Q w - b^T w over the simplex, (..., P), by FISTA with exact projection, for each leading index.

    Momentum starts anew where it points uphill. It stops when the Frank-Wolfe gap, which bounds what is left to gain,
    is below 1e-13 of the largest entry of Q and b; every 500 steps the optimum on the support so far is tried.

    Args:
        Q: (..., P, P) fp64, positive semidefinite. b: (..., P).

    Raises:
        ArithmeticError: the gap is not that small after 20000 steps.
    """
    smooth = torch.linalg.matrix_norm(Q, 2).clamp(min=torch.finfo(Q.dtype).tiny)[..., None]
    allowed = TOLERANCE * torch.maximum(Q.abs().amax(dim=(-2, -1)), b.abs().amax(dim=-1))
    w = torch.full_like(b, 1 / b.shape[-1])
    ahead, t = w, torch.ones_like(smooth)
    for step in range(STEPS):
        new = project_rows(ahead - ((Q @ ahead[..., None])[..., 0] - b) / smooth)
        uphill = ((ahead - new) * (new - w)).sum(dim=-1, keepdim=True) > 0
        after = torch.where(uphill, 1.0, (1 + (1 + 4 * t.square()).sqrt()) / 2)
        ahead = torch.where(uphill, new, new + (t - 1) / after * (new - w))
        w, t = new, after
        if step % 10 == 9 and bool((_gap(Q, b, w) <= allowed).all()):
            return w
        if step % POLISH == POLISH - 1:
            polished = _on_support(Q, b, w)
            better = (_gap(Q, b, polished) <= allowed)[..., None]
            w = torch.where(better, polished, w)
            ahead = torch.where(better, w, ahead)
    gap = _gap(Q, b, w)
    raise ArithmeticError(f"the program on the simplex has a gap of {float(gap.max()):.3g} after {STEPS} steps")


def transport_least_squares(Q: Tensor, b: Tensor) -> Tensor:
    """argmin of sum_m 1/2 w_m^T Q_m w_m - b_m^T w_m, rows w_m summing to one and columns to M / N, (M, N).

    Mehrotra's predictor-corrector method on the dense system of M N weights, fp64.

    Args:
        Q: (M, N, N), positive semidefinite. b: (M, N).

    Raises:
        ArithmeticError: no convergence in 100 steps.
    """
    M, N = b.shape
    H = torch.einsum("mij,mk->mikj", Q, torch.eye(M, dtype=b.dtype)).reshape(M * N, M * N)
    rows = torch.eye(M, dtype=b.dtype).repeat_interleave(N, dim=1)
    columns = torch.eye(N, dtype=b.dtype).repeat(1, M)
    A = torch.cat([rows, columns[1:]])  # the first column's sum follows from the others
    sums = torch.cat([torch.ones(M, dtype=b.dtype), torch.full((N - 1,), M / N, dtype=b.dtype)])
    return _interior_point(H, b.flatten(), A, sums, torch.full((M * N,), 1 / N, dtype=b.dtype)).reshape(M, N)


def _gap(Q: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """The Frank-Wolfe gap of w (..., P), not less than the objective above its least value."""
    gradient = (Q @ w[..., None])[..., 0] - b
    return (gradient * w).sum(dim=-1) - gradient.amin(dim=-1)


def _on_support(Q: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """The optimum among weights on w's support that sum to one, less what turns negative, for each leading index."""
    P = b.shape[-1]
    made = []
    for quadratic, linear, weights in zip(Q.reshape(-1, P, P), b.reshape(-1, P), w.reshape(-1, P), strict=True):
        kept, found = weights.nonzero()[:, 0], weights
        while len(kept):
            border = torch.ones(len(kept) + 1, len(kept) + 1, dtype=b.dtype)
            border[:-1, :-1], border[-1, -1] = quadratic[kept][:, kept], 0
            right = torch.cat([linear[kept], linear.new_ones(1)])
            solved = torch.linalg.lstsq(border, right[:, None], driver="gelsd").solution[:-1, 0]
            if float(solved.min()) >= 0:
                found = torch.zeros_like(weights)
                found[kept] = solved / solved.sum()
                break
            kept = kept[solved > 0]
        made.append(found)
    return torch.stack(made).reshape(b.shape)


def _quadratics(pool: Tensor, losses: TaskLoss) -> tuple[Tensor, Tensor]:
    """Q (M, N, N) and b (M, N) of the tasks' losses in the weights of the pool."""
    Q = 2 * torch.einsum("ilr,mrs,jls->mij", pool, losses.H, pool)
    return Q, 2 * torch.einsum("ilr,mlr->mi", pool, losses.G)


def _interior_point(H: Tensor, b: Tensor, A: Tensor, sums: Tensor, x: Tensor) -> Tensor:
    """argmin of 1/2 x^T H x - b^T x over A x = sums, x >= 0, from an x that is positive and feasible."""
    scale = max(1.0, float(H.abs().max()), float(b.abs().max()))
    H, b = H / scale, b / scale
    z, y = torch.ones_like(x), torch.zeros_like(sums)
    size = len(x)
    system = torch.zeros(size + len(sums), size + len(sums), dtype=x.dtype)
    system[:size, size:], system[size:, :size] = -A.T, A
    for _ in range(100):
        dual, primal, mu = H @ x - b - A.T @ y - z, A @ x - sums, float(x @ z) / size
        if mu < 1e-15 and float(dual.abs().max()) < 1e-12:
            return x
        system[:size, :size] = H + torch.diag(z / x)
        factors = torch.linalg.lu_factor(system)
        target = torch.zeros_like(x)
        for corrected in (False, True):
            right = torch.cat([-dual - z + target / x, -primal])
            solved = torch.linalg.lu_solve(*factors, right[:, None])[:, 0]
            dx = solved[:size]
            dz = (target - z * dx) / x - z
            if not corrected:
                step = min(_longest(x, dx), _longest(z, dz))
                reached = float((x + step * dx) @ (z + step * dz)) / size
                target = (reached / mu) ** 3 * mu - dx * dz
        step = 0.995 * min(_longest(x, dx), _longest(z, dz))
        x, y, z = x + step * dx, y + step * solved[size:], z + step * dz
    raise ArithmeticError(f"the balanced program did not converge: complementarity {mu:.3g} after 100 steps")


def _longest(value: Tensor, direction: Tensor) -> float:
    """The longest step, at most one, that keeps the value non-negative."""
    falling = direction < 0
    return min(1.0, float((-value[falling] / direction[falling]).min())) if bool(falling.any()) else 1.0
