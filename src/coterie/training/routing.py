"""Penalties on how much a mini-batch uses routed experts, as part of the backward pass of the task loss.

Such a penalty depends on means over the whole mini-batch. Of one that is computed in parts, the means come from a pass
before, without gradients; the penalty's derivative by them then makes it an addend of each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from coterie.adapters.inject import Binding, Usage
from coterie.errors import ModelError
from coterie.protocol import Model, Routed, RoutingPenalty, map_tensors
from coterie.protocol.penalties import Addend

P = TypeVar("P", bound=Addend)


def check_routing(model: Model, penalties: Iterable[object], who: str) -> None:
    """Raises ModelError for a routing penalty on a term of which the model routes nothing."""
    for penalty in penalties:
        if isinstance(penalty, RoutingPenalty):
            layers = model.terms.get(penalty.term, {})
            if not any(isinstance(term, Routed) for term in layers.values()):
                raise ModelError(f"{who}: a penalty is on the routing of {penalty.term!r}, but nothing is routed there")


def of_clients(penalties: Sequence[P], rows: Tensor) -> list[P]:
    """Stacked penalties of these clients alone."""
    return [map_tensors(penalty, lambda tensor: tensor[rows]) for penalty in penalties]


def noting(binding: Binding, batch: Mapping[str, Tensor], clients: int, device: torch.device) -> Usage:
    """Let the coming pass over this batch note how it uses experts."""
    # Without a mask, as of images, all positions count.
    held = batch.get("attention_mask", torch.empty(clients, 0))
    binding.usage = Usage(held.to(device).view(clients, -1) if held.numel() else held.to(device))
    return binding.usage


@torch.no_grad()
def whole_usage(
    binding: Binding,
    batches: Iterable[Mapping[str, Tensor]],
    passed: Callable[[Mapping[str, Tensor]], object],
    clients: int,
    device: torch.device,
) -> Usage:
    """What all parts of a mini-batch use together, by a pass over each."""
    whole = Usage(torch.empty(0))
    for batch in batches:
        part = noting(binding, batch, clients, device)
        passed(batch)
        for place, sums in part.sums.items():
            known = place in whole.sums
            whole.sums[place] = whole.sums[place] + sums if known else sums
            whole.counts[place] = whole.counts[place] + part.counts[place] if known else part.counts[place]
    return whole


def routing_loss(penalties: Sequence[RoutingPenalty], part: Usage, whole: Usage) -> Tensor:
    """A scalar with the gradient that the penalties, taken at the whole mini-batch's means, have through this part."""
    leaves = {place: sums.detach().requires_grad_() for place, sums in whole.sums.items()}
    means = {place: leaf / whole.counts[place].unsqueeze(-1) for place, leaf in leaves.items()}
    values = [
        penalty.value({layer: mean for (name, layer), mean in means.items() if name == penalty.term}).sum()
        for penalty in penalties
    ]
    slopes = torch.autograd.grad(torch.stack(values).sum(), list(leaves.values()), allow_unused=True)
    found = [(slope * part.sums[place]).sum() for place, slope in zip(leaves, slopes, strict=True) if slope is not None]
    return torch.stack(found).sum()


@contextmanager
def drawn_again(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Whatever is drawn inside is drawn once more afterwards."""
    before = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
