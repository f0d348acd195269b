"""A linear layer that keeps int8 codes and a scale for each row, as quantising libraries do, and networks of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """y = x W^T + b with W = diag(scale) codes; it has no `weight`, and counts how often W was formed."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        scale = weight.abs().amax(dim=1) / 127
        self.register_buffer("codes", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
        self.formed = 0

    def dense(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return self.codes.to(dtype) * self.scale.to(dtype)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        self.formed += 1
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.dense(x.dtype), bias)


class PackedLinear(nn.Linear):
    """A subclass of nn.Linear whose `weight` holds packed codes, in the manner of bitsandbytes' Linear4bit."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.scale = float(weight.abs().max()) / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8).reshape(-1, 1), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(self.out_features, self.in_features).to(x.dtype) * self.scale
        return nn.functional.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))


class Float8Linear(nn.Linear):
    """A subclass of nn.Linear with a full matrix of 8-bit floats and one scale beside it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.register_buffer("scale", weight.abs().max() / 100)
        self.weight = nn.Parameter((weight / self.scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), bias)


def quantised(network: nn.Module, kind: type[nn.Module] = Int8Linear) -> nn.Module:
    """Every linear layer of the network replaced, but for heads and the output layer."""
    for name, module in list(network.named_modules()):
        conv = type(module).__name__ == "Conv1D"
        if (isinstance(module, nn.Linear) or conv) and name not in ("classifier", "score", "lm_head"):
            parent, _, child = name.rpartition(".")
            weight = module.weight.detach().mT.contiguous() if conv else module.weight.detach()
            setattr(network.get_submodule(parent), child, kind(weight, module.bias))
    return network
