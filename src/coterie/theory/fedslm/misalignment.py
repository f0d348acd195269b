"""FedSLM's misalignment: how far the best core is from the projection of a reference (Propositions 2, 5, 6, 7).

Exact on a quadratic with separable curvature, the form that K-FAC gives a layer. Letters as in `subspaces`; What (m, n)
the reference, Wloc the minimiser of a group's loss L_i, f(X) = L_i(U X V), mu the constant of the Polyak-Lojasiewicz
inequality. Bounds use ||U||_2 ||V||_2 where the paper has lambda_1 kappa(S), which is never smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.maths.keys import Key
from coterie.theory.fedslm.subspaces import Subspace, amplification, geometric_core, subspace


@dataclass(frozen=True, eq=False)
class Quadratic:
    """L(W) = 1/2 <W - Wloc, A (W - Wloc) C>: A (m, m), C (n, n) symmetric positive semidefinite, all float64.

    Linear regression on inputs with second moment C has A = I.
    """

    Wloc: Tensor
    A: Tensor
    C: Tensor

    @property
    def smoothness(self) -> float:
        """L of Assumption 1(a)."""
        return float(torch.linalg.matrix_norm(self.A, 2) * torch.linalg.matrix_norm(self.C, 2))

    def loss(self, W: Tensor) -> float:
        return 0.5 * float(((W - self.Wloc) * self.gradient(W)).sum())

    def gradient(self, W: Tensor) -> Tensor:
        return self.curvature(W - self.Wloc)

    def curvature(self, M: Tensor) -> Tensor:
        """The Hessian applied to M (m, n): A M C."""
        return self.A @ M @ self.C


@dataclass(frozen=True, eq=False)
class CoreLoss:
    """f(X) = L(U X V), a quadratic with Hessian X -> a X c, a = U^T A U and c = V C V^T (r, r)."""

    of: Quadratic
    U: Tensor
    V: Tensor

    @property
    def pl_constant(self) -> float:
        """mu: the least eigenvalue of the Hessian that is not 0, rounding apart."""
        return math.prod(float(values.min()) for values, _ in (self._left(), self._right()))

    def gradient(self, X: Tensor) -> Tensor:
        return self.U.T @ self.of.gradient(self.U @ X @ self.V) @ self.V.T

    def minimiser(self, X: Tensor) -> Tensor:
        """The minimiser that is nearest to X, and that gradient steps from X reach."""
        left, right = (vectors / values @ vectors.T for values, vectors in (self._left(), self._right()))
        return X - left @ self.gradient(X) @ right

    def gap(self, X: Tensor) -> float:
        """f(X) - min f, from the distance to a minimiser: no difference of losses."""
        away = X - self.minimiser(X)
        return 0.5 * float((away * (self.U.T @ self.of.curvature(self.U @ away @ self.V) @ self.V.T)).sum())

    def _left(self) -> tuple[Tensor, Tensor]:
        return _positive_part(self.U.T @ self.of.A @ self.U)

    def _right(self) -> tuple[Tensor, Tensor]:
        return _positive_part(self.V @ self.of.C @ self.V.T)


def _positive_part(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (k,) of a (r, r) above rounding, and their vectors (r, k).

    Raises:
        ValueError: there is none, so the loss does not depend on the core.
    """
    values, vectors = torch.linalg.eigh((a + a.T) / 2)
    above = values > len(a) * 1e-13 * values[-1].abs()
    if not bool(above.any()):
        raise ValueError("the loss does not depend on the core: its curvature is 0 on the subspace")
    return values[above], vectors[:, above]


@dataclass(frozen=True)
class Growth:
    """How far a core's weights are from the best ones, ||U (X - X*) V||_F, and what bounds it.

    measured <= bound = ||U||_2 ||V||_2 (2 gap / mu)^1/2 <= by_gradient = ||U||_2 ||V||_2 ||grad f(X)||_F / mu, with gap
    = f(X) - min f and X* the minimiser nearest to X. On a run gap and gradient can be measured, mu cannot.
    """

    gap: float
    bound: float
    by_gradient: float
    measured: float


def proposition_2a(loss: Quadratic, U: Tensor, V: Tensor, X: Tensor) -> Growth:
    """The optimisation residual of a core X (r, r): quadratic growth (Lemma 5) lifted by Lemma 6, as behind Eq. 27."""
    f = CoreLoss(loss, U, V)
    greatest, mu, gap = amplification(U, V).greatest, f.pl_constant, f.gap(X)
    return Growth(
        gap=gap,
        bound=greatest * math.sqrt(2 * gap / mu),
        by_gradient=greatest * float(f.gradient(X).norm()) / mu,
        measured=float((U @ (X - f.minimiser(X)) @ V).norm()),
    )


def proposition_2b(loss: Quadratic, U: Tensor, V: Tensor, W_hat: Tensor) -> Growth:
    """The misalignment residual of a reference What (m, n), Eq. 29: `proposition_2a` at the geometric core.

    gap is Delta_i(What) of Eq. 24. Where the minimiser is not unique, X* must be the one nearest to the geometric core:
    the bound does not hold for just any, nor for the one that training from the identity finds, unless What = U V.
    """
    return proposition_2a(loss, U, V, geometric_core(U, V, W_hat))


@dataclass(frozen=True)
class CurvatureSide:
    """The premises of Proposition 5, the bound of Proposition 6, and what they are about.

    leakage: eps_G = ||Pi[grad L(What)]||_F. commutator: eps_H = ||H Pi - Pi H||_op. residual: delta_r(What).
    mu: restricted strong convexity. at_projection: ||Pi[grad L(Pi[What])]||_F. measured: ||eps_mis||_F.
    """

    leakage: float
    commutator: float
    residual: float
    mu: float
    at_projection: float
    measured: float

    @property
    def bound(self) -> float:
        """Proposition 6 of a quadratic, rho = 0."""
        return misalignment_bound(self.leakage, self.commutator, self.residual, self.mu)

    @property
    def by_projection(self) -> float:
        """at_projection / mu: never above `bound`, and one gradient is all it needs besides mu."""
        return self.at_projection / self.mu


def misalignment_bound(leakage: float, commutator: float, residual: float, mu: float, rho: float = 0.0) -> float:
    """Proposition 6 without its remainder: (eps_G + eps_H R + rho R^2 / 2) / mu, for every twice differentiable loss.

    Strong convexity on the subspace, taken between Pi[What] and the minimiser, gives ||eps_mis|| <=
    ||Pi[grad L(Pi[What])]|| / mu at once, and Taylor's formula from What to Pi[What] bounds that gradient by
    eps_G + eps_H R + rho R^2 / 2. So neither the O-term of Eq. 81 nor the stability condition is needed, and rho need
    only hold on the segment between the two.

    Raises:
        ValueError: mu is not positive (premise c1).
    """
    if not mu > 0:
        raise ValueError(f"restricted strong convexity (c1) asks for mu > 0, not {mu:g}")
    return (leakage + commutator * residual + rho * residual**2 / 2) / mu


def propositions_5_and_6(loss: Quadratic, space: Subspace, W_hat: Tensor) -> CurvatureSide:
    """Propositions 5 and 6 of a quadratic: where leakage and commutator are 0, so is what is measured.

    The converse does not hold: they may cancel each other.

    Raises:
        ValueError: the curvature is singular on the subspace (premise c1).
    """
    f = CoreLoss(loss, space.U0, space.V0)
    a, c = space.U0.T @ loss.A @ space.U0, space.V0 @ loss.C @ space.V0.T
    mu = float(torch.linalg.eigvalsh(a)[0] * torch.linalg.eigvalsh(c)[0])
    if not mu > 1e-12 * loss.smoothness:
        raise ValueError(
            f"the curvature is singular on the subspace: restricted strong convexity (c1) fails, mu {mu:g}"
        )
    X = space.coordinates(W_hat)
    return CurvatureSide(
        leakage=float(space.coordinates(loss.gradient(W_hat)).norm()),
        commutator=commutator(loss, space),
        residual=float(space.leave(W_hat).norm()),
        mu=mu,
        at_projection=float(f.gradient(X).norm()),
        measured=float((X - f.minimiser(X)).norm()),
    )


def commutator(loss: Quadratic, space: Subspace) -> float:
    """||H Pi - Pi H||_op (Eq. 78) of H[M] = A M C, exactly, from matrices of r^2 rows.

    The commutator is antisymmetric, of the norm of (I - Pi) H Pi. With A U0 = U0 a + E and V0 C = c V0 + F, E and F
    outside of the subspaces, that maps X to E X c V0 + U0 a X F + E X F, three orthogonal parts.
    """
    AU, VC = loss.A @ space.U0, space.V0 @ loss.C
    a, c = space.U0.T @ AU, VC @ space.V0.T
    E, F = AU - space.U0 @ a, VC - c @ space.V0
    EE, FF = E.T @ E, F @ F.T
    squared = torch.kron(EE, c @ c) + torch.kron(a @ a, FF) + torch.kron(EE, FF)
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(squared)[-1])))


def commutator_from_below(curvature: Callable[[Tensor], Tensor], space: Subspace, key: Key, steps: int = 50) -> float:
    """||H Pi - Pi H||_op of any Hessian, from below, by power steps on X -> U0^T H (I - Pi) H[U0 X V0] V0^T.

    What a run can measure of eps_H; two Hessian-vector products a step.

    Args:
        curvature: M (m, n) -> H[M] (m, n), symmetric, float64.
        key: of the first X. steps: at least 1.
    """
    X = key.normal((space.rank, space.rank), dtype=torch.float64)
    norm = 0.0
    for _ in range(steps):
        outside = space.leave(curvature(space.U0 @ (X / X.norm()) @ space.V0))
        norm = float(outside.norm())
        if norm == 0:
            break
        X = space.coordinates(curvature(outside))
    return norm


@dataclass(frozen=True)
class DataSide:
    """Proposition 7 in its two forms, Eqs. 101 and 102, and a closer one.

    heterogeneity: H_i = ||What - Wloc||_F. compression: delta_r(Wloc). gap: Delta_i(What) <= gap_sharp <= gap_bound =
    L/2 (H_i + delta)^2. gap_sharp = L/2 (||Pi[What - Wloc]||^2 + delta^2) uses that the two parts are orthogonal.
    measured: ||eps_mis||_F <= bound = ||U||_2 ||V||_2 (L / mu)^1/2 (H_i + delta).
    """

    heterogeneity: float
    compression: float
    gap: float
    gap_sharp: float
    gap_bound: float
    measured: float
    bound: float


def proposition_7(loss: Quadratic, U: Tensor, V: Tensor, W_hat: Tensor) -> DataSide:
    """The misalignment split into heterogeneity and compression of the group's own optimum (Proposition 7)."""
    space, growth = subspace(U, V), proposition_2b(loss, U, V, W_hat)
    apart, L = W_hat - loss.Wloc, loss.smoothness
    heterogeneity, compression = float(apart.norm()), float(space.leave(loss.Wloc).norm())
    within = float(space.coordinates(apart).norm())
    mu = CoreLoss(loss, U, V).pl_constant
    return DataSide(
        heterogeneity=heterogeneity,
        compression=compression,
        gap=growth.gap,
        gap_sharp=L / 2 * (within**2 + compression**2),
        gap_bound=L / 2 * (heterogeneity + compression) ** 2,
        measured=growth.measured,
        bound=amplification(U, V).greatest * math.sqrt(L / mu) * (heterogeneity + compression),
    )
