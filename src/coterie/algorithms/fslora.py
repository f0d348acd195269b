"""FSLoRA: every client trains a random selection of the global pair's directions, scaled up by what is left out.

Federated sketching LoRA, arXiv 2501.19389. S_i = (r / k_i) sum over j in I_i of e_j e_j^T with I_i drawn anew for each
client and round; a client trains W + s B S_i A, for which it needs no more than the k_i columns of B and rows of A in
I_i, at scale s r / k_i. E[S_i] = I. k_i is the client's rank, r the global one.
Up: the trained columns and rows, k_i (m + n) scalars a layer. Down: the same ones, k_i (m + n).
The changes, zero outside I_i, are averaged over all who took part; they are not divided by how many trained a column,
which the factor r / k_i in the gradient makes up for in expectation.
Deviations: the server draws I_i from a seed and a client needs not know it, so that no index travels. One set serves
both factors (the released code draws two) and all layers, and stays for a round. Where scales differ, B_i is written
in the client's scale and back. Weights are uniform as in the paper unless the experiment sets others; the server adds
the mean change as it is, without the Adam of the released code. A site is evaluated with the sketch it would train.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.directions import GlobalPair, State, moved_pair
from coterie.algorithms.factors import holders
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    Layer,
    LowRank,
    Model,
    Server,
    Traits,
    Upload,
    Uploads,
)


@dataclass(frozen=True)
class FSLoRA(GlobalPair, Algorithm):
    """Federated LoRA by sketches of the global pair (arXiv 2501.19389). rank: r of the global pair."""

    traits = Traits(
        title="FSLoRA",
        paper="arXiv 2501.19389",
        up="columns of B, rows of A: k_i (m + n)",
        down="columns of B, rows of A: k_i (m + n)",
        ranks="unequal",
        weights="uniform",
        zero_weight=True,
    )

    def start(self, federation: Federation, server: Server) -> State:
        return self.begun(federation, server, "sketch")

    def send(self, state: State, card: Card) -> Adapter:
        return {name: sketched(state.lora[name], state.selected(card), card.scale) for name in card.layers}

    def local(self, client: Client, download: Adapter) -> Program:
        fitted = yield Fit(Model(lora=download))  # W + s B S_i A: the gradient carries r / k_i by itself
        return Upload({name: replace(term, scale=client.card.scale) for name, term in fitted.model["lora"].items()})

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        made: Adapter = {}
        chosen = {u.card.id: state.selected(u.card) for u in uploads}
        for name, term in state.lora.items():
            held = [(u.weight, chosen[u.card.id], u.payload[name]) for u in holders(uploads, name)]
            made[name] = moved_pair(term, held, among_trainers=False)  # B + sum p_i dB_i, A + sum p_i dA_i
        return State(made, state.key, server.round)

    def site_model(self, client: Client, download: Adapter) -> Model:
        return Model(lora=download)

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return self.bytes_up(layer, card)


def sketched(term: LowRank, chosen: list[int], scale: float) -> LowRank:
    """s B S A as a pair of rank k: the chosen columns and rows in the client's scale s, at scale s r / k."""
    own = term.rescaled(scale).directions(chosen)
    return replace(own, scale=scale * term.rank / own.rank)
