"""What methods with clusters of clients share: who is alike, and what a cluster becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from coterie.algorithms.factors import average_factors
from coterie.maths.clusters import average_linkage, best_partition, cosine_distances
from coterie.protocol import Adapter, Uploads
from coterie.protocol.messages import Uploaded


def clustered_by_B(adapters: Mapping[str, Adapter], most: int, exactly: int | None) -> tuple[dict[str, str], float]:
    """Clusters "0", "1", ... of clients by the mean over layers of 1 - cos of their B, with average linkage.

    As many as have the largest silhouette, from 2 to `most`, or `exactly` so many where that is given. Fewer than
    three clients have no silhouette and are one cluster.

    Returns:
        The cluster of each client, in the order given, and the silhouette; 0 where it did not choose.
    """
    distances = cosine_distances([[adapter[name].B for name in sorted(adapter)] for adapter in adapters.values()])
    if exactly is None:
        labels, score = best_partition(distances, most)
    else:
        labels, score = average_linkage(distances)[min(exactly, len(adapters)) - 1], 0.0
    return {client: str(label) for client, label in zip(adapters, labels, strict=True)}, score


def nearest_cluster(centres: Mapping[str, Mapping[str, Tensor]], adapter: Adapter) -> str:
    """The cluster whose centre, a B by layer, is nearest to this adapter's B; the first one among equals."""
    names = sorted(adapter)
    items = [[adapter[name].B for name in names], *([centre[name] for name in names] for centre in centres.values())]
    return list(centres)[int(cosine_distances(items)[0, 1:].argmin())]


def members(uploads: Uploads, test: Callable[[Uploaded], bool]) -> Uploads:
    """Those who pass the test and count, with weights renormalised over them; maybe nobody."""
    return uploads.where(lambda one: one.weight > 0 and test(one))


def mean_of_members(before: Adapter, joined: Uploads, pick: Callable[[Any], Adapter]) -> Adapter:
    """A cluster's factors after a round: the mean over its members; without any it stays as it is, to the bit."""
    if not len(joined):
        return before
    return before | average_factors(joined.each(pick), max(term.rank for term in before.values()))
