"""Slow twins of FedSEE's theory: programs by their faces, risks example by example, matchings one by one."""

from __future__ import annotations

from itertools import combinations, permutations

import torch
from torch import Tensor


def quadratic_program(H: Tensor, b: Tensor, A: Tensor, sums: Tensor) -> tuple[float, Tensor]:
    """Value and argument of min 1/2 x^T H x - b^T x over A x = sums, x >= 0: the best of all supports' KKT points."""
    best: tuple[float, Tensor] | None = None
    for size in range(1, len(b) + 1):
        for support in combinations(range(len(b)), size):
            kept = list(support)
            rows = A[:, kept]
            system = torch.zeros(size + len(sums), size + len(sums), dtype=b.dtype)
            system[:size, :size], system[:size, size:], system[size:, :size] = H[kept][:, kept], rows.T, rows
            right = torch.cat([b[kept], sums])
            found = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution[:, 0]
            if not torch.allclose(system @ found, right, atol=1e-8) or float(found[:size].min()) < -1e-9:
                continue
            x = torch.zeros_like(b)
            x[kept] = found[:size].clamp(min=0)
            value = float(0.5 * x @ H @ x - b @ x)
            if best is None or value < best[0] - 1e-12:
                best = value, x
    assert best is not None
    return best


def on_simplex(Q: Tensor, b: Tensor) -> tuple[float, Tensor]:
    return quadratic_program(Q, b, torch.ones(1, len(b), dtype=b.dtype), torch.ones(1, dtype=b.dtype))


def on_transport(Q: Tensor, b: Tensor) -> tuple[float, Tensor]:
    """Rows of w (M, N) sum to one, columns to M / N."""
    M, N = b.shape
    A = torch.zeros(M + N, M * N, dtype=b.dtype)
    for m in range(M):
        for n in range(N):
            A[m, m * N + n] = A[M + n, m * N + n] = 1
    sums = torch.tensor([1.0] * M + [M / N] * N, dtype=b.dtype)
    value, x = quadratic_program(torch.block_diag(*Q), b.flatten(), A, sums)
    return value, x.reshape(M, N)


def vertex_set_error(found: Tensor, Theta: Tensor) -> float:
    return min(
        max(float((found[k] - Theta[m]).norm()) for m, k in enumerate(order))
        for order in permutations(range(len(Theta)))
    )


def worst_name_error(found: Tensor, Theta: Tensor) -> float:
    """Over all permutations of the experts' names, the largest error of the estimate in its own order."""
    return max(
        max(float((found[m] - Theta[k]).norm()) for m, k in enumerate(order))
        for order in permutations(range(len(Theta)))
    )


def task_risk(theta: Tensor, m: int, Theta: Tensor, P: Tensor, phi: Tensor) -> Tensor:
    """E_m ||(theta_m* - theta) phi(x)||^2, input by input."""
    total = torch.zeros((), dtype=theta.dtype)
    for k in range(len(phi)):
        total = total + P[m, k] * ((Theta[m] - theta) @ phi[k]).square().sum()
    return total


def client_risk(theta: Tensor, alpha_i: Tensor, Theta: Tensor, P: Tensor, phi: Tensor) -> Tensor:
    return sum(
        (alpha_i[m] * task_risk(theta, m, Theta, P, phi) for m in range(len(Theta))), torch.zeros((), dtype=theta.dtype)
    )


def routed_risk(p: Tensor, alpha_i: Tensor, experts: Tensor, Theta: Tensor, P: Tensor, phi: Tensor) -> float:
    """The risk above the noise, with an adapter of its own for every input."""
    total = 0.0
    for m in range(len(Theta)):
        for k in range(len(phi)):
            theta = sum((p[k, e] * experts[e] for e in range(len(experts))), torch.zeros_like(Theta[0]))
            total += float(alpha_i[m] * P[m, k] * ((theta - Theta[m]) @ phi[k]).square().sum())
    return total


def affine_distance(point: Tensor, others: Tensor) -> float:
    """From the affine hull of `others`, by the normal equations' pseudo-inverse."""
    span = (others[1:] - others[0]).T
    off = point - others[0]
    return float((off - span @ torch.linalg.pinv(span) @ off).norm()) if span.shape[1] else float(off.norm())
