"""SGD, Adam and AdamW over a buffer (S, P) whose rows are clients: torch.optim's formulas, one client a row.

A row that does not step is not read or written, so a client's numbers never depend on its company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.models.loading import moved
from coterie.training.asks import TrainSettings


@dataclass
class OptimizerState:
    """Moments (S, P) and each client's own number of steps taken. SGD has `first` only with momentum."""

    first: Tensor | None
    second: Tensor | None
    steps: list[int]

    @classmethod
    def fresh(cls, values: Tensor, settings: TrainSettings) -> OptimizerState:
        """Zero moments for the clients of `values` (S, P)."""
        adaptive = settings.optimizer != "sgd"
        first = torch.zeros_like(values) if adaptive or settings.momentum else None
        return cls(first, torch.zeros_like(values) if adaptive else None, [0] * values.shape[0])


def gradient_norms(grads: Tensor) -> Tensor:
    """The Euclidean norm of each client's gradient: (S, P) -> (S,)."""
    norms: Tensor = torch.linalg.vector_norm(grads, dim=1)
    return norms


def clip_gradients(grads: Tensor, norms: Tensor, clip: float) -> None:
    """Scale rows in place by min(1, clip / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does for one model."""
    grads.mul_((clip / (norms + 1e-6)).clamp(max=1.0).unsqueeze(1))


def step(
    values: Tensor,
    grads: Tensor,
    state: OptimizerState,
    rates: Sequence[float],
    settings: TrainSettings,
    *,
    rows: Sequence[int] | None = None,
    trained: Tensor | None = None,
    rate_scale: Tensor | None = None,
) -> None:
    """One optimiser step in place.

    Args:
        values, grads: (S, P).
        rates: the learning rate of each client at this step, S numbers.
        rows: the clients that step; None for all.
        trained: bool (S, P); where False, nothing changes. None trains all.
        rate_scale: factors of the learning rate, (S, P).
    """
    if rows is None or len(rows) == values.shape[0]:
        state.steps = [count + 1 for count in state.steps]
        _update(values, grads, state.first, state.second, state.steps, rates, settings, trained, rate_scale)
        return
    chosen = moved(torch.tensor(list(rows)), values.device)
    for row in rows:
        state.steps[row] += 1
    part = values[chosen]
    first, second = (None if moment is None else moment[chosen] for moment in (state.first, state.second))
    mask, factors = (None if wide is None else wide[chosen] for wide in (trained, rate_scale))
    counts, lrs = [state.steps[row] for row in rows], [rates[row] for row in rows]
    _update(part, grads[chosen], first, second, counts, lrs, settings, mask, factors)
    values[chosen] = part
    for whole, moment in ((state.first, first), (state.second, second)):
        if whole is not None and moment is not None:
            whole[chosen] = moment


def _update(
    values: Tensor,
    grads: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    counts: Sequence[int],
    rates: Sequence[float],
    settings: TrainSettings,
    trained: Tensor | None,
    rate_scale: Tensor | None,
) -> None:
    before = values.clone() if trained is not None else None
    decay = settings.weight_decay
    rate = _column(values, rates)
    if rate_scale is not None:
        rate = rate * rate_scale
    if decay and settings.optimizer == "adamw":
        values.mul_(1 - rate * decay)
    elif decay:
        grads = grads + decay * values
    if first is None:
        values.sub_(rate * grads)
    elif second is None:
        first.mul_(settings.momentum).add_(grads)
        values.sub_(rate * first)
    else:
        beta1, beta2 = settings.betas
        first.lerp_(grads, 1 - beta1)
        second.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
        size = rate / _column(values, [1 - beta1**count for count in counts])
        root = _column(values, [(1 - beta2**count) ** 0.5 for count in counts])
        denominator = second.sqrt().div_(root).add_(settings.eps)
        values.sub_(size * first / denominator)
    if before is not None and trained is not None:
        values.copy_(torch.where(trained, values, before))


def _column(like: Tensor, numbers: Sequence[float]) -> Tensor:
    return moved(torch.tensor(list(numbers), dtype=like.dtype), like.device).unsqueeze(1)


def learning_rate(settings: TrainSettings, number: int, total: int) -> float:
    """The rate of step `number` (from 0) of `total`: a linear rise over the warm-up, then constant or linear to zero.

    Warm-up step k has lr (k + 1) / warmup; a linear schedule has lr (total - k) / (total - warmup).
    """
    if number < settings.warmup_steps:
        return settings.lr * (number + 1) / settings.warmup_steps
    if settings.schedule == "linear":
        return settings.lr * (total - number) / max(1, total - settings.warmup_steps)
    return settings.lr
