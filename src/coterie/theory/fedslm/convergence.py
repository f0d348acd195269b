"""FedSLM's Theorem 1: federated averaging of cores inside a group, its bound and what quadratics do.

Letters as in `misalignment`; f_c a client's loss of the core, f = sum_c p_c f_c, E local steps of size eta in each of T
rounds, G^2 the bound of sum_c p_c ||grad f_c - grad f||^2, Delta_0 = f(X_0) - min f, sigma^2 the gradients' variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.theory.fedslm.misalignment import CoreLoss


@dataclass(frozen=True)
class Rate:
    """The four terms of Eq. 17, a bound of the mean over rounds of ||grad f||^2."""

    optimisation: float
    stochastic: float
    drift: float
    floor: float

    @property
    def bound(self) -> float:
        return math.fsum((self.optimisation, self.stochastic, self.drift, self.floor))


def theorem_1(smoothness: float, gap: float, eta: float, E: int, T: int, G: float, sigma: float = 0.0) -> Rate:
    """Eq. 17 with L_eff = smoothness and Delta_0 = gap.

    Raises:
        ValueError: a step size above 1 / (8 L_eff E), for which the theorem says nothing.
    """
    if not 0 < eta <= 1 / (8 * smoothness * E) * (1 + 1e-12):
        raise ValueError(f"Theorem 1 holds up to eta = {1 / (8 * smoothness * E):g}, not at {eta:g}")
    return Rate(
        optimisation=4 * gap / (eta * E * T),
        stochastic=4 * smoothness * eta * sigma**2,
        drift=8 * smoothness**2 * eta**2 * E**2 * (sigma**2 + 6 * E * G**2),
        floor=2 * G**2,
    )


@dataclass(frozen=True, eq=False)
class Averaging:
    """A run with exact gradients: cores at the start of rounds (T + 1, r, r), their mean ||grad f||^2 over rounds
    0 ... T - 1, the last one's ||grad f||^2, and the largest heterogeneity G met at these cores."""

    cores: Tensor
    mean_gradient: float
    last_gradient: float
    G: float


def averaged_cores(
    clients: Sequence[CoreLoss], shares: Sequence[float], X: Tensor, eta: float, E: int, T: int
) -> Averaging:
    """Eq. 7 on quadratics from X (r, r): every client takes E exact gradient steps, the server averages.

    Quadratics of unequal curvature have no G for all cores, as Assumption 1(c) asks; the largest one met stands for it.
    """
    cores, gradients, spreads = [X], [], []
    for _ in range(T):
        own = [client.gradient(X) for client in clients]
        mean = _averaged(own, shares)
        gradients.append(float(mean.square().sum()))
        spreads.append(math.fsum(p * float((g - mean).square().sum()) for p, g in zip(shares, own, strict=True)))
        arrived = []
        for client in clients:
            Y = X
            for _ in range(E):
                Y = Y - eta * client.gradient(Y)
            arrived.append(Y)
        X = _averaged(arrived, shares)
        cores.append(X)
    last = _averaged([client.gradient(X) for client in clients], shares)
    return Averaging(
        cores=torch.stack(cores),
        mean_gradient=math.fsum(gradients) / T,
        last_gradient=float(last.square().sum()),
        G=math.sqrt(max(spreads)),
    )


def _averaged(parts: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    return torch.stack([p * part for p, part in zip(shares, parts, strict=True)]).sum(dim=0)
