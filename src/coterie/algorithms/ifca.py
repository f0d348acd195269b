"""IFCA + LoRA: K adapters, of which each client trains the one that fits its data best.

IFCA, arXiv 2006.04088, Algorithm 1 with model averaging; with LoRA adapters as FedSEE compares it. A client evaluates
its training loss under each cluster's adapter and head, joins the cluster of the least (the first of equals) and
trains that adapter alone. A cluster's new adapter is the mean over those who joined; one that nobody joined stays.
Up: B_i, A_i of one adapter, r_i (m + n) scalars a layer, and the cluster's name, which is that of its head too. Down:
all K adapters, K r_i (m + n); with averaged heads, one for each cluster too.
Losses are over the first 512 training examples. Clients count equally, as in the released code.
Deviations: with B = 0 all K adapters are one function, so that everybody would join the first. All clusters therefore
begin with one pair, and in the first round clients are dealt out at random, equally many to each; a client that
misses it chooses by loss when it first takes part. So that all sites are evaluated with the cluster of least loss as
the clusters are in the end, a round without training follows, in which all choose once more; during the run a site
is evaluated with the cluster that it chose last, or that it was dealt. Unequal ranks are averaged with zero-padding,
as in FedIT. The number of clusters is not stated in FedSEE (there: that of the tasks, 6).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.clustered import mean_of_members, members
from coterie.algorithms.factors import check_adapter, cut_for, initial_pair, pair_bytes
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Evaluate,
    Federation,
    Fit,
    Layer,
    Model,
    Phase,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)


@message
class State:
    """Each cluster's averaged factors, at the federation's largest rank; the cluster dealt to each client at first."""

    models: dict[str, Adapter]
    dealt: dict[str, str]


@message
class Download:
    """Every cluster's factors, and the cluster that was dealt to this client."""

    models: dict[str, Adapter]
    dealt: str


@dataclass(frozen=True)
class IFCA(Algorithm):
    """Iterative federated clustering (arXiv 2006.04088) with LoRA adapters.

    clusters: K. examples: how many training examples a client's losses are over at most.
    """

    clusters: int = 2
    examples: int = 512

    traits = Traits(
        title="IFCA + LoRA",
        paper="arXiv 2006.04088",
        up="B, A of one cluster: r_i (m + n)",
        down="B, A of all clusters: K r_i (m + n)",
        ranks="unequal",
        weights="uniform",
        personal=True,
    )

    def __post_init__(self) -> None:
        if min(self.clusters, self.examples) < 1:
            raise ValueError(f"clusters ({self.clusters}) and examples ({self.examples}) must be at least 1")

    @property
    def names(self) -> tuple[str, ...]:
        """The clusters' names."""
        return tuple(map(str, range(self.clusters)))

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase("main", rounds), Phase("choice", 1, clients="all", trains=False, uploads=False)]

    def start(self, federation: Federation, server: Server) -> State:
        fresh = initial_pair(federation, server.key("init"))
        order = server.key("deal").permutation(len(federation.cards)) % self.clusters
        dealt = {card.id: self.names[place] for card, place in zip(federation.cards, order, strict=True)}
        return State(dict.fromkeys(self.names, fresh), dealt)

    def send(self, state: State, card: Card) -> Download:
        models = {name: cut_for(lora, card) for name, lora in state.models.items()}
        return Download(models, state.dealt[card.id])

    def local(self, client: Client, download: Download) -> Program:
        chosen = download.dealt if client.round == 1 else (yield from self.choice(download))
        if client.phase == "choice":
            return Upload(None, head_group=chosen)
        fitted = yield Fit(Model(lora=download.models[chosen]), head=chosen)
        return Upload(fitted.model["lora"], head_group=chosen)

    def choice(self, download: Download) -> Program:
        """=> the cluster with the least loss on the client's training examples."""
        asked = [Evaluate(Model(lora=download.models[name]), "train", self.examples, group=name) for name in self.names]
        return nearest([score.loss for score in (yield asked)], self.names)

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        made = dict(state.models)
        for name, before in state.models.items():
            made[name] = mean_of_members(before, joined(uploads, name))
        return replace(state, models=made)

    def check(self, payload: Any, card: Card) -> None:
        if payload is not None:  # a choice alone
            check_adapter(payload, card)

    def site_model(self, client: Client, download: Download) -> Model:
        return Model(lora=download.models[client.head_group or download.dealt])

    def global_model(self, state: State) -> None:
        return None  # no one adapter is for all

    def head_group(self, state: State, card: Card) -> str:
        return state.dealt[card.id]

    def head_choices(self, state: State, card: Card) -> tuple[str, ...]:
        return self.names

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank)

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return self.clusters * pair_bytes(layer, card.rank)


def nearest(losses: list[float], names: tuple[str, ...]) -> str:
    """The name of the least loss, of equal ones the first."""
    return names[losses.index(min(losses))]


def joined(uploads: Uploads, cluster: str) -> Uploads:
    """Those who joined this cluster."""
    return members(uploads, lambda one: one.head_group == cluster)
