"""Learning where to cut: a position gamma for each layer, trained through the SVD of its activations.

Dobi-SVD, arXiv 2502.02723. During training, singular value j = 0, 1, … of a layer's activations Y = X W^T is multiplied
by 0.5 tanh(beta (gamma - j)) + 0.5, which is 1/2 at j = gamma. The loss is the network's own plus a penalty on the
distance between the share of parameters that the positions stand for and the ratio that is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coterie.compress.base import Group, Loss, stacked_shape
from coterie.compress.calibration import batched
from coterie.compress.factored import matrix
from coterie.compress.ranks import parameters
from coterie.protocol.parties import Layer

BETA = 1.0
"""The steepness of a gate; at the 10 of the paper's code next to no gradient is left between two positions."""

PENALTY = 1.0
"""The weight of the distance from the wanted ratio. At the 400 of the paper's code it alone decides where the few steps
of a small calibration lead, which all layers then take together; what it leaves open, `within_budget` settles."""

CLOSE = 0.01
"""Singular values whose ratio is above 1 less this count as close: their inverse difference becomes a finite sum."""

_TERMS = 100
"""Terms of that sum: the largest value of 1 / (1 - q) that a gradient meets."""


class StableSVD(torch.autograd.Function):
    """The reduced SVD Y = U diag(s) V^T with a gradient that stays finite where singular values coincide.

    The exact gradient divides by s_i^2 - s_j^2. For s_j / s_i = q near 1, 1 / (1 - q) is replaced by its Taylor sum
    1 + q + … + q^99.
    """

    @staticmethod
    def forward(ctx: Any, Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        U, s, Vh = torch.linalg.svd(Y, full_matrices=False)
        ctx.save_for_backward(U, s, Vh)
        return U, s, Vh

    @staticmethod
    def backward(ctx: Any, gU: Tensor, gs: Tensor, gVh: Tensor) -> Tensor:
        U, s, Vh = ctx.saved_tensors
        V, gV = Vh.mT, gVh.mT
        F = inverse_differences(s)
        floor = _smallest(s)
        inverse = torch.where(s > floor, 1 / s.clamp(min=floor), 0)
        UgU, VgV = U.mT @ gU, V.mT @ gV
        inner = (F * (UgU - UgU.mT)) * s + s[:, None] * (F * (VgV - VgV.mT))
        gradient: Tensor = U @ (torch.diag(gs) + inner) @ V.mT
        gradient = gradient + ((gU - U @ UgU) * inverse) @ V.mT
        gradient = gradient + (U * inverse) @ (gV - V @ VgV).mT
        return gradient


def inverse_differences(s: Tensor) -> Tensor:
    """F_ij = 1 / (s_j^2 - s_i^2), (q, q) from s (q,) descending; 0 on the diagonal, finite for equal values."""
    larger, smaller = torch.maximum(s[:, None], s), torch.minimum(s[:, None], s)
    floor = _smallest(s)
    larger = larger.clamp(min=floor)
    q = smaller / larger
    # 1 / (larger^2 - smaller^2) = 1 / (larger (larger + smaller) (1 - q))
    gap = 1 - q
    taylor = torch.where(gap < 1e-9, _TERMS, -torch.expm1(_TERMS * q.log()) / gap.clamp(min=1e-9))
    share = torch.where(gap < CLOSE, taylor, 1 / gap.clamp(min=CLOSE))
    magnitude = share / (larger * (larger + smaller))
    upper = torch.ones_like(magnitude).triu(1)  # there s_j <= s_i, so the difference is not positive
    return magnitude * (upper.mT - upper)


def _smallest(s: Tensor) -> Tensor:
    """What counts as 0 among singular values (q,) descending; 1 where all are 0."""
    return torch.where(s[0] > 0, torch.finfo(s.dtype).eps * s[0], 1)


def gate(gamma: Tensor, count: int, beta: float = BETA) -> Tensor:
    """0.5 tanh(beta (gamma - j)) + 0.5 for j = 0 … count - 1, (count,)."""
    j = torch.arange(count, dtype=gamma.dtype, device=gamma.device)
    return 0.5 * torch.tanh(beta * (gamma - j)) + 0.5


def gated(Y: Tensor, gamma: Tensor) -> Tensor:
    """Activations (T, d_out) with their singular values gated, differentiable in both; in float32 or wider within."""
    wide = Y.to(torch.promote_types(Y.dtype, torch.float32))
    U, s, Vh = StableSVD.apply(wide)  # type: ignore[no-untyped-call]
    made: Tensor = (U * (s * gate(gamma.to(s), len(s)))) @ Vh
    return made.to(Y.dtype)


def learnt_ranks(
    network: nn.Module,
    layers: Mapping[str, Layer],
    windows: Tensor,
    loss: Loss,
    ranks: Mapping[Group, int],
    ratio: float,
    *,
    epochs: int,
    rate: float,
) -> dict[Group, int]:
    """A rank for each layer, learnt from the uniform `ranks`; together they hold no more than the ratio's parameters.

    Where the learnt positions stand for more parameters than the ratio allows, or fewer, all of them are multiplied by
    what mends it, and rounded down.
    """
    shapes = {group: stacked_shape(group, layers) for group in ranks}
    positions = learnt_positions(network, shapes, windows, loss, ranks, ratio, epochs=epochs, rate=rate)
    return within_budget(positions, shapes, ratio)


def learnt_positions(
    network: nn.Module,
    shapes: Mapping[Group, Layer],
    windows: Tensor,
    loss: Loss,
    ranks: Mapping[Group, int],
    ratio: float,
    *,
    epochs: int,
    rate: float,
) -> dict[Group, float]:
    """A position gamma for each layer, from its rank in `ranks` on.

    Trained by Adam as shares of min(d_out, d_in), the step falling from `rate` to 0.8 `rate` along a cosine, as 5 falls
    to 4 in the paper's code.
    """
    sizes = {group: min(shape.d_out, shape.d_in) for group, shape in shapes.items()}
    shares = {group: torch.tensor((rank + 0.5) / sizes[group], requires_grad=True) for group, rank in ranks.items()}
    batches = batched(windows)
    device = next(network.parameters()).device
    optimizer = torch.optim.Adam(list(shares.values()), lr=rate)
    steps = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps), eta_min=0.8 * rate)
    hooks = [
        network.get_submodule(group[0]).register_forward_hook(_gate_hook(share, sizes[group]))
        for group, share in shares.items()
    ]
    try:
        with torch.enable_grad():
            for step in range(steps):
                kept = kept_share(shapes, {group: share * sizes[group] for group, share in shares.items()})
                task = loss(network, batches[step % len(batches)].to(device))
                total = task + PENALTY * (kept - ratio).abs().to(task)
                optimizer.zero_grad()
                total.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                for group, share in shares.items():
                    share.data.clamp_(1 / sizes[group], 1)
    finally:
        for hook in hooks:
            hook.remove()
    return {group: float(share.detach()) * sizes[group] for group, share in shares.items()}


def kept_share(shapes: Mapping[Group, Layer], positions: Mapping[Group, Tensor]) -> Tensor:
    """sum gamma (m + n) / sum m n: what share of the layers' parameters the positions stand for."""
    whole = sum(shape.d_out * shape.d_in for shape in shapes.values())
    return torch.stack([gamma * parameters(shapes[group], 1) for group, gamma in positions.items()]).sum() / whole


def within_budget(positions: Mapping[Group, float], shapes: Mapping[Group, Layer], ratio: float) -> dict[Group, int]:
    """floor(c gamma), at least 1 and at most min(m, n), with the largest c whose parameters the ratio pays for."""
    budget = ratio * sum(shape.d_out * shape.d_in for shape in shapes.values())

    def ranks(c: float) -> dict[Group, int]:
        return {
            group: max(1, min(math.floor(c * gamma + 1e-9), shapes[group].d_out, shapes[group].d_in))
            for group, gamma in positions.items()
        }

    low, high = 0.0, 2.0 * max(max(shape.d_out, shape.d_in) for shape in shapes.values())
    for _ in range(60):
        middle = (low + high) / 2
        spent = sum(parameters(shapes[group], rank) for group, rank in ranks(middle).items())
        low, high = (middle, high) if spent <= budget else (low, middle)
    return ranks(low)


def _gate_hook(share: Tensor, size: int) -> Any:
    """Gate what a layer gives, its bias apart."""

    def after(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        bias = module.bias if isinstance(module.bias, Tensor) else None
        plain = output if bias is None else output - bias
        rows = plain.reshape(-1, matrix(module).shape[0])
        made = gated(rows, share * size).reshape(output.shape)
        return made if bias is None else made + bias

    return after
