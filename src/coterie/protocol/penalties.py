"""Regularisers of local training: data that the engine adds to the loss, one value for each client of a stack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from coterie.maths.gram import squared_distance
from coterie.protocol.messages import message
from coterie.protocol.prototypes import Prototypes
from coterie.protocol.terms import Adapter, LowRank, Model, Term

T = TypeVar("T", bound=Term)
SMALLEST_USAGE = 1e-8
"""What a mean routing weight counts as at least, lest its logarithm have no bound."""


class Addend(ABC):
    """What an objective of local training may have beside the task loss. Fields are data and stack as terms do."""

    @property
    @abstractmethod
    def signature(self) -> tuple[Any, ...]:
        """What must be equal for two clients' addends to stack."""

    @classmethod
    @abstractmethod
    def stack(cls, penalties: Sequence[Self], rank: int) -> Self:
        """Several clients' addends as one, ranks zero-padded to `rank` at least."""


class Penalty(Addend):
    """An addend that the model's parameters decide."""

    @abstractmethod
    def value(self, model: Model) -> Tensor:
        """The penalty of each client, shape (clients,), for a stacked model."""


class RoutingPenalty(Addend):
    """An addend that depends on how much a mini-batch uses routed experts; `term` is the name of the routed terms."""

    term: str

    @abstractmethod
    def value(self, usage: Mapping[str, Tensor]) -> Tensor:
        """The penalty of each client, (clients,), given each layer's mean routing weights (clients, M).

        Means are over the examples and token positions of a mini-batch, padding left out.
        """


class FeaturePenalty(Addend):
    """An addend that depends on the features of a mini-batch's examples, over which it is a mean."""

    @abstractmethod
    def value(self, features: Tensor, classes: Tensor) -> Tensor:
        """The penalty of each example (clients, n), given features (clients, n, d) and classes (clients, n) int64.

        Features are those of `Predict`; see `Prototypes`.
        """


@message
class ProductDistance(Penalty):
    """weight * sum over layers of ||B A - B_ref A_ref||_F^2 on unscaled products (FedPA-LoRA, Eq. 3), by Gram matrices.

    `weight` is a number (lambda / 2), or (clients,) once stacked; gradients never form a d_out x d_in matrix.
    """

    reference: Adapter
    weight: float | Tensor
    term: str = "lora"

    def value(self, model: Model) -> Tensor:
        own = model[self.term]
        total: Tensor | None = None
        for layer, reference in self.reference.items():
            distance = squared_distance(own[layer].left, own[layer].A, reference.left, reference.A)
            total = distance if total is None else total + distance
        if total is None:
            raise ValueError("a product distance needs a reference of at least one layer")
        return self.weight * total

    @property
    def signature(self) -> tuple[Any, ...]:
        return (
            ProductDistance,
            self.term,
            tuple((name, term.signature) for name, term in self.reference.items()),
        )

    @classmethod
    def stack(cls, penalties: Sequence[ProductDistance], rank: int) -> ProductDistance:
        reference, weight = _stacked([(penalty.reference, penalty.weight) for penalty in penalties], rank)
        return ProductDistance(reference, weight, penalties[0].term)


@message
class FactorDistance(Penalty):
    """weight * sum over layers and `parts` of ||Y - Y_ref||_F^2, Y in {B, A} (FedPA-LoRA, Eq. 17).

    Of other terms than low-rank ones `parts` names other parameters. The reference has the client's own rank. `weight`
    is a number (lambda / 2), or (clients,) once stacked.
    """

    reference: Mapping[str, Term]
    weight: float | Tensor
    parts: tuple[str, ...] = ("B", "A")
    term: str = "lora"

    def value(self, model: Model) -> Tensor:
        own = model[self.term]
        total: Tensor | None = None
        for layer, reference in self.reference.items():
            for part in self.parts:
                apart = own[layer].parameters[part] - reference.parameters[part]
                distance = apart.square().sum(dim=(-2, -1))
                total = distance if total is None else total + distance
        if total is None:
            raise ValueError("a factor distance needs a reference of at least one layer")
        return self.weight * total

    @property
    def signature(self) -> tuple[Any, ...]:
        layers = tuple((name, term.signature) for name, term in self.reference.items())
        return (FactorDistance, self.term, self.parts, layers)

    @classmethod
    def stack(cls, penalties: Sequence[FactorDistance], rank: int) -> FactorDistance:
        reference, weight = _stacked([(penalty.reference, penalty.weight) for penalty in penalties], rank)
        return FactorDistance(reference, weight, penalties[0].parts, penalties[0].term)


def _stacked(parts: Sequence[tuple[Mapping[str, T], float | Tensor]], rank: int) -> tuple[dict[str, T], Tensor]:
    """References and weights of several clients along a new leading axis, ranks zero-padded."""
    top = max(rank, *(term.rank for reference, _ in parts for term in reference.values()))
    reference = {name: type(term).stack([one[name] for one, _ in parts], top) for name, term in parts[0][0].items()}
    first = next(iter(next(iter(reference.values())).parameters.values()))
    return reference, torch.tensor([float(weight) for _, weight in parts], dtype=first.dtype)


@message
class TailNorm(Penalty):
    """weight * sum over layers of ||B[:, start:]||_F ||A[start:, :]||_F (HetLoRA, its rank self-pruning).

    `weight` and `start` are numbers, or (clients,) once stacked; without gradient where a norm vanishes.
    """

    start: int | Tensor
    weight: float | Tensor
    term: str = "lora"

    def value(self, model: Model) -> Tensor:
        products = [tail_norm(term, self.start) for term in model[self.term].values()]
        return self.weight * torch.stack(products).sum(dim=0)

    @property
    def signature(self) -> tuple[Any, ...]:
        return (TailNorm, self.term)

    @classmethod
    def stack(cls, penalties: Sequence[TailNorm], rank: int) -> TailNorm:
        starts = torch.tensor([int(penalty.start) for penalty in penalties])
        weights = torch.tensor([float(penalty.weight) for penalty in penalties], dtype=torch.float64)
        return TailNorm(starts, weights, penalties[0].term)


def tail_norm(term: LowRank, start: int | Tensor) -> Tensor:
    """||B[:, start:]||_F ||A[start:, :]||_F, shape (...,) for factors with leading axes; start a number or (...,)."""
    first = start.unsqueeze(-1) if isinstance(start, Tensor) else start
    tail = torch.arange(term.rank, device=term.A.device) >= first  # (..., r)
    B = torch.where(tail.unsqueeze(-2), term.left, 0.0)
    A = torch.where(tail.unsqueeze(-1), term.A, 0.0)
    product: Tensor = torch.linalg.vector_norm(B, dim=(-2, -1)) * torch.linalg.vector_norm(A, dim=(-2, -1))
    return product


@message
class UsageDivergence(RoutingPenalty):
    """weight / |P| * sum over routed layers of KL(target || mean usage) (FedSEE, Eq. 14).

    target (M,): a distribution over the experts, zero where one takes no part; usage below 1e-8 counts as that.
    `weight` is a number (beta_KL), or (clients,) once stacked.
    """

    target: Tensor
    weight: float | Tensor
    term: str = "experts"

    def value(self, usage: Mapping[str, Tensor]) -> Tensor:
        found = [
            (torch.xlogy(self.target, self.target) - self.target * used.clamp(min=SMALLEST_USAGE).log()).sum(dim=-1)
            for used in usage.values()
        ]
        return self.weight * torch.stack(found).mean(dim=0)

    @property
    def signature(self) -> tuple[Any, ...]:
        return (UsageDivergence, self.term, int(self.target.shape[-1]))

    @classmethod
    def stack(cls, penalties: Sequence[UsageDivergence], rank: int) -> UsageDivergence:
        targets = torch.stack([penalty.target for penalty in penalties])
        weights = torch.tensor([float(penalty.weight) for penalty in penalties], dtype=targets.dtype)
        return UsageDivergence(targets, weights, penalties[0].term)


@message
class PrototypeDistance(FeaturePenalty):
    """weight * the mean squared entry of f(x) - p_y, p_y the prototype of x's class (FedProto, its Eq. of L_R).

    0 for classes without a prototype. `weight` is a number (lambda), or (clients,) once stacked.
    """

    prototypes: Prototypes
    weight: float | Tensor

    def value(self, features: Tensor, classes: Tensor) -> Tensor:
        weight = self.weight.unsqueeze(-1) if isinstance(self.weight, Tensor) else self.weight
        return weight * self.prototypes.distances(features, classes)

    @property
    def signature(self) -> tuple[Any, ...]:
        return (PrototypeDistance, self.prototypes.signature)

    @classmethod
    def stack(cls, penalties: Sequence[PrototypeDistance], rank: int) -> PrototypeDistance:
        prototypes = Prototypes.stack([penalty.prototypes for penalty in penalties])
        weights = torch.tensor([float(penalty.weight) for penalty in penalties], dtype=prototypes.means.dtype)
        return PrototypeDistance(prototypes, weights)
