"""Predictions as knowledge that is passed on: whose is the best for each example, and distributions as targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rewards(losses: Tensor) -> Tensor:
    """exp(-CE), how much each source is worth for each example (FedMKT's code)."""
    return torch.exp(-losses)


def best_source(losses: Tensor) -> Tensor:
    """For each example (E,) the source with the highest reward, that is the least loss (sources, E).

    The first of equals. FedMKT's dual-min CE.
    """
    return losses.argmin(dim=0)


def source_shares(losses: Tensor) -> Tensor:
    """The share (sources, E) of each source in a mean: a softmax over their rewards."""
    return rewards(losses).softmax(dim=0)


def merged(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Equal ids of a row put together: ids (n, k) int64 and non-negative weights (n, k), summed at one place of an id.

    Other places have weight 0 and stand last; ids rise before them.
    """
    order = ids.sort(dim=-1, stable=True)
    weights = weights.gather(-1, order.indices)
    fresh = torch.ones_like(order.values)
    fresh[:, 1:] = (order.values[:, 1:] != order.values[:, :-1]).long()
    group = fresh.cumsum(dim=-1) - 1
    summed = torch.zeros_like(weights).scatter_add_(-1, group, weights)
    return torch.zeros_like(ids).scatter_(-1, group, order.values), summed


def chosen_targets(
    ids: Sequence[Tensor], logits: Sequence[Tensor], losses: Tensor, examples: Tensor, temperature: float, mean: bool
) -> tuple[Tensor, Tensor]:
    """What each row is to learn from several sources: ids (n, k) and probabilities (n, k), float32.

    ids, logits: of each source (n, K_i), -inf where there is none; a source's distribution is softmax(logits /
    temperature) over its own. losses: (sources, E), examples: (n,) int64, the example of each row. mean: all sources by
    `source_shares`; else that of `best_source`.
    """
    width = max(one.shape[1] for one in ids)
    pad = torch.nn.functional.pad
    p = [pad((one.double() / temperature).softmax(dim=-1), (0, width - one.shape[1])) for one in logits]
    places = [pad(one.long(), (0, width - one.shape[1])) for one in ids]
    if mean:
        shares = source_shares(losses.double())[:, examples]
        weighted = torch.cat([share[:, None] * one for share, one in zip(shares, p, strict=True)], dim=1)
        found, weights = merged(torch.cat(places, dim=1), weighted)
    else:
        best = best_source(losses)[examples]
        rows = torch.arange(len(best))
        found, weights = merged(torch.stack(places)[best, rows], torch.stack(p)[best, rows])
    return found, weights.float()
