"""FedSA-LoRA: share A, keep B.

FedSA-LoRA, arXiv 2410.01463. A learns what is general, B what is the client's own: both are trained, only A travels.
Up: A_i, r n scalars a layer. Down: the mean of A, r n. B and a trained head never leave the client.
Clients are weighted by the examples that they processed, so equally after equal steps, as the released code does. A
client that was never sampled has B = 0 and uses the backbone as it is. One rank is required of all; scales may
differ, since each client's B has its own. The rank-stabilised scale is the experiment's choice (lora.scaling).
Deviations: none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import (
    check_factor,
    factor_bytes,
    factor_of_pair,
    factor_shape,
    initial_pair,
    require_equal_ranks,
    with_factor,
)
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
    message,
)


@message
class State:
    """The averaged A, beside the B = 0 with which every client begins."""

    lora: Adapter


@dataclass(frozen=True)
class FedSALoRA(Algorithm):
    """Selective aggregation: A for all, B each client's own (arXiv 2410.01463)."""

    traits = Traits(
        title="FedSA-LoRA",
        paper="arXiv 2410.01463",
        up="A: r n",
        down="mean A: r n",
        ranks="equal",
        weights="processed",
        head="local",
        averages=True,
        personal=True,
        keeps_memory=True,
    )

    def start(self, federation: Federation, server: Server) -> State:
        require_equal_ranks(federation, "FedSA-LoRA")
        return State(initial_pair(federation, server.key("init")))

    def send(self, state: State, card: Card) -> dict[str, Tensor]:
        return factor_of_pair(state.lora, "A", card.layers)

    def local(self, client: Client, download: dict[str, Tensor]) -> Program:
        fitted = yield Fit(Model(lora=with_own_B(client, download)))
        client.memory["B"] = factor_of_pair(fitted.model["lora"], "B")  # stays here
        return Upload(factor_of_pair(fitted.model["lora"], "A"))

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        return replace(state, lora=with_factor(state.lora, "A", uploads.mean()))  # Abar = sum p_i A_i

    def check(self, payload: Any, card: Card) -> None:
        check_factor(payload, card, "A")

    def site_model(self, client: Client, download: dict[str, Tensor]) -> Model:
        return Model(lora=with_own_B(client, download))

    def global_model(self, state: State) -> None:
        return None  # without anybody's B there is nothing to deploy

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return factor_bytes(layer, card.rank, "A")

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return factor_bytes(layer, card.rank, "A")


def with_own_B(client: Client, shared: dict[str, Tensor]) -> Adapter:
    """The shared A beside the B that this client keeps, which is zero until it has trained."""
    layers, rank = client.card.layers, client.card.rank
    own = client.memory.get("B") or {name: torch.zeros(factor_shape(one, rank, "B")) for name, one in layers.items()}
    return {name: LowRank(own[name], A, client.card.scale) for name, A in shared.items()}
