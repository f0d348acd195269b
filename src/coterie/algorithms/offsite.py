"""Adapters of the outer blocks of a model, as methods with an emulator of the others train them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from coterie.algorithms.base import BYTES
from coterie.algorithms.factors import average_factors, check_adapter, cut_for, initial_adapter, pair_bytes
from coterie.errors import ModelError
from coterie.maths.blocks import block_name, block_of
from coterie.maths.keys import Key
from coterie.protocol import (
    Bottleneck,
    Card,
    FactorDistance,
    Federation,
    Layer,
    Penalty,
    ProductDistance,
    Term,
    Uploads,
    weighted_sum,
)

Outer = Mapping[str, Any]
"""An adapter of the outer blocks, a term for each of their layers."""


class Kind(ABC):
    """What an adapter of the outer blocks consists of. Cards are those of the outer layers alone."""

    @abstractmethod
    def initial(self, layers: Mapping[str, Layer], federation: Federation, key: Key) -> dict[str, Term]:
        """One that adds nothing."""

    @abstractmethod
    def mean(self, adapter: Outer, uploads: Uploads) -> dict[str, Term]:
        """The weighted mean of what was uploaded; layers of which nothing was stay as they were."""

    @abstractmethod
    def cut(self, adapter: Outer, card: Card) -> dict[str, Term]:
        """What fits a client."""

    @abstractmethod
    def distance(self, received: Outer, mu: float) -> Penalty:
        """mu ||adapter - received one||^2 over all layers."""

    @abstractmethod
    def check(self, payload: Any, card: Card) -> None:
        """Raises ModelError unless the upload is such an adapter of this client."""

    @abstractmethod
    def size(self, layer: Layer, card: Card) -> int:
        """The bytes of a layer."""


@dataclass(frozen=True)
class Factors(Kind):
    """LoRA, of each client's own rank; what is drawn to the received one is the merged s B A."""

    def initial(self, layers: Mapping[str, Layer], federation: Federation, key: Key) -> dict[str, Term]:
        return dict(initial_adapter(layers, federation.rank, federation.cards[0].scale, key))

    def mean(self, adapter: Outer, uploads: Uploads) -> dict[str, Term]:
        return {**adapter, **average_factors(uploads, max(term.rank for term in adapter.values()))}

    def cut(self, adapter: Outer, card: Card) -> dict[str, Term]:
        return dict(cut_for(dict(adapter), card))

    def distance(self, received: Outer, mu: float) -> Penalty:
        scale = float(next(iter(received.values())).scale)
        return ProductDistance(dict(received), mu * scale**2)  # which takes B A without its scale

    def check(self, payload: Any, card: Card) -> None:
        check_adapter(payload, card)

    def size(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank)


@dataclass(frozen=True)
class Bottlenecks(Kind):
    """Residual bottlenecks of k entries, alike for all clients; parameter by parameter drawn to the received ones."""

    k: int

    def initial(self, layers: Mapping[str, Layer], federation: Federation, key: Key) -> dict[str, Term]:
        return dict(initial_bottlenecks(layers, self.k, key))

    def mean(self, adapter: Outer, uploads: Uploads) -> dict[str, Term]:
        return mean_terms(adapter, uploads)

    def cut(self, adapter: Outer, card: Card) -> dict[str, Term]:
        return dict(adapter)

    def distance(self, received: Outer, mu: float) -> Penalty:
        return FactorDistance(received, mu, ("down", "up"), "bottleneck")

    def check(self, payload: Any, card: Card) -> None:
        check_bottlenecks(payload, card, self.k)

    def size(self, layer: Layer, card: Card) -> int:
        return 2 * self.k * layer.d_out * BYTES


def of_layers(card: Card, names: Collection[str]) -> Card:
    """The card with these of its layers alone."""
    return replace(card, layers={name: layer for name, layer in card.layers.items() if name in names})


def initial_bottlenecks(layers: Mapping[str, Layer], k: int, key: Key) -> dict[str, Bottleneck]:
    """A bottleneck of k entries for each layer, which changes nothing: down = 0, up uniform up to 1/sqrt(k)."""
    bound = 1 / math.sqrt(k)
    return {
        name: Bottleneck(torch.zeros(k, layer.d_out), key.fold("up", name).uniform((layer.d_out, k), -bound, bound))
        for name, layer in layers.items()
    }


def mean_terms(adapter: Mapping[str, Term], uploads: Uploads) -> dict[str, Term]:
    """The weighted mean of the uploaded terms, parameter by parameter, over the clients that have the layer."""
    made = dict(adapter)
    for name, term in adapter.items():
        held = uploads.where(lambda one, name=name: one.weight > 0 and name in one.payload)  # type: ignore[misc]
        if len(held):
            sums = weighted_sum([(weight, sent[name].parameters) for _, sent, weight in held.items()])
            made[name] = term.with_parameters(sums)
    return made


def check_bottlenecks(payload: Any, card: Card, k: int) -> None:
    """Raises ModelError unless the upload is a bottleneck of k entries for each of the card's layers."""
    found = payload if isinstance(payload, Mapping) else {}
    sound = all(isinstance(term, Bottleneck) and term.rank == k for term in found.values())
    if set(found) != set(card.layers) or not sound:
        raise ModelError(f"client {card.id}: a bottleneck of {k} for each of {len(card.layers)} layers expected")


def block_of_last(adapter: Mapping[str, Term]) -> str:
    """The name of the first of the outer blocks at the end: the one after the widest gap of numbers."""
    numbers = sorted({number for name in adapter if (number := block_of(name)) is not None})
    gaps = {b - a: b for a, b in pairwise(numbers)}
    return block_name(next(name for name in adapter if block_of(name) == gaps[max(gaps)]))
