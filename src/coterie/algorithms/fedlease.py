"""FedLEASE: cluster clients by their B, give each cluster an expert, let every token choose among the experts.

FedLEASE, arXiv 2509.15087, and its released code. A warm-up round, in which all clients train an adapter alone from one
start, shows who is alike; then each client trains its cluster's expert and a router for each layer, uses the other
experts as they are, and both are averaged within the cluster.
Distance of clients: the mean over layers of 1 - cos of B; average linkage, M in 2..M_max by the largest silhouette.
Router: 2M - 1 outputs, output j < M to expert j, the rest to the own one; of their softmax the top M, renormalised: a
token uses between one (the own) and M experts.
Up: in the warm-up B_i, A_i, r (m + n) scalars a layer; then those of the own expert and the router,
r (m + n) + (2M - 1) n. Down: once, the seed of A; then all experts and the cluster's router, M r (m + n) + (2M - 1) n.
Deviations: as the paper says, experts start from the means of their clusters, and the warm-up is one round of the
experiment's length, where the code goes on from each client's own factors and takes five; outputs stand as in the code
(the paper puts the own ones first). The code's head is random and never trained; here it is as the experiment says,
averaged within each cluster where it is averaged. A client that missed the warm-up does it in its first round and
joins the cluster whose first B is nearest to its own. Of fewer than three clients no silhouette is defined: they are
one cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.clustered import ExpertCount, centres, cluster_means, mean_of_members, nearest_cluster
from coterie.algorithms.factors import cut_for, initial_factors, pair_bytes, require_equal_layers, require_equal_ranks
from coterie.algorithms.routing import Download, Trained, check_expert, first_routers, router_bytes, trained_by
from coterie.maths.keys import Key
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    Layer,
    Model,
    Once,
    Phase,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)


@message
class State:
    """Experts (`models`, none before the warm-up) and routers by cluster, and the cluster of each client.

    firsts: each cluster's mean B of the warm-up, for those who join later. silhouette: of the clusters; 0 for one.
    """

    init_key: Key
    models: dict[str, Adapter]
    routers: dict[str, dict[str, Tensor]]
    firsts: dict[str, dict[str, Tensor]]
    clusters: dict[str, str]
    silhouette: float


@message
class WarmUp:
    """What a client without a cluster is sent: the seed of A, a Once when sent, the Key itself on arrival."""

    init_key: Any


@dataclass(frozen=True)
class FedLEASE(ExpertCount, Algorithm):
    """Clustered experts with adaptive top-M routing (arXiv 2509.15087)."""

    traits = Traits(
        title="FedLEASE",
        paper="arXiv 2509.15087",
        up="B, A of the own expert and its router: r (m + n) + (2M - 1) n; once B, A",
        down="M experts, the cluster's router: M r (m + n) + (2M - 1) n",
        ranks="equal",
        weights="uniform",
        personal=True,
    )

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase("warm-up", 1, clients="all"), Phase("main", rounds)]

    def start(self, federation: Federation, server: Server) -> State:
        require_equal_ranks(federation, "FedLEASE")
        require_equal_layers(federation, "FedLEASE")
        return State(server.key("init"), {}, {}, {}, {}, 0.0)

    def send(self, state: State, card: Card) -> WarmUp | Download:
        cluster = state.clusters.get(card.id)
        if cluster is None:
            return WarmUp(Once(state.init_key))
        experts = [cut_for(expert, card) for expert in state.models.values()]
        router = {name: state.routers[cluster][name] for name in card.layers}
        return Download(experts, router, list(state.models).index(cluster))

    def local(self, client: Client, download: WarmUp | Download) -> Program:
        model = self.site_model(client, download)
        if isinstance(download, WarmUp):
            fitted = yield Fit(model)
            return Upload(fitted.model["lora"])
        own = download.own
        fitted = yield Fit(model, train=(f"experts.*.B.{own}", f"experts.*.A.{own}", "experts.*.router"))
        return Upload(Trained.of(fitted.model["experts"], own))

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        fresh = [one for one in uploads if not isinstance(one.payload, Trained) and one.card.id not in state.clusters]
        sent: dict[str, Adapter] = {one.card.id: one.payload for one in fresh}
        if fresh and not state.models:  # after the warm-up: M clusters, their means, and routers at their start
            clusters, score = self.clustered_by_B(sent)
            models = cluster_means(fresh, clusters)
            router = first_routers(fresh[0].card.layers, len(models), server.key("router"))
            return State(state.init_key, models, dict.fromkeys(models, router), centres(models), clusters, score)
        models, routers = dict(state.models), dict(state.routers)
        for cluster, expert in state.models.items():
            mine = {client for client, joined in state.clusters.items() if joined == cluster}
            there = trained_by(mine, uploads, routers[cluster])
            models[cluster] = mean_of_members(expert, there, lambda sent: sent.expert)
            routers[cluster] = there.mean(lambda sent: sent.router) if len(there) else routers[cluster]
        joined = {name: nearest_cluster(state.firsts, adapter) for name, adapter in sent.items()}
        return replace(state, models=models, routers=routers, clusters=state.clusters | joined)

    def check(self, payload: Any, card: Card) -> None:
        check_expert(payload, card)

    def site_model(self, client: Client, download: WarmUp | Download) -> Model:
        if isinstance(download, WarmUp):
            return Model(lora=initial_factors(client.card, download.init_key))
        return Model(experts=download.terms())

    def global_model(self, state: State) -> None:
        return None

    def head_group(self, state: State, card: Card) -> str:
        return state.clusters.get(card.id, "all")

    def measures(self, state: State, federation: Federation, seen: Mapping[str, Any]) -> dict[str, float]:
        return {"experts": float(len(state.models)), "silhouette": state.silhouette}

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank) + router_bytes(layer, self.most)

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return self.most * pair_bytes(layer, card.rank) + router_bytes(layer, self.most)

    def bytes_of_round(self, layer: Layer, card: Card, number: int, phase: Phase) -> tuple[int, int]:
        if phase.name == "warm-up":
            return pair_bytes(layer, card.rank), 0
        return super().bytes_of_round(layer, card, number, phase)
