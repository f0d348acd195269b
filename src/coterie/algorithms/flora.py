"""FLoRA: stack the factors of all clients, merge the stack into the base, start afresh.

FLoRA, arXiv 2409.05976; p_i stands on the A blocks only. The product of the stacks is the sum of the products, whatever
the ranks, so nothing is lost; the price is the download.
Up: B_i, A_i, r_i (m + n) scalars a layer. Down: no message, but the stack of who took part as a patch of the base,
(sum r_i) (m + n), to every client that lacks it.
Deviations: the s_i of clients are folded into the stack beside p_i, so that scales may differ. A client that missed
rounds is sent the stacks that it lacks before it trains again, which the paper leaves open. The head, of which the
paper does not speak, follows the experiment's policy with the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import check_adapter, initial_factors, pair_bytes, stack_weighted
from coterie.protocol import (
    BaseLog,
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
class State:
    """The base: one stack for each round played."""

    base: BaseLog = BaseLog()


@dataclass(frozen=True)
class FLoRA(Algorithm):
    """Aggregation by stacking, into the base (arXiv 2409.05976)."""

    traits = Traits(
        title="FLoRA",
        paper="arXiv 2409.05976",
        up="B, A: r_i (m + n)",
        down="stack, into the base: sum r_j (m + n)",
        ranks="unequal",
        exact=True,
        gauge_invariant=True,
        one_client=True,
        equal_clients=True,
        zero_weight=True,
        changes_base=True,
    )

    def start(self, federation: Federation, server: Server) -> State:
        return State()

    def send(self, state: State, card: Card) -> None:
        return None  # the engine brings the client's base up to date

    def local(self, client: Client, download: None) -> Program:
        fresh = initial_factors(client.card, client.key("init"))  # every round anew: B = 0, A random
        fitted = yield Fit(Model(lora=fresh))
        return Upload(fitted.model["lora"])

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        stack = stack_weighted(uploads)  # B = [B_1, B_2, ...], A = [p_1 s_1 A_1; p_2 s_2 A_2; ...]
        return replace(state, base=state.base.add(stack))  # W + sum p_i s_i B_i A_i

    def check(self, payload: Any, card: Card) -> None:
        check_adapter(payload, card)

    def site_model(self, client: Client, download: None) -> Model:
        return Model()

    def global_model(self, state: State) -> Model:
        return Model()

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank)

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return 0  # beside the base: the stack's sum r_j (m + n)
