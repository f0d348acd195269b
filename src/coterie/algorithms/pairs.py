"""What follows where every client is sent a pair for each layer, trains that pair, and sends it back."""

from __future__ import annotations

from typing import Any

from coterie.algorithms.factors import check_adapter, pair_bytes
from coterie.protocol import Card, Client, Layer, Model


class PairExchange:
    """The part of a method whose downloads and uploads are an `Adapter` of the client's rank each.

    A site is evaluated with what it was sent, the federation with the `lora` of the server's state.
    """

    def check(self, payload: Any, card: Card) -> None:
        check_adapter(payload, card)

    def site_model(self, client: Client, download: Any) -> Model:
        return Model(lora=download)

    def global_model(self, state: Any) -> Model:
        return Model(lora=state.lora)

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank)

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank)
