"""FlexLoRA: average the products, hand each client its own truncation.

FlexLoRA, arXiv 2402.11505; the server of its released code, without forming the dense average.
Up: B_i, A_i, r_i (m + n) scalars a layer. Down: the first r_i singular directions, r_i (m + n).
D = sum p_i s_i B_i A_i; D = U S V^T; a client of rank r gets B = U_r S_r / s_i and A = V_r^T.
Deviations: QR of the stacked factors and an SVD of the small core replace the SVD of the dense D (the same matrix up
to signs); where D has a lower rank than a client, rows of A are completed orthonormally, as the dense SVD does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import best_rank, completed, cut_for, initial_pair, rank_of
from coterie.algorithms.pairs import PairExchange
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    Model,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)


@message
class State:
    """The truncated average product, at the federation's largest rank; after a round B carries the singular values."""

    lora: Adapter


@dataclass(frozen=True)
class FlexLoRA(PairExchange, Algorithm):
    """Average of products, redistributed by truncated SVD (arXiv 2402.11505)."""

    traits = Traits(
        title="FlexLoRA",
        paper="arXiv 2402.11505",
        up="B, A: r_i (m + n)",
        down="best rank-r_i factors: r_i (m + n)",
        ranks="unequal",
        best_rank=True,
        gauge_invariant=True,
        one_client=True,
        equal_clients=True,
        zero_weight=True,
    )

    def start(self, federation: Federation, server: Server) -> State:
        return State(initial_pair(federation, server.key("init")))

    def send(self, state: State, card: Card) -> Adapter:
        return cut_for(state.lora, card)  # B = U_r S_r / s_i, A = V_r^T

    def local(self, client: Client, download: Adapter) -> Program:
        fitted = yield Fit(Model(lora=download))
        return Upload(fitted.model["lora"])

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        rank = rank_of(state.lora)
        best = best_rank(uploads, rank, method="exact")
        return replace(state, lora=state.lora | completed(best, server.key("completion")))
