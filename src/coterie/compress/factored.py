"""Linear layers that hold two factors and no matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.protocol.parties import Layer


class FactoredLinear(nn.Module):
    """y = U (V x) + b with U (d_out, inner) and V (inner, d_in); several layers of one input may share one V."""

    bias: nn.Parameter | None

    def __init__(self, U: Tensor, V: Tensor | nn.Parameter, bias: Tensor | None) -> None:
        super().__init__()
        self.U = nn.Parameter(U, requires_grad=False)
        self.V = V if isinstance(V, nn.Parameter) else nn.Parameter(V, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def empty(cls, layer: Layer, rank: int, bias: bool) -> FactoredLinear:
        """Of these sizes, for values that are yet to be read."""
        U, V = torch.empty(layer.d_out, rank), torch.empty(rank, layer.d_in)
        return cls(U, V, torch.empty(layer.d_out) if bias else None)

    @property
    def in_features(self) -> int:
        """d_in."""
        return int(self.V.shape[1])

    @property
    def out_features(self) -> int:
        """d_out."""
        return int(self.U.shape[0])

    @property
    def inner(self) -> int:
        """The rank k."""
        return int(self.V.shape[0])

    @property
    def weight(self) -> Tensor:
        """U, for networks that look at the dtype or device of a layer's weight."""
        return self.U

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.V), self.U, self.bias)

    def through(self, x: Tensor, inside: Callable[[Tensor], Tensor]) -> Tensor:
        """U inside(V x) + b, for what stands between the factors: (..., inner) -> (..., inner)."""
        return functional.linear(inside(functional.linear(x, self.V)), self.U, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.inner} -> {self.out_features}, bias={self.bias is not None}"


def matrix(module: nn.Module) -> Tensor:
    """The parameter of nn.Linear, or of GPT-2's Conv1D the other way round, as (d_out, d_in): a view."""
    weight = cast(Tensor, module.weight)
    return weight.mT if hasattr(module, "nf") else weight


def shape(module: nn.Module) -> Layer:
    """(d_out, d_in) of such a module."""
    d_out, d_in = matrix(module).shape
    return Layer(int(d_out), int(d_in))


def put(network: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the one called `name`."""
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, module)
