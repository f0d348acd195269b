"""Clusters of a few hundred items by pairwise distances: average linkage, and the silhouette that says how many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def cosine_distances(items: Sequence[Sequence[Tensor]]) -> Tensor:
    """The mean over parts of 1 - cos of flattened parts, (N, N) fp64, symmetric, with a diagonal of zeros.

    An item is a list of tensors, part by part of one shape in all items; one part at a time is flattened, and only
    inner products are formed. A part that is zero is at distance 1 from every other. Source: FedLEASE's distance of
    clients, the parts being the B of all adapted layers.

    Raises:
        ValueError: items of different parts, or without any.
    """
    shapes = {tuple(tuple(part.shape) for part in item) for item in items}
    if len(shapes) != 1 or shapes == {()}:
        raise ValueError(f"items must have the same parts, at least one, not {sorted(shapes)}")
    total = torch.zeros(len(items), len(items), dtype=torch.float64)
    for parts in zip(*items, strict=True):
        rows = torch.stack([part.reshape(-1).to("cpu", torch.float64) for part in parts])
        rows = torch.nn.functional.normalize(rows, dim=1)
        total += 1 - rows @ rows.T
    distances = (total / len(items[0])).clamp_(0, 2)
    return ((distances + distances.T) / 2).fill_diagonal_(0)


@torch.no_grad()
def average_linkage(distances: Tensor) -> list[list[int]]:
    """Labels of N items in N, N - 1, ..., 1 clusters: always the two that are nearest on average become one.

    Element k - 1 of the result has k clusters, numbered by their lowest member. Among equal distances, the pair with
    the lowest members is joined. Distances (N, N) fp64 as of `cosine_distances`; N^2 numbers, N^3 comparisons.
    """
    count = len(distances)
    apart = distances.clone().fill_diagonal_(torch.inf)
    sizes = torch.ones(count, dtype=torch.float64)
    owner = list(range(count))  # the lowest member of each item's cluster stands for it
    partitions = [_numbered(owner)]
    for _ in range(count - 1):
        i, j = sorted(divmod(int(apart.argmin()), count))
        merged = (sizes[i] * apart[i] + sizes[j] * apart[j]) / (sizes[i] + sizes[j])
        apart[i] = apart[:, i] = merged
        apart[i, i] = torch.inf
        apart[j] = apart[:, j] = torch.inf
        sizes[i] += sizes[j]
        owner = [i if label == j else label for label in owner]
        partitions.append(_numbered(owner))
    return partitions[::-1]


@torch.no_grad()
def silhouette(distances: Tensor, labels: Sequence[int]) -> float:
    """The mean of (b - a) / max(a, b) over items (Rousseeuw 1987), 0 for an item that is alone in its cluster.

    a: an item's mean distance to the others of its cluster; b: that to the nearest other cluster.

    Raises:
        ValueError: fewer than two clusters.
    """
    member = torch.nn.functional.one_hot(torch.tensor(labels)).to(torch.float64)
    member = member[:, member.any(dim=0)]
    sizes = member.sum(dim=0)
    if len(sizes) < 2:
        raise ValueError("a silhouette needs at least two clusters")
    sums = distances @ member
    a = (sums * member).sum(dim=1) / ((member @ sizes) - 1).clamp(min=1)
    b = torch.where(member > 0, torch.inf, sums / sizes).amin(dim=1)
    largest = torch.maximum(a, b)
    score = torch.where((member @ sizes > 1) & (largest > 0), (b - a) / largest, 0.0)
    return float(score.mean())


def best_partition(distances: Tensor, most: int) -> tuple[list[int], float]:
    """The labels with the largest silhouette among 2 to `most` clusters by average linkage, fewer first among equals.

    At most N - 1 clusters are tried; where that leaves none, all items are one cluster, and the silhouette is 0.
    """
    partitions = average_linkage(distances)
    tried = [(silhouette(distances, labels), labels) for labels in partitions[1 : min(most, len(distances) - 1)]]
    score, labels = max(tried, key=lambda one: one[0], default=(0.0, partitions[0]))
    return labels, score


def _numbered(owners: Sequence[int]) -> list[int]:
    """Clusters renumbered in the order in which they first occur."""
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
    return [numbers[owner] for owner in owners]
