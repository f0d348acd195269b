"""FedIT: average the factors.

Federated instruction tuning (FedAvg over LoRA factors), arXiv 2305.05644; the averaging of its released code.
Up: B_i, A_i, r_i (m + n) scalars a layer. Down: the averaged factors, r_i (m + n).
Deviation: the paper has one rank for all. Unequal ranks are met by zero-padding to the largest and sending each
client its first r_i columns and rows; with equal ranks this is the paper's rule. Where scales differ, s_i B_i is
averaged in place of B_i and the receiver's scale divided out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import average_factors, cut_for, initial_pair, rank_of
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
    """The averaged factors, at the federation's largest rank."""

    lora: Adapter


@dataclass(frozen=True)
class FedIT(PairExchange, Algorithm):
    """FedAvg on both LoRA factors (arXiv 2305.05644)."""

    traits = Traits(
        title="FedIT",
        paper="arXiv 2305.05644",
        up="B, A: r_i (m + n)",
        down="mean B, mean A: r_i (m + n)",
        ranks="unequal",
        one_client=True,
        equal_clients=True,
        zero_weight=True,
        linear_upload=True,
        averages=True,
    )

    def start(self, federation: Federation, server: Server) -> State:
        return State(initial_pair(federation, server.key("init")))

    def send(self, state: State, card: Card) -> Adapter:
        return cut_for(state.lora, card)

    def local(self, client: Client, download: Adapter) -> Program:
        fitted = yield Fit(Model(lora=download))
        return Upload(fitted.model["lora"])

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        rank = rank_of(state.lora)
        return replace(state, lora=state.lora | average_factors(uploads, rank))  # Bbar = sum p_i B_i, Abar likewise
