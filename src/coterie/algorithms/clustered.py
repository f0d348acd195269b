"""What methods with clusters of clients share: who is alike, and what a cluster becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from coterie.algorithms.factors import average_factors, factor_of_pair
from coterie.errors import ConfigError
from coterie.maths.clusters import average_linkage, best_partition, cosine_distances
from coterie.protocol import Adapter, Federation, Uploads
from coterie.protocol.messages import Uploaded


@dataclass(frozen=True)
class ExpertCount:
    """How many experts, one for each cluster, a method makes.

    max_experts: M_max. experts: M, whatever silhouettes say; they never choose a single cluster.
    """

    max_experts: int = 4
    experts: int | None = None

    def __post_init__(self) -> None:
        if self.max_experts < 2 or (self.experts is not None and self.experts < 1):
            raise ConfigError(
                f"max_experts is at least 2 and experts at least 1, not {self.max_experts} and {self.experts}; "
                "for a single cluster set experts to 1"
            )

    @property
    def most(self) -> int:
        """The largest M that is possible."""
        return self.max_experts if self.experts is None else self.experts

    def in_federation(self, federation: Federation) -> Self:
        """With the most experts that the clustering can find here."""
        count = len(federation.cards)
        most = min(self.max_experts, count - 1) if self.experts is None else min(self.experts, count)
        return replace(self, experts=max(1, most))

    def clustered_by_B(self, adapters: Mapping[str, Adapter]) -> tuple[dict[str, str], float]:
        """Clusters "0", "1", ... of clients by the mean over layers of 1 - cos of their B, with average linkage.

        As many as have the largest silhouette, from 2 to `max_experts`, or `experts` where that is given. Fewer than
        three clients have no silhouette and are one cluster.

        Returns:
            The cluster of each client, in the order given, and the silhouette; 0 where it did not choose.
        """
        distances = cosine_distances([[adapter[name].B for name in sorted(adapter)] for adapter in adapters.values()])
        if self.experts is None:
            labels, score = best_partition(distances, self.max_experts)
        else:
            labels, score = average_linkage(distances)[min(self.experts, len(adapters)) - 1], 0.0
        return {client: str(label) for client, label in zip(adapters, labels, strict=True)}, score


def cluster_means(sent: Sequence[Uploaded], clusters: Mapping[str, str]) -> dict[str, Adapter]:
    """Each cluster's factors: the mean over the clients in it, who count equally whatever their weights."""
    rank = max(one.card.rank for one in sent)
    return {
        cluster: average_factors(
            Uploads([replace(one, weight=1.0) for one in sent if clusters[one.card.id] == cluster]), rank
        )
        for cluster in dict.fromkeys(clusters.values())
    }


def centres(models: Mapping[str, Adapter]) -> dict[str, dict[str, Tensor]]:
    """Each cluster's B by layer, by which a later client is told where it belongs."""
    return {cluster: factor_of_pair(lora, "B") for cluster, lora in models.items()}


def nearest_cluster(centres: Mapping[str, Mapping[str, Tensor]], adapter: Adapter) -> str:
    """The cluster whose centre, a B by layer, is nearest to this adapter's B; the first one among equals."""
    names = sorted(adapter)
    items = [[adapter[name].B for name in names], *([centre[name] for name in names] for centre in centres.values())]
    return list(centres)[int(cosine_distances(items)[0, 1:].argmin())]


def members(uploads: Uploads, test: Callable[[Uploaded], bool]) -> Uploads:
    """Those who pass the test and count, with weights renormalised over them; maybe nobody."""
    return uploads.where(lambda one: one.weight > 0 and test(one))


def mean_of_members(
    before: Adapter, joined: Uploads, pick: Callable[[Any], Adapter] = lambda payload: payload
) -> Adapter:
    """A cluster's factors after a round: the mean over its members; without any it stays as it is, to the bit."""
    if not len(joined):
        return before
    return before | average_factors(joined.each(pick), max(term.rank for term in before.values()))
