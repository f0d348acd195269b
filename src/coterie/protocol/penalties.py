"""Regularisers of local training: data that the engine adds to the loss, one value for each client of a stack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from coterie.maths.gram import squared_distance
from coterie.protocol.messages import message
from coterie.protocol.terms import Adapter, LowRank, Model


class Penalty(ABC):
    """An addend of the local objective. Fields are data and stack as terms do."""

    @abstractmethod
    def value(self, model: Model) -> Tensor:
        """The penalty of each client, shape (clients,), for a stacked model."""

    @property
    @abstractmethod
    def signature(self) -> tuple[Any, ...]:
        """What must be equal for two clients' penalties to stack."""

    @classmethod
    @abstractmethod
    def stack(cls, penalties: Sequence[Self], rank: int) -> Self:
        """Several clients' penalties as one, ranks zero-padded to `rank` at least."""


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
        first = penalties[0]
        reference: Adapter = {
            name: LowRank.stack([penalty.reference[name] for penalty in penalties], rank) for name in first.reference
        }
        dtype = next(iter(reference.values())).A.dtype
        weight = torch.tensor([float(penalty.weight) for penalty in penalties], dtype=dtype)
        return ProductDistance(reference, weight, first.term)
