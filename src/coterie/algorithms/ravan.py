"""Ravan: several small cores between frozen bases that all share; a client trains as many of them as it can.

Ravan, arXiv 2506.05568. W + sum_j s_j U_j H_j V_j over h heads; U_j (m, r) and V_j (r, n) come from a seed and stay;
H_j starts at 0, s_j at 1 in every round. A client chooses h_i heads by their weight norm, trains their H_j and s_j and
sends s_j H_j; the other heads take part in its forward pass, frozen.
Up: the chosen cores, h_i r^2 scalars a layer, and which they are. Down: all cores, h r^2; once, the seed of the bases.
Each head moves to the mean of s_j H_j over those who trained it, and stays where nobody did. Bases being common, that
is the mean of the products.
Deviations: no code of the authors is known. A client's rank, its budget, buys one head for each `rank_per_head` of it,
and a head is as wide as that much of a low-rank pair would cost, r^2 <= rank_per_head (m + n), which meets FedPA-LoRA's
comparison (ranks 2, 4, 16 have 1, 2, 8 heads of width 64 where m = n = 1024); nor may all heads together be wider than
the layer, in which they could not be orthogonal. One choice of heads serves all layers; equal norms, as of all heads at
the start, are decided at random. The p_i are renormalised over those who trained a head. The scale of the experiment
is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.algorithms.base import BYTES, Algorithm, Program
from coterie.algorithms.cores import Heads, HeadSizes, between_bases, check_heads, require_orthogonal, squared_norms
from coterie.algorithms.directions import moved_rows
from coterie.maths.keys import Key
from coterie.protocol import (
    Card,
    Client,
    Core,
    Federation,
    Fit,
    Gradient,
    Layer,
    Model,
    Once,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)


@message
class State:
    """H (h, r, r) of every layer, the layers, and the seed of the bases."""

    cores: dict[str, Tensor]
    layers: dict[str, Layer]
    key: Key


@message
class Download:
    """H of every layer, and the seed of the bases: a Once when sent, the Key itself on arrival."""

    cores: dict[str, Tensor]
    key: Any


@dataclass(frozen=True)
class Ravan(HeadSizes, Algorithm):
    """Multi-head cores on frozen bases (arXiv 2506.05568).

    choose: the heads of the largest norm, or of the largest gradient on the coming mini-batch, or any.
    """

    choose: Literal["norm", "gradient", "random"] = "norm"

    traits = Traits(
        title="Ravan",
        paper="arXiv 2506.05568",
        up="chosen cores: h_i r^2",
        down="all cores: h r^2",
        ranks="unequal",
        gauge_invariant=True,
        one_client=True,
        zero_weight=True,
    )

    def start(self, federation: Federation, server: Server) -> State:
        sizes = self.sizes(federation.layers)
        if self.bases == "orthonormal":
            require_orthogonal(sizes, federation.layers, "Ravan")
        cores = {name: torch.zeros(size) for name, size in sizes.items()}
        return State(cores, federation.layers, server.key("bases"))

    def send(self, state: State, card: Card) -> Download:
        return Download({name: state.cores[name] for name in card.layers}, Once(state.key))

    def local(self, client: Client, download: Download) -> Program:
        whole = between_bases(download.cores, client.card.layers, download.key, self.bases, gain=True)
        chosen = yield from self.chosen(client, whole)
        rest = [j for j in range(self.heads) if j not in chosen]
        own = {name: term.chosen(chosen) for name, term in whole.items()}
        frozen = {name: term.chosen(rest) for name, term in whole.items()}
        fitted = yield Fit(Model(core=own, shared=frozen) if rest else Model(core=own), train=("core.*",))
        return Upload(Heads(chosen, {name: term.folded() for name, term in fitted.model["core"].items()}))

    def chosen(self, client: Client, whole: Mapping[str, Core]) -> Program:
        """=> the heads to train, ascending: those of the highest score over all layers, ties at random."""
        number, scores = self.number(client.card), torch.zeros(self.heads, dtype=torch.float64)
        if number == self.heads:
            return list(range(self.heads))
        if self.choose == "norm":
            scores = squared_norms([term.core for term in whole.values()])
        elif self.choose == "gradient":
            grads = yield Gradient(Model(core=whole), "train", wrt=("core.*.core",), batch="first")
            scores = squared_norms([grads[f"core.{name}.core"] for name in whole])
        order = client.key("heads").permutation(self.heads).tolist()
        return sorted(sorted(order, key=lambda j: -float(scores[j]))[:number])

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        made = {}
        for name, H in state.cores.items():
            held = [(u.weight, u.payload.chosen, u.payload.cores[name]) for u in uploads if name in u.payload.cores]
            made[name] = moved_rows(H, held, among_trainers=True)  # H_j: the mean of s_j H_j over who trained j
        return State(made, state.layers, state.key)

    def check(self, payload: Any, card: Card) -> None:
        check_heads(payload, card, self.number(card), self.sizes(card.layers))

    def site_model(self, client: Client, download: Download) -> Model:
        return Model(core=between_bases(download.cores, client.card.layers, download.key, self.bases))

    def global_model(self, state: State) -> Model:
        return Model(core=between_bases(state.cores, state.layers, state.key, self.bases))

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return self.number(card) * self.width(layer) ** 2 * BYTES

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return self.heads * self.width(layer) ** 2 * BYTES
