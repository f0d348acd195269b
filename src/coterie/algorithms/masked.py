"""Training some entries of W that one random mask names, the same for all: what travels of it, and the model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from coterie.errors import ModelError
from coterie.maths.keys import Key
from coterie.maths.sparse_change import random_places
from coterie.protocol import Card, Layer, SparseDelta, message


@message
class Values:
    """The values at the mask, by layer, in the order of the flat W."""

    values: dict[str, Tensor]


def at_mask(values: Mapping[str, Tensor], layers: Mapping[str, Layer], key: Key) -> dict[str, SparseDelta]:
    """By layer, the change of W that has these values at the mask of this key, and 0 elsewhere."""
    terms = {}
    for name, value in values.items():
        m, n = layers[name].d_out, layers[name].d_in
        terms[name] = SparseDelta(value, random_places(key.fold(name), m * n, len(value)), m, n)
    return terms


def check_values(payload: Values, card: Card, counts: Mapping[str, int]) -> None:
    """Raises ModelError unless there are so many values for each of these layers."""
    if {name: tuple(one.shape) for name, one in payload.values.items()} != {n: (k,) for n, k in counts.items()}:
        raise ModelError(f"client {card.id}: an upload must be the values at the mask of each adapted layer")
