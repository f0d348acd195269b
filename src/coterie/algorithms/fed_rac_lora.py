"""Fed-RAC-LoRA: every round a new random factor, the other one trained from zero, averaged, and merged into the base.

Fed-RAC-LoRA, arXiv 2410.08305, implements its federated algorithm: a chain of asymmetric adapters. Since the random
factor is the same for all, W + s B_S mean(A_i) = W + s mean(B_S A_i): aggregation loses nothing.
Up: the trained factor, r n or r m scalars a layer. Down: no message, but the mean of the trained factor as a patch of
the base, r n or r m, with the 8-byte seed of the other one, to every client that lacks it; once, the seed of the chain.
Which side is trained is drawn round by round (or fixed, `sides`) from a seed of the method's own, so that everybody
knows it, and every seed of an experiment sends the same bytes.
Deviations: the scale is the experiment's, where the released code takes alpha, not alpha / r. A client that missed
rounds is sent their means, not W_t: the same base, to the bit. One scale and one rank are required of all clients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import (
    Factor,
    factor_bytes,
    factor_of_pair,
    factor_shape,
    is_factor,
    require_common_scale,
    require_equal_ranks,
)
from coterie.errors import ModelError
from coterie.maths.keys import Key, root_key
from coterie.protocol import (
    BaseLog,
    Card,
    Client,
    Federation,
    Fit,
    Layer,
    Model,
    Once,
    Phase,
    SeededPatch,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)
from coterie.protocol.base_log import Distribution


@message
class State:
    """The seed of all random factors, and the chain of merges so far."""

    key: Key
    base: BaseLog = BaseLog()


@message
class Download:
    """The seed of all random factors: a Once when sent, the Key itself on arrival."""

    key: Any


@dataclass(frozen=True)
class FedRACLoRA(Algorithm):
    """Randomised asymmetric chain of LoRA, federated (arXiv 2410.08305).

    sides: which factor is trained; "random" draws it for each round, with equal chances, from `seed`. distribution: of
    the random factor; variance 1 / n (or 1 / m), or LoRA's initial uniform one.
    """

    sides: Literal["random", "A", "B"] = "random"
    distribution: Distribution = "gaussian"
    seed: int = 0

    traits = Traits(
        title="Fed-RAC-LoRA",
        paper="arXiv 2410.08305",
        up="A or B, as drawn: r n, r m",
        down="mean A or mean B, into the base: r n, r m",
        ranks="equal",
        weights="uniform",
        common_scale=True,
        exact=True,
        best_rank=True,
        one_client=True,
        equal_clients=True,
        zero_weight=True,
        linear_upload=True,
        changes_base=True,
    )

    def start(self, federation: Federation, server: Server) -> State:
        require_equal_ranks(federation, self.traits.title)
        require_common_scale(federation, self.traits.title)
        return State(server.key("chain"))

    def send(self, state: State, card: Card) -> Download:
        return Download(Once(state.key))  # the engine brings the client's base up to date

    def local(self, client: Client, download: Download) -> Program:
        side, card = self.side(client.round), client.card
        zero = {name: torch.zeros(factor_shape(layer, card.rank, side)) for name, layer in card.layers.items()}
        start = self.link(zero, card, download.key, client.round)  # B_S random and A = 0, or A_S random and B = 0
        fitted = yield Fit(Model(lora=start.adapter()), train=(f"lora.*.{side}",))
        return Upload(factor_of_pair(fitted.model["lora"], side))

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        side = self.side(server.round)
        due = uploads.where(
            lambda one: is_factor(one.payload, one.card, side)
        )  # all of them, unless one is out of order
        if not len(due):
            return state
        layers = {name: layer for one in due for name, layer in one.card.layers.items()}
        whole = replace(next(iter(due)).card, layers=layers)
        merged = self.link(due.mean(), whole, state.key, server.round)
        return replace(state, base=state.base.add(merged))  # W + s B_S mean(A_i), or W + s mean(B_i) A_S

    def link(self, factors: dict[str, Tensor], card: Card, key: Key, number: int) -> SeededPatch:
        """These factors beside the random ones of round `number`."""
        side, layers = self.side(number), card.layers
        widths = {name: layers[name].d_out if side == "A" else layers[name].d_in for name in factors}
        return SeededPatch(factors, widths, side, key.fold("round", number), card.scale, self.distribution)

    def side(self, number: int) -> Factor:
        """The factor that is trained in this round."""
        if self.sides != "random":
            return self.sides
        return "A" if root_key(self.seed).fold("sides", number).unit(1)[0] < 0.5 else "B"

    def check(self, payload: Any, card: Card) -> None:
        if not is_factor(payload, card, "A") and not is_factor(payload, card, "B"):
            raise ModelError(
                f"client {card.id}: an upload must be one A ({card.rank}, n), or one B (m, {card.rank}), for each "
                "adapted layer"
            )

    def site_model(self, client: Client, download: Download) -> Model:
        return Model()

    def global_model(self, state: State) -> Model:
        return Model()

    def bytes_up(self, layer: Layer, card: Card) -> int:
        sizes = [factor_bytes(layer, card.rank, side) for side in ("A", "B") if self.sides in ("random", side)]
        return sum(sizes) // len(sizes)

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return 0  # beside the base: the mean of the trained factor, as large as an upload, and 8 bytes for all layers

    def bytes_of_round(self, layer: Layer, card: Card, number: int, phase: Phase) -> tuple[int, int]:
        return factor_bytes(layer, card.rank, self.side(number)), 0
