"""Dense twins of the sketches: form W and everything that is inverted, and read the formulas off."""

from __future__ import annotations

import torch
from torch import Tensor


def sketch(W: Tensor, Omega: Tensor, Psi: Tensor) -> tuple[Tensor, Tensor]:
    """W Omega and Psi W."""
    return W @ Omega.double(), Psi.double() @ W


def unsketch(Y: Tensor, Z: Tensor, Psi: Tensor) -> Tensor:
    """The approximation (m, n) by pseudo-inverses: the projection on Y's range, A from all rows of Z."""
    Q = torch.linalg.svd(Y, full_matrices=False).U
    return Q @ torch.linalg.pinv(Psi.double() @ Q) @ Z


def unsketch_shrunk(Y: Tensor, Z: Tensor, Omega: Tensor, Psi: Tensor, rank: int, prior: float) -> Tensor:
    """The truncated posterior mean (m, n), with every covariance written out."""
    Omega, Psi = Omega.double(), Psi.double()
    (n, s), k = Omega.shape, len(Psi)
    Q = torch.linalg.svd(Y, full_matrices=False).U
    known, M = Q.mT @ Y @ torch.linalg.pinv(Omega), Psi @ Q
    rest = Z @ (torch.eye(n, dtype=torch.float64) - Omega @ torch.linalg.pinv(Omega))
    residual = rest - M @ torch.linalg.pinv(M) @ rest
    noise = residual.square().sum() / (k - s)
    power = rest.square().sum() / k
    signal = max(power - noise, 1e-12 * power)  # all noise: nothing is left of what Omega does not span
    seen = Q.mT @ Y @ Y.mT @ Q
    C = signal * (prior * seen / seen.trace() + (1 - prior) * torch.eye(s, dtype=torch.float64) / s)
    A = known + C @ M.mT @ torch.linalg.inv(M @ C @ M.mT + noise * torch.eye(k, dtype=torch.float64)) @ rest
    U, S, Vh = torch.linalg.svd(Q @ A)
    return (U[:, :rank] * S[:rank]) @ Vh[:rank]


def error_bound(spectrum: list[float], r: int, k: float) -> float:
    """Lemma 2, term by term."""
    terms = [(1 + rho / (r - rho - 1)) * sum(sigma**2 for sigma in spectrum[rho:]) for rho in range(r - 1)]
    return (1 + r / (k - r - 1)) * min(terms)
