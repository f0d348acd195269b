"""FedSEE beyond squared loss: perturbed barycentres, recovery, softmax cross-entropy and deep models (D.6, D.8).

Shapes as in `geometry`. A Hessian is (r l, r l) over vec(theta), column by column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.theory.fedsee.geometry import Statement, barycentres, diameter, eigenvalues, impurity
from coterie.theory.fedsee.routing import Inputs


@dataclass(frozen=True)
class Curvature:
    """mu <= Hessians <= L on the set, their dispersion Delta_H over tasks and Lipschitz constant L_H: Eqs. 102, 103."""

    mu: float
    L: float
    Delta_H: float
    L_H: float

    def relative(self, diam: float) -> float:
        """The relative dispersion of Eq. 103; Theorem 6 says nothing where it is one or more."""
        return (self.Delta_H + 0.5 * self.L_H * diam) / self.mu


def quadratic_curvature(Phis: Tensor) -> Curvature:
    """Of the squared loss with the tasks' second moments (M, r, r), whose Hessians are 2 Phi_m (x) I."""
    least, greatest = eigenvalues(Phis)
    apart = float(torch.linalg.matrix_norm(Phis[:, None] - Phis[None], 2).max())
    return Curvature(2 * least, 2 * greatest, 2 * apart, 0.0)


def theorem_6(alpha: Tensor, Theta: Tensor, optima: Tensor, curvature: Curvature) -> list[Statement]:
    """How far each client's optimum (N, l, r) is from the barycentre of the tasks' optima: Eq. 105."""
    centres = barycentres(alpha, Theta)
    radii = (Theta[None] - centres[:, None]).flatten(2).norm(dim=2).max(dim=1).values
    off = (optima - centres).flatten(1).norm(dim=1)
    relative = curvature.relative(diameter(Theta))
    return [Statement(float(d), upper=relative * float(radius)) for d, radius in zip(off, radii, strict=True)]


def theorem_7(alpha: Tensor, Theta: Tensor, found: Tensor, curvature: Curvature) -> Statement:
    """The largest error of experts (M, l, r) extracted from exact uploads under a general loss: Eq. 111.

    Raises:
        ValueError: anchors are not half pure (Assumption 3).
    """
    epsilon, diam = impurity(alpha), diameter(Theta)
    if epsilon >= 0.5:
        raise ValueError(f"the purest clients leave epsilon = {epsilon:.3g}; Assumption 3 needs less than 1/2")
    error = float((found - Theta).flatten(1).norm(dim=1).max())
    root = math.sqrt(curvature.L / curvature.mu)
    return Statement(error, upper=root * (epsilon + curvature.relative(diam)) * diam)


class Softmax(NamedTuple):
    """Softmax regression over finitely many inputs: f0 (K, l), and the classes' probabilities y (M, K, l) by task."""

    inputs: Inputs
    f0: Tensor
    y: Tensor

    def probabilities(self, theta: Tensor) -> Tensor:
        """p_theta(x), (K, l)."""
        return (self.f0 + self.inputs.phi @ theta.T).softmax(dim=1)

    def hessian(self, m: int, theta: Tensor) -> Tensor:
        """E_m [phi phi^T (x) S(z_theta)]: Eq. 114."""
        p = self.probabilities(theta)
        S = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        phi = self.inputs.phi
        size = phi.shape[1] * p.shape[1]
        return torch.einsum("k,ka,kb,kij->aibj", self.inputs.P[m], phi, phi, S).reshape(size, size)

    def gradient(self, m: int, theta: Tensor) -> Tensor:
        """The gradient of task m's cross-entropy, (l, r)."""
        off = (self.probabilities(theta) - self.y[m]) * self.inputs.P[m][:, None]
        return off.T @ self.inputs.phi

    def optimum(self, mixture: Tensor) -> Tensor:
        """The minimiser (l, r) of a mixture (M,) of the tasks' risks, with columns of sum zero, by Newton's method.

        Raises:
            ArithmeticError: no convergence in 100 steps, as where a class is certain and the optimum infinite.
        """
        l, r = self.y.shape[2], self.inputs.phi.shape[1]  # noqa: E741
        centre = torch.eye(l, dtype=self.f0.dtype) - 1 / l
        shift = torch.kron(torch.eye(r, dtype=self.f0.dtype), torch.eye(l, dtype=self.f0.dtype) - centre)
        theta = torch.zeros(l, r, dtype=self.f0.dtype)
        for _ in range(100):
            gradient = sum((a * self.gradient(m, theta) for m, a in enumerate(mixture)), torch.zeros_like(theta))
            H = sum((a * self.hessian(m, theta) for m, a in enumerate(mixture)), shift)
            step: Tensor = torch.linalg.solve(H, gradient.T.flatten()).reshape(r, l).T
            length, decrement = float(step.norm()), float((step * gradient).sum().clamp(min=0).sqrt())
            if length < 1e-9 * (1 + float(theta.norm())):
                return centre @ (theta - step)
            if float(gradient.norm()) < 1e-13:
                break  # flat, and no nearer: the optimum is infinite
            theta = centre @ (theta - step / (1 + decrement * self.inputs.Q))
        raise ArithmeticError(f"softmax regression did not converge: the last Newton step has length {length:.3g}")


def proposition_9(model: Softmax, theta_max: float) -> Curvature:
    """The constants of softmax cross-entropy on ||theta||_F <= theta_max, on columns of sum zero: Eqs. 115 and 116."""
    Q, l = model.inputs.Q, model.y.shape[2]  # noqa: E741
    least, greatest = eigenvalues(model.inputs.second_moments())
    smallest = math.exp(-2 * (float(model.f0.abs().max()) + theta_max * Q)) / l
    P = model.inputs.P
    variation = float((P[:, None] - P[None]).abs().sum(dim=2).max()) / 2
    return Curvature(l * smallest**2 * least, greatest / 2, Q**2 * variation, 2 * Q**3)


def measured_curvature(model: Softmax, one: Tensor, other: Tensor, theta_max: float) -> list[Statement]:
    """Hessians at two parameters (l, r) beside Proposition 9: their range on columns of sum zero, their dispersion over
    tasks, and what they change by between the two, over the distance.

    Raises:
        ValueError: a parameter outside of ||theta||_F <= theta_max, or equal ones.
    """
    if max(float(one.norm()), float(other.norm())) > theta_max or torch.equal(one, other):
        raise ValueError(f"two different parameters of norm at most {theta_max:g} are needed")
    bound = proposition_9(model, theta_max)
    r, l = model.inputs.phi.shape[1], model.y.shape[2]  # noqa: E741
    whole, _ = torch.linalg.qr(torch.eye(l, dtype=one.dtype) - 1 / l)
    basis = torch.kron(torch.eye(r, dtype=one.dtype), whole[:, : l - 1].contiguous())
    tasks = range(len(model.y))
    here = torch.stack([model.hessian(m, one) for m in tasks])
    there = torch.stack([model.hessian(m, other) for m in tasks])
    values = torch.linalg.eigvalsh(basis.T @ torch.cat([here, there]) @ basis)
    apart = float(torch.linalg.matrix_norm(here[:, None] - here[None], 2).max())
    changed = float(torch.linalg.matrix_norm(here - there, 2).max()) / float((one - other).norm())
    return [
        Statement(float(values.min()), lower=bound.mu),
        Statement(float(values.max()), upper=bound.L),
        Statement(apart, upper=bound.Delta_H),
        Statement(changed, upper=bound.L_H),
    ]


def corollary_8(alpha: Tensor, Theta: Tensor, optima: Tensor, tau: float, mu: float) -> Statement:
    """How far a deep model's client optima (N, l, r) are from barycentres of its tasks' optima (M, l, r): Eq. 118.

    tau: how far deep risks are from first-order ones, uniformly. mu: strong convexity of the latter.
    """
    off = (optima - barycentres(alpha, Theta)).flatten(1).norm(dim=1)
    return Statement(float(off.max()), upper=4 * math.sqrt(tau / mu))
