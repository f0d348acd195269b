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
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.base import BYTES, Algorithm, Program
from coterie.algorithms.clustered import clustered_by_B, mean_of_members, members, nearest_cluster
from coterie.algorithms.factors import (
    average_factors,
    check_adapter,
    cut_for,
    initial_factors,
    initial_routers,
    pair_bytes,
    require_equal_layers,
    require_equal_ranks,
)
from coterie.errors import ConfigError, ModelError
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
    Routed,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)
from coterie.protocol.messages import Uploaded


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
    """What a client without a cluster is sent: a Once of the seed, the Key itself on arrival."""

    init_key: Any


@message
class Download:
    """All experts, the router (2M - 1, n) of each layer, and which expert is the client's own."""

    experts: list[Adapter]
    router: dict[str, Tensor]
    own: int


@message
class Trained:
    """The client's own expert and router."""

    expert: Adapter
    router: dict[str, Tensor]


@dataclass(frozen=True)
class FedLEASE(Algorithm):
    """Clustered experts with adaptive top-M routing (arXiv 2509.15087).

    max_experts: M_max. experts: M, whatever silhouettes say; they never choose a single cluster.
    """

    max_experts: int = 4
    experts: int | None = None

    traits = Traits(
        title="FedLEASE",
        paper="arXiv 2509.15087",
        up="B, A of the own expert and its router: r (m + n) + (2M - 1) n; once B, A",
        down="M experts, the cluster's router: M r (m + n) + (2M - 1) n",
        ranks="equal",
        weights="uniform",
        personal=True,
    )

    def __post_init__(self) -> None:
        if self.max_experts < 2 or (self.experts is not None and self.experts < 1):
            raise ConfigError(
                f"max_experts is at least 2 and experts at least 1, not {self.max_experts} and {self.experts}; "
                "for a single cluster set experts to 1"
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
        terms = fitted.model["experts"]
        expert = {name: term.expert(own) for name, term in terms.items()}
        return Upload(Trained(expert, {name: term.router for name, term in terms.items()}))

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        fresh = [one for one in uploads if not isinstance(one.payload, Trained) and one.card.id not in state.clusters]
        if not state.models:
            return self._clustered(state, fresh, server.key("router")) if fresh else state
        models, routers = dict(state.models), dict(state.routers)
        for cluster, expert in state.models.items():
            there = members(uploads, partial(_trained_for, state, cluster))
            models[cluster] = mean_of_members(expert, there, lambda sent: sent.expert)
            routers[cluster] = there.mean(lambda sent: sent.router) if len(there) else routers[cluster]
        joined = {one.card.id: nearest_cluster(state.firsts, one.payload) for one in fresh}
        return replace(state, models=models, routers=routers, clusters=state.clusters | joined)

    def _clustered(self, state: State, fresh: list[Uploaded], key: Key) -> State:
        """The clusters of the warm-up, the uniform mean of each one's factors, and routers at their start."""
        sent = {one.card.id: one.payload for one in fresh}
        clusters, score = clustered_by_B(sent, self.max_experts, self.experts)
        models = {
            cluster: average_factors(
                Uploads([replace(one, weight=1.0) for one in fresh if clusters[one.card.id] == cluster]),
                fresh[0].card.rank,
            )
            for cluster in dict.fromkeys(clusters.values())
        }
        firsts = {cluster: {name: term.B for name, term in expert.items()} for cluster, expert in models.items()}
        router = initial_routers(fresh[0].card.layers, 2 * len(models) - 1, key)
        return State(state.init_key, models, dict.fromkeys(models, router), firsts, clusters, score)

    def check(self, payload: Any, card: Card) -> None:
        check_adapter(payload.expert if isinstance(payload, Trained) else payload, card)
        if isinstance(payload, Trained):
            shapes = {name: tuple(router.shape) for name, router in payload.router.items()}
            outputs = {shape[0] for shape in shapes.values() if shape}
            if len(outputs) != 1 or shapes != {n: (*outputs, layer.d_in) for n, layer in card.layers.items()}:
                raise ModelError(f"client {card.id}: routers (2M - 1, n) of every layer expected, not {shapes}")

    def site_model(self, client: Client, download: WarmUp | Download) -> Model:
        if isinstance(download, WarmUp):
            return Model(lora=initial_factors(client.card, download.init_key))
        return Model(experts={name: _routed(download, name) for name in client.card.layers})

    def global_model(self, state: State) -> None:
        return None

    def head_group(self, state: State, card: Card) -> str:
        return state.clusters.get(card.id, "all")

    def measures(self, state: State, federation: Federation, seen: Mapping[str, Any]) -> dict[str, float]:
        return {"experts": float(len(state.models)), "silhouette": state.silhouette}

    def in_federation(self, federation: Federation) -> FedLEASE:
        """With the most experts that the clustering can find here."""
        count = len(federation.cards)
        most = min(self.max_experts, count - 1) if self.experts is None else min(self.experts, count)
        return replace(self, experts=max(1, most))

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank) + self._outputs * layer.d_in * BYTES

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return self._most * pair_bytes(layer, card.rank) + self._outputs * layer.d_in * BYTES

    def bytes_of_round(self, layer: Layer, card: Card, number: int, phase: Phase) -> tuple[int, int]:
        if phase.name == "warm-up":
            return pair_bytes(layer, card.rank), 0
        return super().bytes_of_round(layer, card, number, phase)

    @property
    def _most(self) -> int:
        return self.max_experts if self.experts is None else self.experts

    @property
    def _outputs(self) -> int:
        return 2 * self._most - 1


def _routed(download: Download, name: str) -> Routed:
    """One layer's experts: outputs 0..M-1 point to experts 0..M-1, the M - 1 others to the client's own."""
    terms = [expert[name] for expert in download.experts]
    M = len(terms)
    return Routed(
        B=tuple(term.B for term in terms),
        A=tuple(term.A for term in terms),
        router=download.router[name],
        scale=terms[0].scale,
        outputs=torch.tensor([*range(M), *[download.own] * (M - 1)]),
        top=M,
    )


def _trained_for(state: State, cluster: str, one: Uploaded) -> bool:
    """Whether an upload is of this cluster's expert, with a router of as many outputs as was sent."""
    if not isinstance(one.payload, Trained) or state.clusters.get(one.card.id) != cluster:
        return False
    return all(router.shape == state.routers[cluster][name].shape for name, router in one.payload.router.items())
