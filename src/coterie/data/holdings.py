"""The record of who holds which example, with figures of how unequal it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from coterie.data.partition import Partition


def statistics(parts: Partition, labels: ArrayLike) -> dict[str, Any]:
    """How unequal a partition is, ready for JSON.

    Returns clients, examples, sizes (per client), classes (the label values), histogram (per client, in the
    order of `classes`), and two means over clients that hold anything, of total variation distances between label
    distributions (0: alike, 1: no class shared): mean_total_variation, of two clients, over all pairs;
    mean_from_pooled, of a client and all clients' examples together.
    """
    values = np.asarray(labels).reshape(-1)
    kinds = np.unique(values)
    histogram = np.stack([np.bincount(np.searchsorted(kinds, values[part]), minlength=len(kinds)) for part in parts])
    return {
        "clients": len(parts),
        "examples": int(histogram.sum()),
        "sizes": histogram.sum(axis=1).tolist(),
        "classes": kinds.tolist(),
        "histogram": histogram.tolist(),
        "mean_total_variation": mean_total_variation(histogram),
        "mean_from_pooled": mean_from_pooled(histogram),
    }


def mean_total_variation(histogram: np.ndarray) -> float:
    """Mean total variation distance over pairs of rows, each normalised; histogram: (clients, classes).

    In O(N log N) per class: among sorted x, the pairs' sum of |x_i - x_j| is the sum of (2k - N + 1) x_(k).
    """
    filled = histogram[histogram.sum(axis=1) > 0]
    count = len(filled)
    if count < 2:
        return 0.0
    ordered = np.sort(filled / filled.sum(axis=1, keepdims=True), axis=0)
    weights = 2.0 * np.arange(count) - count + 1
    return float(weights @ ordered.sum(axis=1)) / (count * (count - 1))


def mean_from_pooled(histogram: np.ndarray) -> float:
    """Mean total variation distance of each row, normalised, from the normalised sum of all; (clients, classes)."""
    filled = histogram[histogram.sum(axis=1) > 0]
    if not len(filled):
        return 0.0
    pooled = filled.sum(axis=0) / filled.sum()
    return float(np.abs(filled / filled.sum(axis=1, keepdims=True) - pooled).sum(axis=1).mean() / 2)


def manifest(
    parts: Partition,
    labels: ArrayLike,
    *,
    how: Mapping[str, Any],
    splits: Sequence[Mapping[str, np.ndarray]] | None = None,
    groups: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The content of partition.json: exactly who holds which example, with statistics.

    how: the partitioner's name, options and seed, as JSON values. splits: per client, the parts of `split`;
    without it each client's indices stand as they are. groups: (n,) what each example belongs to; each client then
    says how many of which it holds.

    Raises:
        ValueError: splits that are not the parts' own examples (a fault of the caller).
    """
    if splits is None:
        holdings: list[dict[str, Any]] = [{"indices": part.tolist()} for part in parts]
    else:
        for client, (part, shares) in enumerate(zip(parts, splits, strict=True)):
            if not np.array_equal(np.sort(np.concatenate(list(shares.values()))), part):
                raise ValueError(f"client {client}: the split is not of the examples that it holds")
        holdings = [{name: share.tolist() for name, share in shares.items()} for shares in splits]
    if groups is not None:
        for held, part in zip(holdings, parts, strict=True):
            held["groups"] = dict(sorted(Counter(groups[index] for index in part).items()))
    return {
        "how": dict(how),
        "statistics": statistics(parts, labels),
        "clients": [{"client": client, **held} for client, held in enumerate(holdings)],
    }


def check_disjoint(sets: Mapping[str, np.ndarray]) -> None:
    """That no example is in two of the sets of indices, such as a server's public data and a client's.

    Raises:
        ValueError: naming the two sets and the example (a fault of the caller).
    """
    holder: dict[int, str] = {}
    for name, indices in sets.items():
        for index in indices.tolist():
            if holder.setdefault(index, name) != name:
                raise ValueError(f"example {index} is in {holder[index]} and in {name}")
