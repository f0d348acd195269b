"""FedSEE's statements on expert recovery, each as what it bounds and its bound: sections 3.1, 3.2 and D.1 to D.4, D.9.

Shapes and letters as in `geometry`: Theta (M, l, r), Phi (r, r), alpha (N, M), uploads (N, l, r), fp64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.theory.fedsee.extraction import (
    extract,
    extract_balanced,
    mixtures,
    population_losses,
    public_losses,
)
from coterie.theory.fedsee.geometry import (
    Statement,
    barycentres,
    client_optima,
    diameter,
    distances,
    eigenvalues,
    height,
    impurity,
    mixing_gaps,
    separation,
    squared_norm,
)
from coterie.theory.fedsee.pool_only import identity_error, vertex_set_error
from coterie.theory.fedsee.synthetic import Moments


def theorem_1(alpha: Tensor, Theta: Tensor, Phi: Tensor) -> Statement:
    """Clients' optima are barycentres: the largest distance of the two is zero (Eq. 6)."""
    return Statement(_largest(client_optima(alpha, Theta, Phi) - barycentres(alpha, Theta)), upper=0.0)


def relative_dispersion(Phis: Tensor) -> float:
    """rho_Phi = max ||Phi_m - Phi_k||_2 / min sigma_min(Phi_m) of second moments (M, r, r): Eq. 26."""
    return _largest_difference(Phis) / eigenvalues(Phis)[0]


def remark_1(alpha: Tensor, Theta: Tensor, Phis: Tensor) -> Statement:
    """The largest bias of clients' optima where tasks' second moments (M, r, r) differ: Eq. 26."""
    return Statement(_largest(covariance_bias(alpha, Theta, Phis)), upper=relative_dispersion(Phis) * diameter(Theta))


def covariance_bias(alpha: Tensor, Theta: Tensor, Phis: Tensor) -> Tensor:
    """theta_i* - sum_m alpha_im theta_m* (N, l, r) in the closed form of Eq. 25."""
    mix = barycentres(alpha, Theta)
    mean = torch.einsum("nm,mrs->nrs", alpha, Phis)
    off = torch.einsum("nm,nmlr,nmrs->nls", alpha, Theta[None] - mix[:, None], Phis[None] - mean[:, None])
    bias: Tensor = torch.linalg.solve(mean, off.mT).mT
    return bias


def proposition_2(alpha_i: Tensor, Theta: Tensor, Phi: Tensor) -> tuple[Statement, Statement]:
    """One client's mixing gap, alpha_i (M,): its two forms are the same (Eq. 27), and it lies in Eq. 28's range."""
    gap = float(mixing_gaps(alpha_i[None], Theta, Phi)[0])
    pairs = squared_norm(Theta[:, None] - Theta[None], Phi)
    least, greatest = eigenvalues(Phi)
    mixed = (1 - float(alpha_i.square().sum())) / 2
    return (
        Statement(abs(gap - 0.5 * float(alpha_i @ pairs @ alpha_i)), upper=0.0),
        Statement(gap, lower=least * separation(Theta) ** 2 * mixed, upper=greatest * diameter(Theta) ** 2 * mixed),
    )


def recovery_bound(epsilon: float, Theta: Tensor, Phi: Tensor) -> float:
    """kappa(Phi)^1/2 epsilon diam_F(Theta), the bound of Theorem 2."""
    return _root_condition(Phi) * epsilon * diameter(Theta)


def theorem_2(alpha: Tensor, Theta: Tensor, Phi: Tensor) -> Statement:
    """The largest error of experts extracted from exact uploads with population losses; zero with pure anchors
    (Corollary 1).

    Raises:
        ValueError: anchors are not half pure (Assumption 3).
    """
    found = extract(barycentres(alpha, Theta), population_losses(Theta, Phi)).experts
    return Statement(identity_error(found, Theta), upper=recovery_bound(_anchored(alpha), Theta, Phi))


class Ladder(NamedTuple):
    """The three steps of Proposition 3, each beside its term: (A) and I, (B1) and II, (B2) and III; largest over tasks.

    `total` bounds the whole error by the sum of the terms.
    """

    anchors: Statement
    clients: Statement
    public: Statement
    total: Statement


def proposition_3(
    alpha: Tensor,
    Theta: Tensor,
    Phi: Tensor,
    uploads: Tensor,
    public: Sequence[Moments],
    *,
    sigma: float,
    Q: float,
    delta: float = 0.05,
    C0: float = 1.0,
) -> Ladder:
    """Finite-sample recovery, term by term (Eqs. 34 to 50). I and II are exact; III holds up to C0, which is universal
    but not known, with probability 1 - delta, for n_m large enough.

    Args:
        public: the tasks' public sets, of one size. Q: the bound on ||phi(x)||_2.

    Raises:
        ValueError: anchors are not half pure (Assumption 3).
    """
    epsilon, diam = _anchored(alpha), diameter(Theta)
    optima = barycentres(alpha, Theta)
    local = _largest(uploads - optima)
    losses = population_losses(Theta, Phi)
    exact, noisy = extract(optima, losses).experts, extract(uploads, losses).experts
    found = extract(uploads, public_losses(public)).experts
    first = recovery_bound(epsilon, Theta, Phi)
    second = _root_condition(Phi) * math.sqrt((2 * epsilon * diam + local) * local)
    spanned = int(torch.linalg.matrix_rank((uploads[1:] - uploads[0]).flatten(1)))
    noise = math.sqrt(sigma**2 + Q**2 * (diam + local) ** 2)
    third = C0 * noise * math.sqrt((spanned + math.log(2 / delta)) / public[0].count / eigenvalues(Phi)[0])
    return Ladder(
        Statement(identity_error(exact, Theta), upper=first),
        Statement(_largest(noisy - exact), upper=second),
        Statement(_largest(found - noisy), upper=third),
        Statement(identity_error(found, Theta), upper=first + second + third),
    )


def theorem_3(found: Tensor, Theta: Tensor) -> Statement:
    """The error of a label-blind estimate (M, l, r) in the worst of the instances that differ by names: Eq. 9.

    Over the orbit any expert can have any name, so this is the largest distance of an estimate from an expert.
    """
    return Statement(float(distances(found, Theta).max()), lower=diameter(Theta) / 2)


class Shrunk(NamedTuple):
    """The second instance of Theorem 4, Eq. 51, and how far it was shrunk."""

    Theta: Tensor
    alpha: Tensor
    t: float


def shrunk_instance(alpha: Tensor, Theta: Tensor) -> Shrunk:
    """Other experts and mixtures with the same upload pool, for clients that are all interior: Eq. 51.

    t is min(gamma, sep / (2 diam)), at most 1/2, with the largest gamma that the mixtures allow.

    Raises:
        ValueError: a client without some task, so that gamma = 0.
    """
    M = len(Theta)
    gamma = M * float(alpha.min())
    if gamma <= 0:
        raise ValueError("a client lies on the simplex's boundary; Theorem 4 is about interior clients (gamma > 0)")
    t = min(gamma, separation(Theta) / (2 * diameter(Theta)))
    return Shrunk((1 - t) * Theta + t * Theta.mean(dim=0), (alpha - t / M) / (1 - t), t)


def theorem_4(found: Tensor, alpha: Tensor, Theta: Tensor) -> Statement:
    """The error of a pool-only estimate (M, l, r) in the worse of a pool's two instances, best relabelled: Eq. 10."""
    other = shrunk_instance(alpha, Theta)
    worse = max(vertex_set_error(found, Theta), vertex_set_error(found, other.Theta))
    M = len(Theta)
    return Statement(worse, lower=(M - 1) / (2 * M) * other.t * height(Theta))


def proposition_4(candidates: Tensor, Theta: Tensor, Phi: Tensor) -> Statement:
    """The least margin of population losses by which the supervised assignment of candidates (M, l, r) is right: (a).

    Negative where it is wrong.

    Raises:
        ValueError: the candidates are further from the experts than Eq. 54 allows.
    """
    near = distances(candidates, Theta)
    eta, least_apart = float(near.min(dim=0).values.max()), separation(Theta)
    allowed = least_apart / (2 * (1 + _root_condition(Phi)))
    if eta > allowed:
        raise ValueError(f"candidates are within {eta:.3g} of experts; Proposition 4 needs {allowed:.3g} (Eq. 54)")
    losses = squared_norm(candidates[None] - Theta[:, None], Phi)  # task, candidate
    right = near.argmin(dim=0)
    own = losses.gather(1, right[:, None])
    others = losses.scatter(1, right[:, None], math.inf)
    return Statement(float((others - own).min()), lower=0.25 * eigenvalues(Phi)[0] * least_apart**2)


def proposition_4_samples(
    Theta: Tensor, Phi: Tensor, *, sigma: float, Q: float, delta: float = 0.05, C: float = 1.0
) -> int:
    """Public examples a task that make the empirical assignment right with probability 1 - delta: (b), Eq. 55.

    C is universal but not known.
    """
    diam = diameter(Theta)
    K = Q**2 * diam**2 + sigma * Q * diam
    G = 0.25 * eigenvalues(Phi)[0] * separation(Theta) ** 2
    return math.ceil(C * (K / G) ** 2 * math.log(len(Theta) ** 2 / delta))


def mixture_bound(local: float, recovered: float, Theta: Tensor, Phi: Tensor) -> float:
    """eta_C of Eq. 58, for uploads within `local` of clients' optima and experts within `recovered` of the true ones.

    Infinite where the simplex is degenerate (h = 0).
    """
    h = height(Theta)
    root = _root_condition(Phi)
    return math.inf if h == 0 else 2 * len(Theta) / h * (root * (local + recovered) + recovered)


def proposition_5(alpha: Tensor, Theta: Tensor, Phi: Tensor, uploads: Tensor, experts: Tensor) -> Statement:
    """The largest l1 error of the barycentric mixtures over clients: Eq. 58."""
    local = _largest(uploads - barycentres(alpha, Theta))
    error = (mixtures(uploads, experts, Phi) - alpha).abs().sum(dim=1)
    return Statement(float(error.max()), upper=mixture_bound(local, identity_error(experts, Theta), Theta, Phi))


def corollary_2(alpha: Tensor, Theta: Tensor, Phi: Tensor, estimated: Tensor, experts: Tensor) -> Statement:
    """The largest excess risk of the static adapters sum_m alphahat_im theta_m^ext: Eq. 63, with eta_C as measured."""
    excess = squared_norm(barycentres(estimated, experts) - barycentres(alpha, Theta), Phi)
    eta = float((estimated - alpha).abs().sum(dim=1).max())
    off = eta * diameter(Theta) + identity_error(experts, Theta)
    return Statement(float(excess.max()), upper=eigenvalues(Phi)[1] * off**2)


def proposition_11(alpha: Tensor, Theta: Tensor, Phi: Tensor) -> list[Statement]:
    """Each task's squared error under the balanced program from exact uploads and population losses: Eq. 119.

    Raises:
        ValueError: anchors are not half pure (Assumption 3).
    """
    pool, losses = barycentres(alpha, Theta), population_losses(Theta, Phi)
    alone, coupled = extract(pool, losses).experts, extract_balanced(pool, losses).experts
    excess = (squared_norm(coupled - Theta, Phi) - squared_norm(alone - Theta, Phi)).clamp(min=0)
    anchor = recovery_bound(_anchored(alpha), Theta, Phi) ** 2
    squared = (coupled - Theta).square().sum(dim=(1, 2))
    least = eigenvalues(Phi)[0]
    return [
        Statement(float(error), upper=anchor + float(more) / least) for error, more in zip(squared, excess, strict=True)
    ]


def proposition_12(raw: Sequence[Tensor], first: Tensor, lam: float) -> list[Statement]:
    """How far the smoothed contributions are from the raw ones (M, N), round by round: Eq. 125, and so Eqs. 121, 122.

    C^(t+1) = (1 - lam) C^(t) + lam raw^(t) from C^(1) = `first`; element t - 1 compares C^(t) with raw^(t).

    Raises:
        ValueError: lam outside (0, 1).
    """
    if not 0 < lam < 1:
        raise ValueError(f"the smoothing's rate lies in (0, 1), not at {lam:g}")
    C, bound = first, float((first - raw[0]).norm())
    found = [Statement(bound, upper=bound)]
    for before, after in pairwise(raw):
        C = (1 - lam) * C + lam * before
        bound = (1 - lam) * bound + float((after - before).norm())
        found.append(Statement(float((C - after).norm()), upper=bound))
    return found


def _anchored(alpha: Tensor) -> float:
    epsilon = impurity(alpha)
    if epsilon >= 0.5:
        raise ValueError(f"the purest clients leave epsilon = {epsilon:.3g}; Assumption 3 needs less than 1/2")
    return epsilon


def _root_condition(Phi: Tensor) -> float:
    least, greatest = eigenvalues(Phi)
    return math.sqrt(greatest / least)


def _largest(blocks: Tensor) -> float:
    return float(blocks.flatten(1).norm(dim=1).max())


def _largest_difference(matrices: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrices[:, None] - matrices[None], 2).max())
