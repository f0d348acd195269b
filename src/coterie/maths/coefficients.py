"""Two lists of coefficients, so that the product of two combined factors comes near a mean of products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.maths.gram import whole_gram
from coterie.maths.stacking import Factors, check_products

RIDGE = 1e-10
"""How strongly coefficients are held where they are, as a share of the normal equations' mean eigenvalue.

Clients that nearly coincide leave directions undetermined, in which the plain solution would be rounding.
"""


@torch.no_grad()
def product_coefficients(
    factors: Sequence[Factors],
    weights: Sequence[float],
    sweeps: int,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """P and Q that make ||(sum_u Q_u B_u)(sum_u P_u A_u) - sum_u p_u B_u A_u||_F small, from P = Q = p on.

    Alternating least squares: a sweep solves for Q with P as it is, then for P; both are N x N systems whose entries
    are traces of r x r products, so that after (m + n) N^2 r^2 for the Gram matrices a sweep costs N^2 r^2 + N^3,
    whatever m and n. The error never rises. Source: the objective of FLoRA-NA (arXiv 2509.26399), whose solver is not
    known here.

    Args:
        factors: pairs B_u (m, r), A_u (r, n), of one rank.
        weights: p_u of the mean; P and Q start from them.
        sweeps: how many, >= 0.
        dtype: of the computation.

    Returns:
        P and Q, both (N,), in `dtype`.

    Raises:
        ValueError: factors that cannot be added, ranks that differ, another number of weights, negative sweeps.
    """
    check_products(factors)
    ranks = {B.shape[-1] for B, _ in factors}
    if len(ranks) > 1:
        raise ValueError(f"factors of ranks {sorted(ranks)} cannot be combined; they must have one rank")
    if len(factors) != len(weights) or sweeps < 0:
        raise ValueError(f"{len(factors)} pairs of factors, {len(weights)} weights, {sweeps} sweeps do not go together")
    B, A = torch.stack([b for b, _ in factors]).to(dtype), torch.stack([a for _, a in factors]).to(dtype)
    p = torch.tensor(weights, dtype=dtype, device=B.device)
    W = _mean_and_differences(len(p)).to(p)
    grams_B, grams_A = _grams(_turned(B.mT, W)), _grams(_turned(A, W))  # B_u^T B_v and A_u A_v^T
    start, K = W.mT @ p, W.mT @ (p[:, None] * W)  # in these terms D = sum_uv K_uv B_u A_v
    P = Q = start
    for _ in range(sweeps):
        Q = _solved(Q, P, K, grams_B, grams_A)
        P = _solved(P, Q, K, grams_A, grams_B)
    return p + W @ (P - start), p + W @ (Q - start)


def _mean_and_differences(N: int) -> Tensor:
    """An orthonormal basis of N coefficients, in columns: all alike, then N - 1 that sum to 0 (Helmert's); float64.

    In terms of the clients themselves the normal equations of N that nearly coincide hide what sets them apart: with
    differences of relative size d, coefficients err by an ulp over d^2. In these terms d has a factor of its own.
    """
    j = torch.arange(1, N, dtype=torch.float64)
    steps = torch.triu(torch.ones(N, N - 1, dtype=torch.float64)) - torch.diag(j, -1)[:, : N - 1]
    return torch.cat([torch.full((N, 1), N**-0.5, dtype=torch.float64), steps / (j * (j + 1)).sqrt()], dim=1)


def _turned(X: Tensor, W: Tensor) -> Tensor:
    """X (N, r, k) in terms of W: their mean, up to size, and combinations of their distances from it."""
    mean = X.mean(dim=0, keepdim=True)
    apart = (W.mT[1:] @ (X - mean).flatten(1)).view(-1, *X.shape[1:])
    return torch.cat([len(X) ** 0.5 * mean, apart])


def _grams(X: Tensor) -> Tensor:
    """X_u X_v^T of all pairs of X (N, r, k), from one product: (N, N, r^2)."""
    N, r, _ = X.shape
    return whole_gram(X.flatten(0, 1).mT).view(N, r, N, r).transpose(1, 2).reshape(N, N, r * r)


def _solved(own: Tensor, other: Tensor, K: Tensor, grams: Tensor, fixed: Tensor) -> Tensor:
    """The least-squares coefficients of the factors with these Gram matrices, beside the other, fixed ones.

    A ridge holds them near `own`, where they are, so that the error cannot rise. The unknowns are scaled to one size.
    <B_u A_v, B_w A_x> = sum_rs (B_u^T B_w)_rs (A_v A_x^T)_rs.
    """
    beside = (other @ fixed.flatten(1)).view(len(own), -1)  # sum_v other_v A_v A_w^T for each w
    G = grams @ (other @ beside)
    h = grams.flatten(1) @ (K @ beside).flatten()
    ridge = (RIDGE * G.diagonal().mean()).clamp(min=torch.finfo(G.dtype).tiny)
    size = (G.diagonal() + ridge).sqrt()
    scaled = (G + torch.diag_embed(ridge.expand(len(own)))) / size / size[:, None]
    moved: Tensor = torch.linalg.solve(scaled, (h - G @ own) / size) / size
    return own + moved
