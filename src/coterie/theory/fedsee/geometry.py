"""Experts, mixtures and second moments of FedSEE's shared-feature squared-loss model, and the geometry between them.

The paper's letters, all fp64: Theta (M, l, r) the experts theta_m*, Phi (r, r) the features' second moment, alpha
(N, M) the clients' mixtures, a row each. The model is f0(x) + theta phi(x); risks are above the noise, which no theta
changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Statement:
    """What a statement of the paper bounds, `lower` <= `measured` <= `upper`; infinite where it says nothing."""

    measured: float
    upper: float = math.inf
    lower: float = -math.inf

    def holds(self, slack: float = 1e-9) -> bool:
        """Whether it does, up to rounding: `slack` relative to what is measured, and absolute below one."""
        room = slack * max(1.0, abs(self.measured))
        return self.lower - room <= self.measured <= self.upper + room


def squared_norm(C: Tensor, Phi: Tensor) -> Tensor:
    """||C||_Phi^2 = tr(C Phi C^T) over the last two axes of C (..., l, r)."""
    return ((C @ Phi) * C).sum(dim=(-2, -1))


def eigenvalues(Phi: Tensor) -> tuple[float, float]:
    """The least and the greatest eigenvalue of Phi (..., r, r), over all leading axes.

    Raises:
        ValueError: Phi is not positive definite (Assumption 2(iii)).
    """
    values = torch.linalg.eigvalsh(Phi)
    least, greatest = float(values.min()), float(values.max())
    if not least > 0:
        raise ValueError(f"Phi must be positive definite (Assumption 2(iii)); its least eigenvalue is {least:.3g}")
    return least, greatest


def distances(one: Tensor, other: Tensor) -> Tensor:
    """Frobenius distances (P, Q) of P and Q parameter blocks (l, r), from their differences."""
    return torch.cdist(one.flatten(1), other.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")


def diameter(Theta: Tensor) -> float:
    """diam_F(Theta), the largest distance of two experts."""
    return float(distances(Theta, Theta).max())


def separation(Theta: Tensor) -> float:
    """sep of Eq. 7, the least distance of two experts; raises ValueError for one expert."""
    apart = distances(Theta, Theta)
    return float(apart.fill_diagonal_(math.inf).min()) if len(_several(Theta)) else math.inf


def height(Theta: Tensor) -> float:
    """h of Eq. 7, the least distance of an expert from the affine hull of the others; 0 of a degenerate simplex.

    Raises:
        ValueError: one expert.
    """
    flat = _several(Theta).flatten(1)
    found = []
    for m in range(len(flat)):
        others = torch.cat([flat[:m], flat[m + 1 :]])
        span = (others[1:] - others[0]).T
        point = flat[m] - others[0]
        if span.shape[1]:
            U, S, _ = torch.linalg.svd(span, full_matrices=False)
            U = U[:, S / S.max() > 1e-12]
            point = point - U @ (U.T @ point)
        found.append(float(point.norm()))
    return min(found)


def barycentres(alpha: Tensor, Theta: Tensor) -> Tensor:
    """sum_m alpha_im theta_m* for each client, (N, l, r): Eq. 6."""
    return torch.einsum("nm,mlr->nlr", alpha, Theta)


def client_optima(alpha: Tensor, Theta: Tensor, Phis: Tensor) -> Tensor:
    """The minimisers of the clients' squared-loss risks, (N, l, r), solved from the normal equations: Eq. 24.

    Phis: (M, r, r), each task's own second moment, or (r, r), one for all.

    Raises:
        ValueError: a second moment that is not positive definite.
    """
    eigenvalues(Phis)
    Phis = Phis.expand(len(Theta), *Phis.shape[-2:])
    weighted = torch.einsum("nm,mlr,mrs->nls", alpha, Theta, Phis)
    moments = torch.einsum("nm,mrs->nrs", alpha, Phis)
    optima: Tensor = torch.linalg.solve(moments, weighted.mT).mT
    return optima


def mixing_gaps(alpha: Tensor, Theta: Tensor, Phi: Tensor) -> Tensor:
    """G_i = sum_m alpha_im ||theta_i* - theta_m*||_Phi^2 (N,): what the best single adapter loses to the oracle."""
    optima = barycentres(alpha, Theta)
    return (alpha * squared_norm(optima[:, None] - Theta[None], Phi)).sum(dim=1)


def impurity(alpha: Tensor) -> float:
    """The least epsilon for which every task has a client with alpha_im >= 1 - epsilon: Assumption 3."""
    return 1.0 - float(alpha.max(dim=0).values.min())


def _several(Theta: Tensor) -> Tensor:
    if len(Theta) < 2:
        raise ValueError("separation and height need at least two experts")
    return Theta
