"""FedSEE's statements on routing, each as what it bounds and its bound: section 3.3 and D.5.

Inputs are finitely many, so that risks are sums: what a router knows of an input is its index. A router is p (K, M),
p[k, m] the weight of expert m at input k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.theory.fedsee.geometry import Statement, barycentres, diameter, eigenvalues, height, squared_norm


@dataclass(frozen=True)
class Inputs:
    """K inputs: P (M, K), the tasks' distributions over them, and the features phi (K, r)."""

    P: Tensor
    phi: Tensor

    @property
    def Q(self) -> float:
        """The bound on ||phi(x)||_2."""
        return float(self.phi.norm(dim=1).max())

    def second_moments(self) -> Tensor:
        """Phi_m of each task, (M, r, r)."""
        return torch.einsum("mk,kr,ks->mrs", self.P, self.phi, self.phi)

    def Phi(self) -> Tensor:
        """The common second moment (r, r).

        Raises:
            ValueError: the tasks' second moments differ (Assumption 2(ii)).
        """
        moments = self.second_moments()
        if not torch.allclose(moments, moments[:1].expand_as(moments), rtol=1e-9, atol=1e-9):
            raise ValueError("the tasks' second moments differ; Assumption 2(ii) wants one Phi for all")
        return moments.mean(dim=0)


def routed_excess(p: Tensor, alpha_i: Tensor, experts: Tensor, Theta: Tensor, inputs: Inputs) -> float:
    """R_i - Lambda_i, the routed risk above the oracle's, the noise: Eq. 87. alpha_i (M,), experts (M, l, r)."""
    routed = torch.einsum("km,mlr,kr->kl", p, experts, inputs.phi)
    wanted = torch.einsum("mlr,kr->mkl", Theta, inputs.phi)
    return float((alpha_i[:, None] * inputs.P * (routed - wanted).square().sum(dim=2)).sum())


def mean_usage(p: Tensor, alpha_i: Tensor, inputs: Inputs) -> Tensor:
    """pbar_i = E p_i(x) over the client's inputs, (M,)."""
    return (alpha_i @ inputs.P) @ p


def variation(p: Tensor, alpha_i: Tensor, inputs: Inputs) -> float:
    """V_i(p) = E ||p(x) - pbar||_1."""
    return float((alpha_i @ inputs.P) @ (p - mean_usage(p, alpha_i, inputs)).abs().sum(dim=1))


def static_excess(q: Tensor, alpha: Tensor, Theta: Tensor, Phi: Tensor) -> Tensor:
    """What constant routing by q (N, M) loses to each client's best adapter, (N,): Eq. 79."""
    return squared_norm(barycentres(q - alpha, Theta), Phi)


def theorem_5(p: Tensor, alpha_i: Tensor, Theta: Tensor, inputs: Inputs) -> Statement:
    """R_i - L_i(theta_i*) of routing over the true experts: Eq. 11."""
    least, greatest = eigenvalues(inputs.Phi())
    off = mean_usage(p, alpha_i, inputs) - alpha_i
    diam = diameter(Theta)
    slack = inputs.Q**2 * diam**2 * variation(p, alpha_i, inputs)
    return Statement(
        _above_static(p, alpha_i, Theta, inputs),
        lower=least * height(Theta) ** 2 * float(off.abs().max()) ** 2 - slack,
        upper=greatest * diam**2 / 4 * float(off.abs().sum()) ** 2 + slack,
    )


def concentration_error(p: Tensor, alpha_i: Tensor, inputs: Inputs, matching: Sequence[int]) -> float:
    """beta: 1 less the least mean weight of a present task's matched expert on its inputs; task m's is matching[m]."""
    weights = inputs.P @ p
    return max(1 - float(weights[m, k]) for m, k in enumerate(matching) if alpha_i[m] > 0)


def proposition_1(p: Tensor, alpha_i: Tensor, inputs: Inputs, matching: Sequence[int]) -> tuple[Statement, Statement]:
    """||pbar - Pi alpha||_1 <= 2 beta, and beta >= (||alpha - u||_1 - ||pbar - u||_1)_+ / 2."""
    beta = concentration_error(p, alpha_i, inputs, matching)
    usage = mean_usage(p, alpha_i, inputs)
    matched = torch.zeros_like(alpha_i)
    matched[list(matching)] = alpha_i
    u = 1 / len(alpha_i)
    balance = float((usage - u).abs().sum())
    return (
        Statement(float((usage - matched).abs().sum()), upper=2 * beta),
        Statement(beta, lower=max(0.0, float((alpha_i - u).abs().sum()) - balance) / 2),
    )


def corollary_3(p: Tensor, alpha_i: Tensor, experts: Tensor, Theta: Tensor, inputs: Inputs) -> Statement:
    """R_i - Lambda_i of routing over recovered experts (M, l, r): Eq. 86, with xi_max and beta as measured."""
    xi = float((experts - Theta).flatten(1).norm(dim=1).max())
    beta, diam = concentration_error(p, alpha_i, inputs, range(len(Theta))), diameter(Theta)
    upper = inputs.Q**2 * (xi**2 + (2 * xi * diam + diam**2) * beta)
    return Statement(routed_excess(p, alpha_i, experts, Theta, inputs), upper=upper)


def corollary_4(p: Tensor, alpha_i: Tensor, Theta: Tensor, inputs: Inputs, target: Tensor) -> Statement:
    """R_i - L_i(theta_i*) of a router whose mean usage is near a fixed target (M,): Eq. 94, with chi as measured.

    With the uniform target this is Corollary 5.
    """
    chi = float((mean_usage(p, alpha_i, inputs) - target).abs().max())
    missed = max(0.0, float((alpha_i - target).abs().max()) - chi)
    slack = inputs.Q**2 * diameter(Theta) ** 2 * variation(p, alpha_i, inputs)
    return Statement(
        _above_static(p, alpha_i, Theta, inputs),
        lower=eigenvalues(inputs.Phi())[0] * height(Theta) ** 2 * missed**2 - slack,
    )


def corollary_5(p: Tensor, alpha_i: Tensor, Theta: Tensor, inputs: Inputs) -> Statement:
    """Corollary 4 at the uniform target: what balanced routing costs a client, Eq. 95."""
    return corollary_4(p, alpha_i, Theta, inputs, torch.full_like(alpha_i, 1 / len(alpha_i)))


def proposition_6(
    W: Tensor, bias: Tensor, deltas: Tensor, noise: Tensor, Pi: Tensor, alphas: Tensor
) -> list[Statement]:
    """How far mean routing tells tasks and mixtures apart: Eq. 97, the largest over pairs of tasks, and Eq. 98.

    Args:
        W, bias: the linear router (E, d), (E,). deltas: tasks' shifts with the common mean, (M, d). noise: equally
            likely values of xi, (K, d). Pi: the projector of the principal subspace (d, d). alphas: two mixtures,
            (2, M).
    """
    logits = (deltas[:, None] + noise[None]) @ W.T + bias
    usage = logits.softmax(dim=-1).mean(dim=1)  # a row a task
    apart = (deltas[:, None] - deltas[None]).flatten(0, 1)
    outside = torch.eye(len(Pi), dtype=Pi.dtype) - Pi
    bound = 0.5 * sum(
        float(torch.linalg.matrix_norm(W @ part, 2)) * float((apart @ part).norm(dim=1).max()) for part in (Pi, outside)
    )
    one, other = alphas
    return [
        Statement(float(torch.cdist(usage, usage).max()), upper=bound),
        Statement(float(((one - other) @ usage).norm()), upper=float((one - other).abs().sum()) * bound),
    ]


def logit_radius(logits: Tensor) -> float:
    """nu: the largest norm of centred logits, Pi_M z, over inputs (K, M)."""
    return float((logits - logits.mean(dim=1, keepdim=True)).norm(dim=1).max())


def corollary_6(logits: Tensor, weights: Tensor) -> Statement:
    """V of a softmax router with small logits (K, M) at inputs of these probabilities (K,)."""
    p = logits.softmax(dim=1)
    spread = float(weights @ (p - weights @ p).abs().sum(dim=1))
    return Statement(spread, upper=math.sqrt(logits.shape[1]) / 2 * logit_radius(logits))


def proposition_7(logits: Tensor, weights: Tensor, target: Tensor) -> tuple[Statement, Statement]:
    """Calibration in the small-logit regime: (a) with rho = KL(ctilde || pbar) as measured; (b) for the router whose
    mean logits are shifted to fit the target (M,), which lies inside the simplex.

    Args:
        logits: (K, M) at inputs of probabilities `weights` (K,).
    """
    M = len(target)
    usage = weights @ logits.softmax(dim=1)
    mean = weights @ logits
    mean = mean - mean.mean()
    wanted = M * (target - 1 / M)
    nu = logit_radius(logits)
    first = Statement(
        float((mean - wanted).norm()), upper=M * (math.sqrt(2 * divergence(target, usage)) + 0.75 * nu**2)
    )
    fitted = logits - mean + wanted
    second = Statement(float((weights @ fitted.softmax(dim=1) - target).norm()), upper=0.75 * logit_radius(fitted) ** 2)
    return first, second


def divergence(target: Tensor, usage: Tensor) -> float:
    """KL(target || usage) of two mixtures (M,), with 0 log 0 = 0; not below zero by rounding."""
    return max(0.0, float(torch.special.xlogy(target, target).sum() - torch.special.xlogy(target, usage).sum()))


def corollary_7(
    p: Tensor, alpha_i: Tensor, Theta: Tensor, inputs: Inputs, target: Tensor, estimated: Tensor
) -> tuple[Statement, Statement]:
    """KL control of the mean usage (Eq. 100) and of the risk over true experts (Eq. 101).

    target: ctilde_i (M,). estimated: alphahat_i (M,), with eta_C as measured.
    """
    usage = mean_usage(p, alpha_i, inputs)
    bound = (
        math.sqrt(2 * divergence(target, usage))
        + float((estimated - alpha_i).abs().sum())
        + float((target - estimated).abs().sum())
    )
    diam = diameter(Theta)
    slack = inputs.Q**2 * diam**2 * variation(p, alpha_i, inputs)
    return (
        Statement(float((usage - alpha_i).abs().sum()), upper=bound),
        Statement(
            _above_static(p, alpha_i, Theta, inputs),
            upper=eigenvalues(inputs.Phi())[1] * diam**2 / 4 * bound**2 + slack,
        ),
    )


def _above_static(p: Tensor, alpha_i: Tensor, Theta: Tensor, inputs: Inputs) -> float:
    """R_i - L_i(theta_i*) over the true experts; negative where routing beats the best single adapter."""
    best = alpha_i.expand(len(p), -1)
    return routed_excess(p, alpha_i, Theta, Theta, inputs) - routed_excess(best, alpha_i, Theta, Theta, inputs)
