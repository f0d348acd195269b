"""A method that exists only to show that the contract's walls carry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import average_factors, initial_adapter, initial_factors
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Evaluate,
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
class TwoStageState:
    shared: Adapter
    sizes: dict[str, int]
    polished: int = 0


@dataclass(frozen=True)
class TwoStage(Algorithm):
    """A set-up phase in which clients report, server training on public data, and personal models.

    Every site adds a private pair `local` to the shared pair; the server polishes the shared pair on public text
    after each average, and once more at the end without any client.
    """

    traits = Traits(
        title="Two stage",
        paper="test",
        up="shared pair",
        down="shared pair",
        ranks="unequal",
        personal=True,
        keeps_memory=True,
        server_data="public",
        evaluated="before aggregation",
    )

    def phases(self, rounds: int) -> list[Phase]:
        return [
            Phase("survey", 1, clients="all", trains=False),
            Phase("main", rounds),
            Phase("polish", 1, clients="none", trains=False),
        ]

    def start(self, federation: Federation, server: Server) -> Program:
        fresh = initial_adapter(federation.layers, federation.rank, federation.cards[0].scale, server.key("init"))
        fitted = yield Fit(Model(shared=fresh), train=("shared.*",), data="public/toy", steps=1)
        return TwoStageState(fitted.model["shared"], {})

    def send(self, state: TwoStageState, card: Card) -> Adapter | None:
        return {name: term.truncated(card.rank) for name, term in state.shared.items()} if state.sizes else None

    def local(self, client: Client, download: Any) -> Any:
        if client.phase == "survey":
            return self._survey(client)
        return self._train(client, download)

    def _survey(self, client: Client) -> Program:
        fresh = initial_factors(client.card, client.key("own"))
        score = yield Evaluate(Model(local=fresh), "train", limit=4)
        client.memory["own"] = fresh
        return Upload({"examples": score.examples, "loss": score.loss})

    def _train(self, client: Client, download: Adapter) -> Program:
        model = Model(shared=download, local=client.memory["own"])
        first, second = yield [
            Fit(model, train=("local.*",), head=False, steps=1),
            Fit(model, train=("shared.*",), head=True, steps=2),
        ]
        client.memory["own"] = first.model["local"]
        return Upload(second.model["shared"], diagnostics={"seen": second.examples_seen})

    def aggregate(self, state: TwoStageState, uploads: Uploads, server: Server) -> Any:
        if server.phase == "survey":
            return replace(state, sizes={card.id: payload["examples"] for card, payload, _ in uploads.items()})
        return self._polish(state, uploads, server)

    def _polish(self, state: TwoStageState, uploads: Uploads, server: Server) -> Program:
        shared = state.shared
        if len(uploads):
            shared = average_factors(uploads, max(term.rank for term in shared.values()))
        fitted = yield Fit(Model(shared=shared), train=("shared.*",), data="public/toy", steps=1)
        return replace(state, shared=fitted.model["shared"], polished=state.polished + 1)

    def site_model(self, client: Client, download: Adapter | None) -> Model:
        own = client.memory["own"]
        return Model(local=own) if download is None else Model(shared=download, local=own)

    def global_model(self, state: TwoStageState) -> Model:
        return Model(shared=state.shared)

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return card.rank * (layer.d_out + layer.d_in) * 4

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return card.rank * (layer.d_out + layer.d_in) * 4
