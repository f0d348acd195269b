"""Adapters of the outer blocks of a model, as methods with an emulator of the others train them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from coterie.errors import ModelError
from coterie.maths.blocks import block_name, block_of
from coterie.maths.keys import Key
from coterie.protocol import Bottleneck, Card, Layer, Term, Uploads, weighted_sum


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
