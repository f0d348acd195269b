"""HetLoRA: zero-pad, weight by norm, cut again; clients prune the directions that they do not need.

HetLoRA, arXiv 2401.06432. A client's loss has lam ||B[:, g r_k:]|| ||A[g r_k:, :]|| more, of its last columns and rows;
where that product of norms is smaller after training than before, the client goes on with floor(g r_k) directions.
The server averages each factor zero-padded to the largest rank, with weights p_k = S_k / sum S, S_k = ||B_k A_k||.
Up: B_k, A_k, r_k (m + n) scalars a layer at the rank after pruning. Down: the first r_k columns and rows of the means.
The formulas give r_k as long as a client has pruned nothing.
Deviations: no code of the authors is known. The weights p_k replace the experiment's, which still average the head. S_k
is of the whole model unless per_layer, and where all are 0 all count alike. All norms of the tail are summed over the
layers, which have one rank. A client's rank is the server's to know: it reads it off what the client uploads and sends
as much from then on, so that an upload that did not arrive has pruned nothing. No client prunes below r_min, the
smallest rank of any client unless given; of a rank below 100, floor(g r_k) takes one direction at a time (g = 0.99).
Where scales differ, s_k B_k counts in norms and means, and the receiver's scale is divided out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import average_factors, check_adapter, cut_for, initial_pair, rank_of
from coterie.algorithms.pairs import PairExchange
from coterie.maths.gram import squared_norm
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    Model,
    Seen,
    Server,
    TailNorm,
    Traits,
    Upload,
    Uploads,
    message,
    tail_norm,
)


@message
class State:
    """The averaged factors at the largest rank, r_min, and the ranks of the clients heard of."""

    lora: Adapter
    smallest: int
    ranks: dict[str, int]


@message
class Download:
    """The factors at this client's rank, and r_min."""

    lora: Adapter
    smallest: int


@dataclass(frozen=True)
class HetLoRA(PairExchange, Algorithm):
    """Zero-padding with sparsity weights and rank self-pruning (arXiv 2401.06432).

    lam: the weight of the tail's norms in the loss. gamma: g, the share of its rank that a client keeps when it prunes.
    r_min: below which no client prunes. per_layer: every layer has its own weights p_k.
    """

    lam: float = 5e-3
    gamma: float = 0.99
    r_min: int | None = None
    per_layer: bool = False

    traits = Traits(
        title="HetLoRA",
        paper="arXiv 2401.06432",
        up="B, A: r_k (m + n)",
        down="mean B, mean A: r_k (m + n)",
        ranks="unequal",
        weights="uniform",
        one_client=True,
        equal_clients=True,
        adaptive_size=True,
    )

    def __post_init__(self) -> None:
        if self.lam < 0 or not 0 < self.gamma < 1:
            raise ValueError(f"lam ({self.lam:g}) must not be negative, gamma ({self.gamma:g}) lie between 0 and 1")
        if self.r_min is not None and self.r_min < 1:
            raise ValueError(f"r_min must be 1 at least, not {self.r_min}")

    def start(self, federation: Federation, server: Server) -> State:
        lora = initial_pair(federation, server.key("init"))
        return State(lora, self.r_min or min(card.rank for card in federation.cards), {})

    def send(self, state: State, card: Card) -> Download:
        return Download(cut_for(state.lora, card, state.ranks.get(card.id, card.rank)), state.smallest)

    def local(self, client: Client, download: Download) -> Program:
        rank = rank_of(download.lora)
        kept = math.floor(self.gamma * rank + 1e-9)  # 0.7 x 90 is 62.999... in binary
        fitted = yield Fit(Model(lora=download.lora), penalties=[TailNorm(kept, self.lam)])
        trained: Adapter = fitted.model["lora"]
        shorter = max(kept, min(download.smallest, rank))
        if tail(trained, kept) < tail(download.lora, kept):  # rank self-pruning
            trained = {name: term.truncated(shorter) for name, term in trained.items()}
        return Upload(trained)

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        rank = rank_of(state.lora)
        made: Adapter = {}
        for part in (only(uploads, name) for name in state.lora) if self.per_layer else [uploads]:
            made |= average_factors(sparsity_weighted(part), rank)
        learnt = {card.id: rank_of(adapter) for card, adapter, _ in uploads.items()}
        return State(state.lora | made, state.smallest, state.ranks | learnt)

    def check(self, payload: Any, card: Card) -> None:
        check_adapter(payload, card)
        check_adapter(payload, card, rank=next(iter(payload.values())).rank)

    def site_model(self, client: Client, download: Download) -> Model:
        return Model(lora=download.lora)

    def measures(self, state: State, federation: Federation, seen: Mapping[str, Seen]) -> dict[str, float]:
        """The mean rank that is left to all clients."""
        ranks = [state.ranks.get(card.id, card.rank) for card in federation.cards]
        return {"average_rank": sum(ranks) / len(ranks)}


def tail(lora: Adapter, start: int) -> float:
    """The product of the tail's norms, summed over layers."""
    return math.fsum(float(tail_norm(term, start)) for term in lora.values())


def only(uploads: Uploads, layer: str) -> Uploads:
    """The same uploads with one layer alone, or with none where the client lacks it."""
    return uploads.each(lambda adapter: {layer: adapter[layer]} if layer in adapter else {})


def sparsity_weighted(uploads: Uploads) -> Uploads:
    """The same uploads weighted by S_k = ||s_k B_k A_k|| over all their layers; alike where all are 0."""
    norms = [
        math.fsum(float(term.scale) ** 2 * float(squared_norm(term.left, term.A)) for term in u.payload.values()) ** 0.5
        for u in uploads
    ]
    if not any(norms):
        return uploads.uniform()
    return Uploads([replace(u, weight=norm) for u, norm in zip(uploads, norms, strict=True)])
