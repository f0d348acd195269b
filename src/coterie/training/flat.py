"""All trainable tensors of a stack of clients in one buffer, so that a step is a few operations in all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

# Rows end at whole vector registers, so that no element's arithmetic depends on how many rows there are.
_ALIGN = 64


@dataclass(frozen=True)
class Flat:
    """values and grads (S, P); leaves: name -> autograd leaf (S, ...), a view of values; slots: its view of grads."""

    values: Tensor
    grads: Tensor
    leaves: dict[str, Tensor]
    slots: dict[str, Tensor]

    @classmethod
    def empty(
        cls, clients: int, places: dict[str, tuple[int, tuple[int, ...]]], trained: set[str], like: Tensor
    ) -> Self:
        """Zero buffers for so many clients; leaves in `trained` require gradients."""
        width = width_of(places)
        values = torch.zeros(clients, width, dtype=like.dtype, device=like.device)
        grads = torch.zeros_like(values)
        leaves = {name: view(values, places, name).detach().requires_grad_(name in trained) for name in places}
        return cls(values, grads, leaves, {name: view(grads, places, name) for name in places if name in trained})

    def add_gradients(self, loss: Tensor, *, fresh: bool) -> None:
        """Differentiate a scalar by the trained leaves it depends on; `fresh` overwrites, else adds to, the grads."""
        names = list(self.slots)
        leaves = [self.leaves[name] for name in names]
        found: Sequence[Tensor | None] = torch.autograd.grad(loss, leaves, allow_unused=True)
        for name, grad in zip(names, found, strict=True):
            if grad is not None and fresh:
                self.slots[name].copy_(grad)
            elif grad is not None:
                self.slots[name].add_(grad)
            elif fresh:
                self.slots[name].zero_()


def arrange(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Name -> (first column, shape without the client axis) for stacked tensors (S, ...), in their order."""
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    start = 0
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape[1:])
        places[name] = (start, shape)
        start += math.prod(shape)
    return places


def width_of(places: Mapping[str, tuple[int, tuple[int, ...]]]) -> int:
    """P: the columns of a buffer, a multiple of 64."""
    end = max((start + math.prod(shape) for start, shape in places.values()), default=0)
    return max(_ALIGN, -(-end // _ALIGN) * _ALIGN)


def view(buffer: Tensor, places: Mapping[str, tuple[int, tuple[int, ...]]], name: str) -> Tensor:
    """The part of a buffer (S, P) that holds `name`, (S, ...)."""
    start, shape = places[name]
    return buffer[:, start : start + math.prod(shape)].view(buffer.shape[0], *shape)
