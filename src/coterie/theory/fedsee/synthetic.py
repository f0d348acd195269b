"""The synthetic federation of FedSEE's Appendix B.1.1: experts, mixtures, and data as the sums for least squares.

x enters through phi(x) = A x alone: y - W0 x = theta_m* A x + zeta, so W0 is never drawn. With A = U S V^T and standard
normal x, V^T x is standard normal in r dimensions and is drawn in place of x; the sum of zeta phi^T over examples is,
given the phi, sigma Z F^T with F F^T = sum of phi phi^T and Z (l, r) standard normal, and is drawn as that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.maths.keys import Key
from coterie.theory.fedsee.geometry import diameter

CHUNK = 1 << 16
"""Examples whose features are drawn at a time."""


@dataclass(frozen=True)
class World:
    """Tasks over one frozen projection: A (r, d), the experts Theta (M, l, r), the noise's deviation per output."""

    A: Tensor
    Theta: Tensor
    sigma: float

    @property
    def Phi(self) -> Tensor:
        """A A^T (r, r), the second moment of phi(x) under every task: x has second moment I."""
        return self.A @ self.A.T


def frozen_projection(key: Key, r: int = 16, d: int = 60, condition: float = 4.0) -> Tensor:
    """A (r, d) with random singular vectors, its singular values from 1 to sqrt(condition) in equal ratios.

    The paper prescribes the condition number of Phi, not the values between; with a least eigenvalue of 1 its
    figures for routing and for barycentres come out at their size.
    """
    U, _ = torch.linalg.qr(key.fold("left").normal((r, r), dtype=torch.float64))
    V, _ = torch.linalg.qr(key.fold("right").normal((d, r), dtype=torch.float64))
    exponents = torch.linspace(0, 0.5, r, dtype=torch.float64)
    A: Tensor = (U * condition**exponents) @ V.T
    return A


def centred_experts(Theta: Tensor, diam: float = 6.0) -> Tensor:
    """The experts moved to mean zero and scaled to a diameter, (M, l, r)."""
    centred = Theta - Theta.mean(dim=0)
    return centred * (diam / diameter(centred))


def world(
    key: Key,
    *,
    M: int = 6,
    l: int = 12,  # noqa: E741
    r: int = 16,
    d: int = 60,
    condition: float = 4.0,
    diam: float = 6.0,
    sigma: float = 0.5,
) -> World:
    """The world of B.1.1, at its sizes by default, with normal experts."""
    Theta = centred_experts(key.fold("experts").normal((M, l, r), dtype=torch.float64), diam)
    return World(frozen_projection(key.fold("projection"), r, d, condition), Theta, sigma)


def experts_on_eigendirections(of: World) -> World:
    """The world with its experts replaced by a regular simplex in M - 1 eigendirections of Phi, those of its extreme
    eigenvalues among them, at the same diameter: in mixture coordinates the losses then have Phi's condition number.

    Raises:
        ValueError: fewer features than M - 1.
    """
    M, l, r = of.Theta.shape  # noqa: E741
    if r < M - 1:
        raise ValueError(f"{M} experts need {M - 1} eigendirections, there are {r}")
    _, _, corners = torch.linalg.svd(torch.eye(M, dtype=torch.float64) - 1 / M)
    _, directions = torch.linalg.eigh(of.Phi)
    chosen = torch.linspace(0, r - 1, M - 1).round().long()
    Theta = torch.zeros(M, l, r, dtype=torch.float64)
    Theta[:, 0] = corners[: M - 1].T @ directions[:, chosen].T
    return World(of.A, centred_experts(Theta, diameter(of.Theta)), of.sigma)


def complementary(condition: float, epsilon: float = 0.2, diam: float = 6.0) -> tuple[Tensor, Tensor, Tensor]:
    """Theta (3, 1, 2), Phi (2, 2) and alpha (3, 3) of a pool where no anchor is the best combination: B.1.2's second
    regime, on an instance of our own.

    The experts are an equilateral triangle with a side along (4, 3) between the eigendirections of Phi. Each anchor's
    impurity is all on one other task. With condition 1 the anchor of task 0 is nearest to its expert, and Theorem 2's
    bound is met; with more, task 2's anchor offsets the impurity in the direction of high curvature.
    """
    angles = math.atan2(3, 4) + torch.tensor([0, math.pi / 3], dtype=torch.float64)
    corners = torch.stack([angles.cos(), angles.sin()], dim=1)
    Theta = diam * torch.cat([torch.zeros(1, 2, dtype=torch.float64), corners])[:, None]
    alpha = (1 - epsilon) * torch.eye(3, dtype=torch.float64)
    for anchor, other in ((0, 1), (1, 0), (2, 0)):
        alpha[anchor, other] = epsilon
    return Theta, torch.diag(torch.tensor([condition, 1.0], dtype=torch.float64)), alpha


def dirichlet_halves(key: Key, N: int, M: int) -> Tensor:
    """N mixtures from a symmetric Dirichlet(1/2), (N, M): squares of normal draws over their sum."""
    squares = key.normal((N, M), dtype=torch.float64).square()
    return squares / squares.sum(dim=1, keepdim=True)


def anchored(key: Key, N: int, M: int, epsilon: float) -> Tensor:
    """Mixtures (N, M): client m < M is task m's anchor, 1 - epsilon pure with the rest spread evenly; others Dir(1/2).

    Raises:
        ValueError: fewer clients than tasks.
    """
    if N < M:
        raise ValueError(f"{N} clients cannot be anchors of {M} tasks")
    alpha = dirichlet_halves(key, N, M)
    alpha[:M] = epsilon / (M - 1)
    alpha[:M].fill_diagonal_(1 - epsilon)
    return alpha


def interior(key: Key, N: int, M: int, gamma: float) -> Tensor:
    """Mixtures with alpha_im >= gamma / M (N, M), the condition of Theorem 4; uniform at gamma = 1."""
    return gamma / M + (1 - gamma) * dirichlet_halves(key, N, M)


@dataclass(frozen=True)
class Moments:
    """What least squares keeps of examples: their count, S = sum phi phi^T (r, r), X = sum (y - f0(x)) phi^T (l, r)."""

    count: int
    S: Tensor
    X: Tensor

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.S + other.S, self.X + other.X)

    def least_squares(self) -> Tensor:
        """argmin over theta of the sum of ||y - f0(x) - theta phi(x)||^2, X S^-1 (l, r).

        Raises:
            ValueError: fewer examples than features, so that S has no inverse.
        """
        if self.count < len(self.S):
            raise ValueError(f"{self.count} examples do not determine {len(self.S)} features; give at least as many")
        theta: Tensor = torch.linalg.solve(self.S, self.X.T).T
        return theta


def draw(key: Key, mixture: Tensor, of: World, count: int) -> Moments:
    """`count` examples of the mixture (M,), as their moments."""
    M, l, r = of.Theta.shape  # noqa: E741
    edges = torch.cumsum(mixture, dim=0).numpy()
    tasks = np.searchsorted(edges / edges[-1], key.fold("tasks").unit(count), side="right")
    U, s, _ = torch.linalg.svd(of.A, full_matrices=False)
    root = U * s
    S = torch.zeros(r, r, dtype=torch.float64)
    X = torch.zeros(l, r, dtype=torch.float64)
    for m, many in enumerate(np.bincount(tasks, minlength=M)):
        own = torch.zeros(r, r, dtype=torch.float64)
        for start in range(0, int(many), CHUNK):
            rows = min(CHUNK, int(many) - start)
            z = key.fold("features", m, start).normal((rows, r), dtype=torch.float64)
            own += z.T @ z
        own = root @ own @ root.T
        S += own
        X += of.Theta[m] @ own
    Z = key.fold("noise").normal((l, r), dtype=torch.float64)
    return Moments(count, S, X + of.sigma * Z @ _factor(S).T)


def uploads(key: Key, alpha: Tensor, of: World, count: int) -> Tensor:
    """Every client's least-squares estimate from `count` examples of its own, (N, l, r)."""
    return torch.stack([draw(key.fold(i), alpha[i], of, count).least_squares() for i in range(len(alpha))])


def public_sets(key: Key, of: World, count: int) -> list[Moments]:
    """`count` labelled examples of each task, as moments."""
    pure = torch.eye(len(of.Theta), dtype=torch.float64)
    return [draw(key.fold(m), pure[m], of, count) for m in range(len(pure))]


def _factor(S: Tensor) -> Tensor:
    """F (r, r) with F F^T = S, also of a singular S."""
    values, vectors = torch.linalg.eigh(S)
    F: Tensor = vectors * values.clamp(min=0).sqrt()
    return F


def predicted_ratio(fewer: int, more: int) -> float:
    """By how much an error of rate n^-1/2 falls between two sample sizes."""
    return math.sqrt(more / fewer)
