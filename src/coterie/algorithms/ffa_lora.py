"""FFA-LoRA: freeze A, train and average B.

FFA-LoRA, arXiv 2403.12313. A is drawn once and is the same for all, so the mean of the products B_i A is the product
of the means: aggregation loses nothing.
Up: B_i, r m scalars a layer. Down: the mean of B, r m; once, the seed of A.
Deviations: none. Only B moves, so one scale and one rank are required of all clients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import (
    check_factor,
    factor_bytes,
    factor_of_pair,
    initial_factors,
    initial_pair,
    require_common_scale,
    require_equal_ranks,
    with_factor,
)
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
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)


@message
class State:
    """The averaged B with the common A, and the seed of A."""

    lora: Adapter
    init_key: Key


@message
class Download:
    """B by layer, and the seed of A: a Once when sent, the Key itself on arrival."""

    B: dict[str, Tensor]
    init_key: Any


@dataclass(frozen=True)
class FFALoRA(Algorithm):
    """Federated freeze-A LoRA (arXiv 2403.12313)."""

    traits = Traits(
        title="FFA-LoRA",
        paper="arXiv 2403.12313",
        up="B: r m",
        down="mean B: r m",
        ranks="equal",
        weights="uniform",
        common_scale=True,
        exact=True,
        best_rank=True,
        one_client=True,
        equal_clients=True,
        zero_weight=True,
        linear_upload=True,
        averages=True,
    )

    def start(self, federation: Federation, server: Server) -> State:
        require_equal_ranks(federation, "FFA-LoRA")
        require_common_scale(federation, "FFA-LoRA")
        key = server.key("init")
        return State(initial_pair(federation, key), key)

    def send(self, state: State, card: Card) -> Download:
        return Download(factor_of_pair(state.lora, "B", card.layers), Once(state.init_key))

    def local(self, client: Client, download: Download) -> Program:
        fitted = yield Fit(Model(lora=with_common_A(client.card, download)), train=("lora.*.B",))
        return Upload(factor_of_pair(fitted.model["lora"], "B"))

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        return replace(state, lora=with_factor(state.lora, "B", uploads.mean()))  # Bbar = sum p_i B_i

    def check(self, payload: Any, card: Card) -> None:
        check_factor(payload, card, "B")

    def site_model(self, client: Client, download: Download) -> Model:
        return Model(lora=with_common_A(client.card, download))

    def global_model(self, state: State) -> Model:
        return Model(lora=state.lora)

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return factor_bytes(layer, card.rank, "B")

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return factor_bytes(layer, card.rank, "B")


def with_common_A(card: Card, download: Download) -> Adapter:
    """The downloaded B beside the A that everybody draws from the same seed."""
    return with_factor(initial_factors(card, download.init_key), "B", download.B)
