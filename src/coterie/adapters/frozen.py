"""Frozen linear layers whose bias is added within the product, in networks that compute in bfloat16 on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from coterie.maths.products import adds_within, by_frozen


def fuse(network: nn.Module) -> None:
    """Have all layers of the very class nn.Linear with a bias do so that may, and only those."""
    unfuse(network)
    for module in network.modules():
        # Some other library may have put a forward there.
        own = type(module) is nn.Linear and module.bias is not None and "forward" not in vars(module)
        if own and adds_within(module.weight):  # type: ignore[arg-type]
            module.forward = _Fused(module)  # type: ignore[arg-type]


def unfuse(network: nn.Module) -> None:
    """Undo `fuse`."""
    for module in network.modules():
        if isinstance(vars(module).get("forward"), _Fused):
            del module.forward


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is no more than a frozen matrix and a bias."""
    if type(layer) is not nn.Linear or layer.weight.requires_grad:
        return False
    own = vars(layer).get("forward")
    return (own is None or isinstance(own, _Fused)) and not layer._forward_hooks and not layer._forward_pre_hooks


@dataclass(frozen=True)
class _Fused:
    """In the place of a linear layer's forward."""

    module: nn.Linear

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        trained = weight.requires_grad or bias.requires_grad
        return nn.Linear.forward(self.module, x) if trained else by_frozen(x, weight, bias)
