"""A small residual network behind a linear layer: down to a few entries, through a nonlinearity, and up again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.errors import ModelError
from coterie.maths.products import by_few
from coterie.protocol.messages import message
from coterie.protocol.parties import Layer
from coterie.protocol.terms import Term


@message
class Bottleneck(Term):
    """y + up gelu(down y), y the output of the layer with all other terms: down (..., k, d_out), up (..., d_out, k).

    With down = 0 it is the identity, and still learns: gelu has a slope at 0. No matrix on the layer's input is equal
    to it.
    """

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        return int(self.down.shape[-2])

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {"down": self.down, "up": self.up}

    def with_parameters(self, values: Mapping[str, Tensor]) -> Bottleneck:
        return replace(self, **values)

    def apply(self, x: Tensor) -> Tensor:
        """What is added to the layer's output x (..., N, d_out), in its dtype."""
        return F.gelu(by_few(x, self.down.to(x.dtype))) @ self.up.mT.to(x.dtype)

    def dense(self) -> Tensor:
        raise ModelError("a bottleneck is no matrix: what it adds is not linear")

    def check(self, where: str, layer: Layer, rank: int | None) -> None:
        """`rank` does not bound k, which is the method's."""
        k, d = self.rank, layer.d_out
        if tuple(self.down.shape) != (k, d) or tuple(self.up.shape) != (d, k):
            raise ModelError(
                f"{where}: down {tuple(self.down.shape)} and up {tuple(self.up.shape)} do not fit an output of {d}; "
                f"expected (k, {d}) and ({d}, k)"
            )

    @classmethod
    def stack(cls, terms: Sequence[Bottleneck], rank: int) -> Bottleneck:
        return Bottleneck(torch.stack([term.down for term in terms]), torch.stack([term.up for term in terms]))

    def unstack(self, index: int, like: Bottleneck) -> Bottleneck:
        return Bottleneck(self.down[index].clone(), self.up[index].clone())

    @property
    def signature(self) -> tuple[Any, ...]:
        return (Bottleneck, tuple(self.down.shape[-2:]), self.down.dtype)
