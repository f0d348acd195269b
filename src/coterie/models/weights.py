"""The weights of a network: which layers hold a plain matrix, and all of them hashed, cast and drawn anew."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from coterie.compress.factored import FactoredLinear
from coterie.maths.keys import Key
from coterie.models.targets import in_head, is_conv1d, shape_of

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of weights that are numbers as they stand: 8-bit floats need a scale."""


def plain_weight(module: nn.Module) -> Tensor | None:
    """A view (d_out, d_in) of the matrix that a linear layer multiplies by; None where it stores no such matrix.

    None for quantised layers of any make (packed or scaled weights, 8-bit floats, tensors of a class of their own), and
    for factored layers.
    """
    multiplies = is_conv1d(module) or type(module).forward is nn.Linear.forward
    weight = module._parameters.get("weight")
    if not multiplies or type(weight) is not nn.Parameter or weight.dtype not in PLAIN_DTYPES or weight.dim() != 2:
        return None
    view = weight.mT if is_conv1d(module) else weight
    layer = shape_of(module)
    return view if layer is not None and tuple(view.shape) == (layer.d_out, layer.d_in) else None


def draw(network: nn.Module, names: Sequence[str], key: Key, std: float) -> None:
    """Fresh values: biases 0, one-dimensional weights (norms) 1, all else normal; each from its own stream."""
    parameters = dict(network.named_parameters())
    for name in names:
        value = parameters.get(name)
        if value is None:
            continue
        if name.endswith("bias"):
            fresh = torch.zeros(value.shape)
        elif value.dim() < 2:
            fresh = torch.ones(value.shape)
        else:
            fresh = key.fold(name).normal(value.shape, std, torch.float64)
        value.data.copy_(fresh)


def digest(network: nn.Module) -> str:
    """blake2b over names, dtypes, shapes and bytes of all but the head: 32 hexadecimal digits."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, value in sorted(network.state_dict().items()):
        if in_head(name):
            continue
        if isinstance(value, Tensor):
            hashed.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
            hashed.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:  # what a quantised layer notes beside its tensors
            hashed.update(f"{name}={value!r};".encode())
    return hashed.hexdigest()


def cast(network: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and stored buffers, but nothing of quantised layers (codes and their scales).

    Buffers computed at construction (rotary frequencies) keep their precision.
    """
    stored = set(network.state_dict())
    kept = [
        name
        for name, module in network.named_modules()
        if shape_of(module) is not None and plain_weight(module) is None and not isinstance(module, FactoredLinear)
    ]
    for name, parameter in network.named_parameters():
        if parameter.is_floating_point() and not _inside(name, kept):
            parameter.data = parameter.data.to(dtype)
    for name, buffer in network.named_buffers():
        if name in stored and buffer.is_floating_point() and not _inside(name, kept):
            buffer.data = buffer.data.to(dtype)


def _inside(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)
