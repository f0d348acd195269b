"""Local only: every client trains by itself, nothing travels.

The lower bound of any comparison; not a federated method. Up: nothing. Down: once, the seed of the initial factors,
so that all start alike. Heads stay at home too.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import kept_factors
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
    """The seed of the initial factors."""

    init_key: Key


@dataclass(frozen=True)
class LocalOnly(Algorithm):
    """Independent training of every client."""

    traits = Traits(
        title="Local only",
        paper="baseline",
        up="nothing",
        down="nothing",
        ranks="unequal",
        bases="any",
        personal=True,
        keeps_memory=True,
        head="local",
    )

    def start(self, federation: Federation, server: Server) -> State:
        return State(server.key("init"))

    def send(self, state: State, card: Card) -> Once:
        return Once(state.init_key)

    def local(self, client: Client, download: Key) -> Program:
        fitted = yield Fit(Model(lora=factors_of(client, download)))
        client.memory["factors"] = fitted.model["lora"]
        return Upload(None)

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        return state

    def site_model(self, client: Client, download: Key) -> Model:
        return Model(lora=factors_of(client, download))

    def global_model(self, state: State) -> None:
        return None

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return 0

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return 0


def factors_of(client: Client, init_key: Key) -> Adapter:
    """What the client has learnt so far; the initial factors before its first round."""
    return kept_factors(client, init_key)
