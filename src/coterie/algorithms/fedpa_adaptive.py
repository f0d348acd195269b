"""FedPA-LoRA with a regularisation weight of each client's own, found anew in every round.

FedPA-LoRA, arXiv 2608.15381, Appendix F: three rules that the paper offers as directions, each from what a client sees
on the first mini-batch xi^(t,0) of its round before it trains. All else is FedPA-LoRA's, and nothing more travels.
Up: B_i, A_i, r_i (m + n) scalars a layer. Down: the reference, R_i (m + n); once, the seed of the initial factors.
Defaults are the paper's (lambda_0 = alpha = 1, weights between 0 and 10).
Deviations: the sum in Eq. 155 is read as under a root: the text speaks of a magnitude, and the root makes it the norm
of the vector in Eq. 157. Over several layers, norms and products are of all layers together, as Eq. 157 says. Loss and
gradients are taken without dropout; gradients are by the factors as they are trained, with the adapter's scale. In the
first round both products are zero, so that Eq. 156 gives its upper bound and Eq. 157 gives lambda_0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from coterie.algorithms.base import Program
from coterie.algorithms.factors import kept_factors
from coterie.algorithms.fedpa_lora import Download, FedPALoRA, State, preserved
from coterie.algorithms.joint_objective import joint_terms, mismatch
from coterie.protocol import (
    Adapter,
    Client,
    Evaluate,
    Federation,
    Gradient,
    Model,
    ProductDistance,
    Seen,
    Upload,
)

EPS = 1e-12
"""The paper's epsilon, which keeps denominators from zero."""


class OwnLambda:
    """What the three rules share: measures that count each client's own lambda."""

    def measures(self, state: State, federation: Federation, seen: Mapping[str, Seen]) -> dict[str, float]:
        """FedPA-LoRA's terms with each client's own lambda, and `lam`, the mean of these over those who answered."""
        lam = {
            name: 2 * float(penalty.weight)
            for name, one in seen.items()
            for penalty in one.penalties
            if isinstance(penalty, ProductDistance)
        }
        told = {"lam": sum(lam.values()) / len(lam)} if lam else {}
        return joint_terms(state.reference, federation, {name: seen[name] for name in lam}, lam) | told


@dataclass(frozen=True)
class FedPALoss(OwnLambda, FedPALoRA):
    """A client that still has much to learn is drawn less: lambda_0 / (1 + alpha f). `lam` is lambda_0."""

    alpha: float = 1.0

    traits = replace(FedPALoRA.traits, title="FedPA-LoRA, lambda by loss")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(alpha=self.alpha)

    def local(self, client: Client, download: Download) -> Program:
        own = kept_factors(client, download.init_key)
        first = yield Evaluate(Model(lora=own), "train", batch="first")  # f_i(W_i^(t,0); xi_i^(t,0))
        lam = self.lam / (1 + self.alpha * first.loss)  # Eq. 154
        return (yield from trained(client, own, download, lam))


@dataclass(frozen=True)
class FedPAGradient(OwnLambda, FedPALoRA):
    """Drawn as strongly as the task pulls, in proportion to how far apart the products are already (no lambda_0)."""

    lam: float = field(default=1.0, init=False, repr=False)
    alpha: float = 1.0
    lam_min: float = 0.0
    lam_max: float = 10.0

    traits = replace(FedPALoRA.traits, title="FedPA-LoRA, lambda by gradient")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(alpha=self.alpha)
        if not 0 <= self.lam_min < self.lam_max:
            raise ValueError(f"lam_min ({self.lam_min:g}) must be at least 0 and below lam_max ({self.lam_max:g})")

    def local(self, client: Client, download: Download) -> Program:
        own = kept_factors(client, download.init_key)
        task = yield Gradient(Model(lora=own), "train", batch="first")
        pull = float(normalised(task, own).norm())  # Eq. 155
        ratio = self.alpha * pull / (mismatch(own, download.reference) + EPS)
        lam = max(self.lam_min, min(ratio, self.lam_max))  # Eq. 156
        return (yield from trained(client, own, download, lam))


@dataclass(frozen=True)
class FedPADirection(OwnLambda, FedPALoRA):
    """Drawn less where task and alignment want the same, up to twice lambda_0 where they oppose. `lam` is lambda_0."""

    traits = replace(FedPALoRA.traits, title="FedPA-LoRA, lambda by direction")

    def local(self, client: Client, download: Download) -> Program:
        own = kept_factors(client, download.init_key)
        task = yield Gradient(Model(lora=own), "train", batch="first")
        g_f, g_r = normalised(task, own), normalised(alignment_gradient(own, download.reference), own)
        cosine = float(g_f @ g_r) / (float(g_f.norm() * g_r.norm()) + EPS)
        lam = self.lam * max(0.0, 1 - cosine)  # Eq. 157; rounding must not take it below zero
        return (yield from trained(client, own, download, lam))


def trained(client: Client, own: Adapter, download: Download, lam: float) -> Program:
    """=> Upload: lines 10-14 of Algorithm 1 with this client's lambda."""
    return Upload((yield from preserved(client, own, ProductDistance(download.reference, weight=lam / 2))))


def normalised(gradients: Mapping[str, Tensor], factors: Adapter) -> Tensor:
    """All factor gradients in one vector (float64), each over the norm of the other factor of its layer.

    Its norm is the surrogate of Eq. 155, and itself the g of Eq. 157. `gradients` holds `lora.<layer>.B` (d_out, r)
    and `lora.<layer>.A` (r, d_in) for every layer of `factors`.
    """
    parts = []
    for layer, term in factors.items():
        parts.append(gradients[f"lora.{layer}.B"].double().flatten() / (term.A.double().norm() + EPS))
        parts.append(gradients[f"lora.{layer}.A"].double().flatten() / (term.B.double().norm() + EPS))
    return torch.cat(parts)


def alignment_gradient(own: Adapter, reference: Adapter) -> dict[str, Tensor]:
    """The gradient of ||B A - B_g A_g||_F^2 / 2 by B and A, summed over layers; names and shapes as in `normalised`.

    From Gram matrices in float64, without a d_out x d_in matrix.
    """
    found = {}
    for layer, term in own.items():
        B, A = term.B.double(), term.A.double()
        B_g, A_g = reference[layer].left.double(), reference[layer].A.double()
        found[f"lora.{layer}.B"] = B @ (A @ A.mT) - B_g @ (A_g @ A.mT)
        found[f"lora.{layer}.A"] = (B.mT @ B) @ A - (B.mT @ B_g) @ A_g
    return found


def require_positive(**options: float) -> None:
    """Raises ValueError naming an option that is not above zero."""
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0, not {value:g}")
