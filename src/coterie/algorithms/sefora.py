"""SeFoRA: upload linear sketches of the products, so that the server averages products without seeing any.

SeFoRA, arXiv 2608.10144, implements Algorithm 2 with Algorithms 1, 3 and 4; SeFoRA-Ho (`sefora_ho`) is Algorithm 5.
Up: Y_i = B_i (A_i Omega) and Z_i = (Psi B_i) A_i, m r + k n scalars a layer whatever r_i. Down: B and A of rank r,
r (m + n); once, the seed of all rounds' Omega (n, r) and Psi (k, m).
The unscaled product is sketched, so one common scale is required; the paper's, 0.1, is the experiment's
(lora.scale=0.1) (F1). Ranks: r is the largest rank of any client and stays (F7), k is r + 2 unless given; layers have
one rank for all unless per_layer (F6), found anew after every T_u rounds, round t = 0 apart (F5).
Deviations: the seed is sent once and each round's matrices are drawn from it and the round's number, where the paper
sends a seed a round; each layer shape has a stream of its own (F8). A ~ N(0, 1/r^2) at the start (F2). Truncation
takes the SVD of A where B is orthonormal, else that of the product (F3), and leaves a direction without energy its
row of A, so that it can learn. Least squares with dependent columns get a ridge of 1e-10 (F9); a mean of zero products
is deployed as B = 0 with the rows of A that there were. Only who took part is averaged (F13); the head is the
experiment's, averaged with the same weights; optimisers start afresh every round (F10). A client's rank is its own
business, kept at the site: no message tells it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import gaussian_adapter, layers_of, pair_bytes, require_common_scale
from coterie.algorithms.rank_update import RankUpdate, average_rank, ranks_of, truncated
from coterie.algorithms.sketch_measures import sketch_losses, trained_by
from coterie.algorithms.sketches import Sketches, SketchSizes, check_sketches, mean_sketches, sketch_bytes, sketched
from coterie.maths.keys import Key
from coterie.maths.sketch import SketchMatrices, unsketch
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    Layer,
    LowRank,
    Model,
    Once,
    Seen,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)


@message
class State:
    """The global pair (after a round B is orthonormal), the seed of the sketches, r, and the last round's number."""

    lora: Adapter
    key: Key
    rank: int
    round: int


@message
class Download:
    """The global pair, r, and the seed of the sketches: a Once when sent, the Key itself on arrival."""

    lora: Adapter
    key: Any
    rank: int


@dataclass(frozen=True)
class SeFoRA(SketchSizes, RankUpdate, Algorithm):
    """Sketch-aggregated federated LoRA for unequal ranks that are found anew from time to time."""

    traits = Traits(
        title="SeFoRA",
        paper="arXiv 2608.10144",
        up="sketches: m r + k n",
        down="B, A: r (m + n)",
        ranks="unequal",
        common_scale=True,
        gauge_invariant=True,
        one_client=True,
        equal_clients=True,
        zero_weight=True,
        linear_upload=True,
        keeps_memory=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None:
            self.rows(self.rank)

    def in_federation(self, federation: Federation) -> Self:
        return replace(self, rank=federation.rank) if self.rank is None else self

    def start(self, federation: Federation, server: Server) -> State:
        require_common_scale(federation, self.traits.title)
        r = self.in_federation(federation).rank or federation.rank  # r = max r_i
        lora = gaussian_adapter(federation.layers, r, federation.cards[0].scale, server.key("init"))
        return State(lora, server.key("sketch"), r, 0)

    def send(self, state: State, card: Card) -> Download:
        return Download({name: state.lora[name] for name in card.layers}, Once(state.key), state.rank)  # lines 3-4

    def local(self, client: Client, download: Download) -> Program:
        start = truncated(download.lora, self.starting_ranks(client))  # lines 9-17
        fitted = yield Fit(Model(lora=start))  # line 19
        kept = self.kept(fitted.model["lora"], client.round)  # lines 20-24
        client.memory["ranks"] = ranks_of(kept)
        return Upload(self.sketched(client, download, kept))  # lines 25-27

    def sketched(self, client: Client, download: Download, trained: Adapter) -> Sketches:
        """Lines 7 and 25: this round's matrices, and the product of every layer in them."""
        key = download.key.fold(client.round)
        return sketched(trained, client.card, key, lambda layer: self.sizes(layer, download.rank))

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        key, layers = state.key.fold(server.round), layers_of(state.lora)
        means = mean_sketches(uploads, layers, key, lambda layer: self.sizes(layer, state.rank))  # line 30
        made = {name: self.rebuilt(state.lora[name], *mean) for name, mean in means.items()}  # line 31
        return replace(state, lora=state.lora | made, round=server.round)

    def rebuilt(self, before: LowRank, Y: Tensor, Z: Tensor, matrices: SketchMatrices) -> LowRank:
        """Unsketching (Algorithm 1), in the dtype and scale of the pair before."""
        if not Y.any():
            return replace(before, B=torch.zeros_like(before.B))
        B, A = self.unsketched(Y, Z, matrices, before.rank)
        return replace(before, B=B.to(before.B.dtype), A=A.to(before.A.dtype))

    def unsketched(self, Y: Tensor, Z: Tensor, matrices: SketchMatrices, rank: int) -> tuple[Tensor, Tensor]:
        """B (m, rank) with orthonormal columns and A (rank, n)."""
        return unsketch(Y, Z, matrices.Psi)

    def check(self, payload: Any, card: Card) -> None:
        check_sketches(payload, card)

    def site_model(self, client: Client, download: Download) -> Model:
        return Model(lora=download.lora)

    def global_model(self, state: State) -> Model:
        return Model(lora=state.lora)

    def measures(self, state: State, federation: Federation, seen: Mapping[str, Seen]) -> dict[str, float]:
        """What the sketches lost (see `sketch_losses`), and the average rank of those who answered (Figure 2)."""
        kept = {name: (weight, self.kept(one, state.round)) for name, (weight, one) in trained_by(seen).items()}
        layers = federation.layers
        lost = sketch_losses(kept, state.lora, state.rank, lambda name: self.sizes(layers[name], state.rank))
        ranks = {name: ranks_of(adapter) for name, (_, adapter) in kept.items()}
        return lost | ({"average_rank": average_rank(ranks)} if ranks else {})

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return sketch_bytes(layer, lambda one: self.sizes(one, self.rank or card.rank))

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, min(self.rank or card.rank, layer.d_out, layer.d_in))
