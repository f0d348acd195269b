"""Fed-PLoRA: a pair of rank R is R modules of rank one; a client trains some and keeps the others folded away.

Fed-PLoRA (parallel one-rank adaptation, select-N-fold), arXiv 2602.16936. W + s sum_j B_j A_j; each round client i
trains r_i of the R modules, drawn at random, and the others are part of its frozen weights until the round ends: so
everybody starts at the global model, and no initialisation adds noise.
Up: the trained modules, r_i (m + n) scalars a layer. Down: all modules, R (m + n), and which of them to train.
Each module moves to the mean of B_j and that of A_j over those who trained it; one that nobody trained stays.
Deviations: the authors' code could not be read, so this follows descriptions of the method. The server draws the
selection (the paper's clients do), so that no index travels up; one selection serves all layers. The modules that a
client does not train act as a second, frozen pair beside the base and are not added into its weights: the same
function, without the rounding of a base in half precision. Weights are uniform unless the experiment sets others. Where
scales differ, B is written in the client's scale and back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.directions import GlobalPair, State, moved_pair
from coterie.algorithms.factors import cut_for, pair_bytes, rank_of
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    Layer,
    Model,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)


@message
class Download:
    """All modules, and the numbers of those to train, ascending."""

    lora: Adapter
    chosen: list[int]


@dataclass(frozen=True)
class FedPLoRA(GlobalPair, Algorithm):
    """Parallel modules of rank one, of which clients train as many as they can (arXiv 2602.16936). rank: R."""

    traits = Traits(
        title="Fed-PLoRA",
        paper="arXiv 2602.16936",
        up="chosen modules: r_i (m + n)",
        down="all modules: R (m + n)",
        ranks="unequal",
        weights="uniform",
        one_client=True,
        zero_weight=True,
    )

    def in_federation(self, federation: Federation) -> Self:
        return replace(self, rank=self.rank or federation.rank)

    def start(self, federation: Federation, server: Server) -> State:
        return self.begun(federation, server, "modules")

    def send(self, state: State, card: Card) -> Download:
        rank = rank_of(state.lora)
        return Download(cut_for(state.lora, card, rank), state.selected(card))

    def local(self, client: Client, download: Download) -> Program:
        chosen, folded = apart(download.lora, download.chosen)  # select N, fold
        fitted = yield Fit(Model(lora=chosen, shared=folded) if folded else Model(lora=chosen))
        return Upload(fitted.model["lora"])

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        made: Adapter = {}
        chosen = {u.card.id: state.selected(u.card) for u in uploads}
        for name, term in state.lora.items():
            held = [(u.weight, chosen[u.card.id], u.payload[name]) for u in uploads if name in u.payload]
            made[name] = moved_pair(term, held, among_trainers=True)  # module j: over Q_j, who trained it
        return State(made, state.key, server.round)

    def site_model(self, client: Client, download: Download) -> Model:
        return Model(lora=download.lora)

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, self.rank or card.rank)


def apart(lora: Adapter, chosen: list[int]) -> tuple[Adapter, Adapter]:
    """The chosen modules, and the others; nothing where all are chosen."""
    rank = rank_of(lora)
    rest = [j for j in range(rank) if j not in chosen]
    folded = {name: term.directions(rest) for name, term in lora.items()} if rest else {}
    return {name: term.directions(chosen) for name, term in lora.items()}, folded
