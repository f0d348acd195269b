"""FedSLM's weak-to-strong step: the compression artifact, its way into gradients, and the weight alpha (Props. 3, 4).

Letters: distributions (B, C) over C labels or choices, one an example (L9); f_w of the weak supervisor, f_s of the
student, f_hat its hardened prediction, f* of the reference, which the caller states: the paper's is the model with What
in place of W_g, labels are another. xi = f_w - f* is the artifact. Everything here can be measured on a run, but for
Lipschitz constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.theory.fedslm.aggregation import Theorem3


def hardened(f_s: Tensor) -> Tensor:
    """f_hat (B, C), one-hot (Eq. 11): of two classes, the upper half of the batch by rank is of class 1.

    By rank, so that exactly half is, whatever the ties (B // 2 of an odd batch; of equals the earlier). More classes,
    and a batch of one, have no such threshold: the largest entry.
    """
    rows, classes = f_s.shape
    chosen = f_s.argmax(dim=-1)
    if classes == 2 and rows > 1:
        chosen = torch.zeros(rows, dtype=torch.int64, device=f_s.device)
        chosen[f_s[:, 1].argsort(descending=True, stable=True)[: rows // 2]] = 1
    return torch.nn.functional.one_hot(chosen, classes).to(f_s.dtype)


def cross_entropy(target: Tensor, f: Tensor) -> Tensor:
    """-sum_c target_c log f_c, a row each (B,)."""
    return -torch.xlogy(target, f).sum(dim=-1)


def confidence_loss(f_s: Tensor, f_w: Tensor, f_hat: Tensor, alpha: float) -> Tensor:
    """(1 - alpha) CE(f_w, f_s) + alpha CE(f_hat, f_s), the batch's mean (Eq. 10); f_hat is a constant."""
    return ((1 - alpha) * cross_entropy(f_w, f_s) + alpha * cross_entropy(f_hat.detach(), f_s)).mean()


def entropy_loss(f_s: Tensor, f_w: Tensor, alpha: float) -> Tensor:
    """CE(f_w, f_s) + alpha H(f_s), the batch's mean: the loss of Appendix B, which is not that of Eq. 10 (L8)."""
    return (cross_entropy(f_w, f_s) + alpha * cross_entropy(f_s, f_s)).mean()


@dataclass(frozen=True, eq=False)
class Forces:
    """The gradient of an example's loss in the strong model's logits, in three parts (B, C) that sum to it."""

    clean: Tensor
    artifact: Tensor
    anchor: Tensor

    @property
    def gradient(self) -> Tensor:
        return self.clean + self.artifact + self.anchor


def confidence_forces(f_s: Tensor, f_w: Tensor, f_hat: Tensor, reference: Tensor, alpha: float) -> Forces:
    """Eq. 35: (1 - alpha)(f_s - f*) - (1 - alpha) xi + alpha (f_s - f_hat)."""
    return Forces(
        clean=(1 - alpha) * (f_s - reference),
        artifact=-(1 - alpha) * (f_w - reference),
        anchor=alpha * (f_s - f_hat),
    )


def entropy_forces(f_s: Tensor, f_w: Tensor, reference: Tensor, alpha: float) -> Forces:
    """The same of `entropy_loss`: (f_s - f*) - xi - alpha f_s (log f_s + H(f_s)), entry by entry.

    No part is scaled by 1 - alpha: alpha attenuates nothing here, and Propositions 3 and 4 do not speak of this loss.
    """
    entropy = cross_entropy(f_s, f_s)[:, None]
    return Forces(
        clean=f_s - reference,
        artifact=-(f_w - reference),
        anchor=-alpha * (torch.xlogy(f_s, f_s) + f_s * entropy),
    )


@dataclass(frozen=True)
class Lemma1:
    """max over examples of ||xi||_1 (measured) <= bound = L_f sum_i p_i delta_i <= worst = L_f delta_rmin = B_xi.

    exact: L_f times the error of `theorem_3` itself, between measured and bound.
    """

    measured: float
    exact: float
    bound: float
    worst: float


def lemma_1(f_w: Tensor, reference: Tensor, lipschitz: float, error: Theorem3) -> Lemma1:
    """The artifact's size (Eq. 34), for groups that sit at the projections of the reference, as Theorem 3 has it.

    Groups that moved elsewhere can exceed it; L_f times what `theorem_2` measures holds for them too.

    Args:
        lipschitz: L_f of Assumption 2, in the 1-norm of distributions and the Frobenius norm of weights.
    """
    return Lemma1(
        measured=float((f_w - reference).abs().sum(dim=-1).max()),
        exact=lipschitz * error.exact,
        bound=lipschitz * error.bound,
        worst=lipschitz * error.worst,
    )


def softmax_lipschitz(x: Tensor) -> float:
    """L_f of softmax(W x) for inputs x (B, n): max ||x||_2 / sqrt(2), reached in the limit of small changes.

    ||J v||_1 of the softmax's Jacobian J at p is at most the deviation of v under p, that at most half of v's range,
    and that at most ||v||_2 / sqrt(2).
    """
    return float(x.norm(dim=-1).max()) / math.sqrt(2)


def observed_lipschitz(f_w: Tensor, reference: Tensor, distance: float) -> float:
    """max ||xi||_1 / ||W_g - What||_F: what a run shows of L_f, from below.

    Raises:
        ValueError: a distance that is not positive.
    """
    if not distance > 0:
        raise ValueError(f"the weights must differ for a ratio of changes, not by {distance:g}")
    return float((f_w - reference).abs().sum(dim=-1).max()) / distance


@dataclass(frozen=True)
class Proposition3:
    """max ||(1 - alpha) xi||_2 (measured) <= sharp = (1 - alpha) B / sqrt(2) <= bound = (1 - alpha) B (Eq. 36).

    An artifact sums to 0, so its 2-norm is at most its 1-norm over sqrt(2); two classes reach that.
    """

    measured: float
    sharp: float
    bound: float


def proposition_3(f_w: Tensor, reference: Tensor, alpha: float, B_xi: float) -> Proposition3:
    """How large the artifact's part of the gradient is, with B_xi a bound of ||xi||_1."""
    bound = (1 - alpha) * B_xi
    return Proposition3(
        measured=(1 - alpha) * float((f_w - reference).norm(dim=-1).max()),
        sharp=bound / math.sqrt(2),
        bound=bound,
    )


@dataclass(frozen=True)
class Proposition4:
    """Means over examples that decide on alpha, against a stated reference f*.

    artifact: E||f_w - f*||^2. self_anchor: V_self = E||f_s - f_hat||^2. correlation: E<xi, f_s - f_hat>, 0 by premise.
    anchor: E||f_hat - f*||^2. cross: E<f_w - f*, f* - f_hat>. All norms are 2-norms.
    """

    artifact: float
    self_anchor: float
    correlation: float
    anchor: float
    cross: float

    @property
    def alpha(self) -> float:
        """Eq. 38: artifact / (V_self + artifact), the minimiser of `risk`; 0 where both are 0."""
        total = self.artifact + self.self_anchor
        return self.artifact / total if total > 0 else 0.0

    def ceiling(self, B_xi: float) -> float:
        """Eq. 38's bound of `alpha`, B^2 / (V_self + B^2), for a bound B of ||xi||_1: it grows with B."""
        total = self.self_anchor + B_xi**2
        return B_xi**2 / total if total > 0 else 0.0

    def risk(self, alpha: float) -> float:
        """Eq. 37: (1 - alpha)^2 E||xi||^2 + alpha^2 V_self.

        It is the mean squared error of the gradient against (1 - alpha)(f_s - f*), a target that moves with alpha, and
        only where `correlation` is 0; against the clean target f_s - f* that the paper names, see `error`.
        """
        return (1 - alpha) ** 2 * self.artifact + alpha**2 * self.self_anchor

    def error(self, alpha: float) -> float:
        """E||gradient - (f_s - f*)||^2 = E||(1 - alpha) f_w + alpha f_hat - f*||^2, without any premise."""
        crossed = 2 * alpha * (1 - alpha) * self.cross
        return (1 - alpha) ** 2 * self.artifact - crossed + alpha**2 * self.anchor

    @property
    def best_alpha(self) -> float:
        """The minimiser of `error` in [0, 1]: the mixture of f_w and f_hat that is nearest to the reference.

        E<f_w - f*, f_w - f_hat> / E||f_w - f_hat||^2, clipped; 0 where f_w and f_hat are one.
        """
        apart = self.artifact + 2 * self.cross + self.anchor
        return min(1.0, max(0.0, (self.artifact + self.cross) / apart)) if apart > 0 else 0.0


def proposition_4(f_s: Tensor, f_w: Tensor, f_hat: Tensor, reference: Tensor) -> Proposition4:
    """What decides on alpha (Proposition 4), measured on a set of examples (B, C)."""
    f_s, f_w, f_hat, reference = (f.double() for f in (f_s, f_w, f_hat, reference))
    xi, confident, off = f_w - reference, f_s - f_hat, reference - f_hat
    return Proposition4(
        artifact=_mean(xi, xi),
        self_anchor=_mean(confident, confident),
        correlation=_mean(xi, confident),
        anchor=_mean(off, off),
        cross=_mean(xi, off),
    )


def _mean(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum(dim=-1).mean())
