"""RoLoRA: train B and A in turns, so that every average is exact.

RoLoRA, arXiv 2502.01755. In rounds 1, 3, 5, ... B is trained beside the common A, in rounds 2, 4, ... A beside the
common B; the mean of the trained factor is taken. B comes first: as long as it is 0, A has no gradient.
Up: the trained factor, r m or r n scalars a layer by turns. Down: the factor that changed since the client's last
round, which is the one that the round before trained; both for a client that missed rounds; once, the seed of A.
Deviations: averages reach clients with their next download, so a round's download is the paper's broadcast of the
round before, and the first round's is the seed alone. Local training is the experiment's, where the paper's theory
solves for B exactly and takes a gradient step on A. One scale and one rank are required of all clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import (
    Factor,
    check_factor,
    factor_bytes,
    factor_of_pair,
    initial_pair,
    pair_bytes,
    require_common_scale,
    require_equal_ranks,
    with_factor,
)
from coterie.algorithms.turns import Changed, Turns, current_pair, factor_in_turn, lacking_factors
from coterie.errors import ModelError
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
    Phase,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)


@message
class State:
    """The global pair, the seed of its A, and who lacks what of it."""

    lora: Adapter
    init_key: Key
    turns: Turns


@message
class Half:
    """The factor that a client trained, "B" or "A", by layer."""

    factor: Factor
    values: dict[str, Tensor]


@dataclass(frozen=True)
class RoLoRA(Algorithm):
    """Alternating optimisation of the two factors (arXiv 2502.01755)."""

    traits = Traits(
        title="RoLoRA",
        paper="arXiv 2502.01755",
        up="B or A by turns: r m, r n",
        down="mean B or mean A by turns: r m, r n",
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
        keeps_memory=True,
    )

    def start(self, federation: Federation, server: Server) -> State:
        require_equal_ranks(federation, "RoLoRA")
        require_common_scale(federation, "RoLoRA")
        key = server.key("init")
        lora = initial_pair(federation, key)
        return State(lora, key, Turns.none())

    def send(self, state: State, card: Card) -> Changed:
        return Changed(lacking_factors(state.lora, state.turns, card), Once(state.init_key))

    def local(self, client: Client, download: Changed) -> Program:
        start, trains = current_pair(client, download), factor_in_turn(client.round)
        client.memory["factors"] = start
        fitted = yield Fit(Model(lora=start), train=(f"lora.*.{trains}",))
        return Upload(Half(trains, factor_of_pair(fitted.model["lora"], trains)))

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        trained = factor_in_turn(server.round)
        due = uploads.where(lambda one: one.payload.factor == trained)  # nobody is out of turn, unless out of order
        if not len(due):
            return state
        mean = due.mean(lambda payload: payload.values)  # Bbar = sum p_i B_i, or Abar = sum p_i A_i
        turns = state.turns.after(server.round, trained, due)
        return State(with_factor(state.lora, trained, mean), state.init_key, turns)

    def check(self, payload: Any, card: Card) -> None:
        if not isinstance(payload, Half) or payload.factor not in ("B", "A"):
            raise ModelError(f"client {card.id}: an upload must be one half, B or A, of every adapted layer's pair")
        check_factor(payload.values, card, payload.factor)

    def site_model(self, client: Client, download: Changed) -> Model:
        return Model(lora=current_pair(client, download))

    def global_model(self, state: State) -> Model:
        return Model(lora=state.lora)

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank) // 2

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank) // 2

    def bytes_of_round(self, layer: Layer, card: Card, number: int, phase: Phase) -> tuple[int, int]:
        up, down = (factor_bytes(layer, card.rank, factor_in_turn(t)) for t in (number, number - 1))
        return up, down if number > 1 else 0
