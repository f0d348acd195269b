"""Frozen linear layers whose products are as fast as oneDNN makes them, in networks of bfloat16 on a CPU.

A bias is added within the product, and the weights of a small network are laid out once, as products want them. What
a layer says, and the gradient of its input, are the same to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from coterie.maths.products import Packed, by_frozen, is_fast, packed

MOST = 2**27
"""Bytes of copies of weights in a process at most: none are made of a network with more."""


def fuse(network: nn.Module) -> None:
    """Have all layers of the very class nn.Linear do so that may, and only those; again whenever weights change."""
    unfuse(network)
    layers = [module for module in network.modules() if isinstance(module, nn.Linear) and _may(module)]
    small = sum(2 * layer.weight.nbytes for layer in layers) <= MOST
    for layer in layers:
        if small or layer.bias is not None:
            layer.forward = Fused(layer, packed(layer.weight) if small else None)  # type: ignore[assignment, method-assign]


def unfuse(network: nn.Module) -> None:
    """Undo `fuse`."""
    for module in network.modules():
        if isinstance(vars(module).get("forward"), Fused):
            del module.forward


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is no more than a frozen matrix and a bias."""
    if type(layer) is not nn.Linear or not _is_frozen(layer):
        return False
    own = vars(layer).get("forward")
    return (own is None or isinstance(own, Fused)) and not layer._forward_hooks and not layer._forward_pre_hooks


def packed_of(layer: nn.Module) -> Packed | None:
    """The copies of a layer's weight, where there are."""
    own = vars(layer).get("forward")
    return own.packed if isinstance(own, Fused) else None


@dataclass(frozen=True)
class Fused:
    """In the place of a linear layer's forward; pickled and copied without the weight's copies, which none takes."""

    module: nn.Linear
    packed: Packed | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if not _is_frozen(self.module):
            return nn.Linear.forward(self.module, x)
        return by_frozen(x, self.module.weight, self.module.bias, self.packed)

    def __reduce__(self) -> tuple[Any, ...]:
        return Fused, (self.module,)


def _may(module: nn.Linear) -> bool:
    """Some other library may have put a forward there."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return is_fast(module.weight) and _is_frozen(module)


def _is_frozen(layer: nn.Linear) -> bool:
    return not any(parameter.requires_grad for parameter in layer.parameters())
