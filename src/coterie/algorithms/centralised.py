"""Centralised: the clients' data in one place, trained on as if there were no federation.

The reference beside which a federation's accuracy is read. Not a federated method: the server is given the training
data, of all clients together.
Up: the data themselves, which the ledger does not count. Down: nothing; the model that sites are evaluated with is
booked as evaluation.
A round is as much work as all clients together would do in it: the experiment's steps once for each client, or its
epochs over the pooled data. All clients are assumed to take part, also where the experiment samples; the option
`steps` sets another number. The factors have the largest rank of any client, and its scale; they and the head (one
for each model) are trained by the server with an optimiser that starts afresh every round, as a client's does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import initial_adapter
from coterie.errors import ConfigError, RunError
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    Layer,
    Model,
    Phase,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)


@message
class State:
    """The factors of each group's model, and how many clients' work its training is; whether clients use several."""

    models: dict[str, Adapter]
    clients: dict[str, int]
    mixed: bool


@dataclass(frozen=True)
class Centralised(Algorithm):
    """One model, trained on the data of all clients. steps: mini-batches of a round (None: see above)."""

    steps: int | None = None

    traits = Traits(
        title="Centralised",
        paper="baseline",
        up="the data (not counted)",
        down="nothing",
        ranks="unequal",
        pools_data=True,
    )

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase("main", rounds, clients="none")]

    def data_of(self, group: str) -> str:
        """The name of the data set that a group's model is trained on."""
        return "pooled"

    def work(self, federation: Federation, server: Server) -> Mapping[str, int]:
        """The groups that have a model, and of how many clients its training has the steps."""
        return Counter(self.head_group(None, card) for card in federation.cards)

    def start(self, federation: Federation, server: Server) -> State:
        clients = self.work(federation, server)
        require_pooled(server, map(self.data_of, clients), self.traits.title)
        largest = max(federation.cards, key=lambda card: card.rank)
        fresh = initial_adapter(federation.layers, largest.rank, largest.scale, server.key("init"))
        groups = sorted(clients)
        mixed = any(self.head_group(None, card) not in clients for card in federation.cards)
        return State(dict.fromkeys(groups, fresh), {group: clients[group] for group in groups}, mixed)

    def send(self, state: State, card: Card) -> Any:
        lora = state.models[self.head_group(state, card)]  # to be evaluated with: nobody takes part in a round
        return {name: lora[name] for name in card.layers}

    def local(self, client: Client, download: Any) -> Upload:
        raise RunError(f"client {client.card.id}: nobody trains at home in {self.traits.title}; the server does")

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> Program:
        groups = list(state.models)
        fitted = yield [
            Fit(
                Model(lora=state.models[group]),
                head=group,
                data=self.data_of(group),
                steps=self.steps,
                times=state.clients[group],
            )
            for group in groups
        ]
        return replace(state, models={group: fitted[i].model["lora"] for i, group in enumerate(groups)})

    def site_model(self, client: Client, download: Any) -> Model:
        return Model(lora=download)

    def global_model(self, state: State) -> Model | None:
        return Model(lora=state.models["all"])

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return 0

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return 0


def require_pooled(server: Server, names: Iterable[str], method: str) -> None:
    """Raises ConfigError for pooled data that the server does not have."""
    for name in sorted(names):
        if name not in server.data:
            raise ConfigError(
                f"{method} trains at the server on the clients' data together, but the server has no data set "
                f"{name!r}; put it into the setting's server_data"
            )
