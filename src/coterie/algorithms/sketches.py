"""What methods that upload sketches share: the message, its sizes, both sides of it, and what may arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from coterie.algorithms.base import BYTES
from coterie.algorithms.factors import by_layer
from coterie.errors import ModelError
from coterie.maths.keys import Key
from coterie.maths.sketch import SketchMatrices, sketch, sketch_matrices
from coterie.protocol import Adapter, Card, Layer, Uploads, message, weighted_sum

Sizes = Callable[[Layer], tuple[int, int]]
"""Columns s of Omega and rows k of Psi for a layer."""


@message
class Sketch:
    """Y = B A Omega (m, s) and Z = Psi B A (k, n) of one layer's unscaled product."""

    Y: Tensor
    Z: Tensor


Sketches = dict[str, Sketch]
"""One sketch for each adapted layer, by layer name."""


@dataclass(frozen=True)
class SketchSizes:
    """How wide and high a method's sketches are.

    k: rows of Psi, above its columns by two at least, which is its value unless given. rank: r of the global pair, the
    largest rank of any client unless given.
    """

    k: int | None = None
    rank: int | None = None

    def columns(self, r: int) -> int:
        """Columns of Omega for a global pair of rank r."""
        return r

    def rows(self, r: int) -> int:
        """k, the rows of Psi; raises ValueError where k is not above its columns by two at least."""
        s = self.columns(r)
        if self.k is not None and self.k <= s + 1:
            raise ValueError(f"k must be above {s + 1} for rank {r}, not {self.k}; raise it or leave it out")
        return s + 2 if self.k is None else self.k

    def sizes(self, layer: Layer, r: int) -> tuple[int, int]:
        """s_l and k_l of one layer; no layer has more columns than its own width or height."""
        return min(self.columns(r), layer.d_out, layer.d_in), self.rows(r)


def matrices_for(layers: Mapping[str, Layer], key: Key, sizes: Sizes) -> dict[str, SketchMatrices]:
    """Omega and Psi of every layer; layers of one shape and size share them (F8)."""
    drawn: dict[tuple[int, ...], SketchMatrices] = {}
    made = {}
    for name, layer in layers.items():
        wanted = (layer.d_out, layer.d_in, *sizes(layer))
        if wanted not in drawn:
            drawn[wanted] = sketch_matrices(key, *wanted)
        made[name] = drawn[wanted]
    return made


def sketched(adapter: Adapter, card: Card, key: Key, sizes: Sizes) -> Sketches:
    """The client's half: every layer's unscaled product, sketched from its factors."""
    matrices = matrices_for(card.layers, key, sizes)
    return {name: Sketch(*sketch(term.left, term.A, *matrices[name])) for name, term in adapter.items()}


def mean_sketches(
    uploads: Uploads, layers: Mapping[str, Layer], key: Key, sizes: Sizes
) -> dict[str, tuple[Tensor, Tensor, SketchMatrices]]:
    """The server's half: sum p_i Y_i and sum p_i Z_i of every layer that came, in fp64, with Omega and Psi.

    Raises:
        ModelError: naming client and layer, for a sketch of other sizes than this round's.
    """
    wanted = {name: sizes(layer) for name, layer in layers.items()}
    for card, payload, _ in uploads.items():
        for name, one in payload.items():
            s, k = wanted[name]
            if (one.Y.shape[-1], one.Z.shape[-2]) != (s, k):
                raise ModelError(
                    f"client {card.id}, layer {name}: a sketch of {one.Y.shape[-1]} columns and {one.Z.shape[-2]} rows "
                    f"where {s} and {k} are expected; give all clients one configuration"
                )
    matrices = matrices_for(layers, key, sizes)
    return {
        name: (
            weighted_sum([(weight, one.Y) for weight, one in held], torch.float64),
            weighted_sum([(weight, one.Z) for weight, one in held], torch.float64),
            matrices[name],
        )
        for name, held in cast("list[tuple[str, list[tuple[float, Any]]]]", by_layer(uploads))
    }


def check_sketches(payload: Any, card: Card) -> None:
    """Raises ModelError unless the upload is one sketch, of the layer's sizes, for each of the client's layers."""
    if not isinstance(payload, Mapping) or set(payload) != set(card.layers):
        found = f"{len(payload)} entries" if isinstance(payload, Mapping) else type(payload).__name__
        raise ModelError(f"client {card.id}: one sketch for each of {len(card.layers)} layers expected, not {found}")
    for name, one in payload.items():
        layer = card.layers[name]
        if not isinstance(one, Sketch) or one.Y.dim() != 2 or one.Z.dim() != 2:
            raise ModelError(f"client {card.id}, layer {name}: a sketch of two matrices expected")
        if one.Y.shape[0] != layer.d_out or one.Z.shape[1] != layer.d_in:
            raise ModelError(
                f"client {card.id}, layer {name}: Y {tuple(one.Y.shape)} and Z {tuple(one.Z.shape)} do not fit a layer "
                f"of {layer.d_out} x {layer.d_in}; expected Y ({layer.d_out}, s) and Z (k, {layer.d_in})"
            )


def sketch_bytes(layer: Layer, sizes: Sizes) -> int:
    """Bytes of one layer's sketch: (m s + k n) scalars."""
    s, k = sizes(layer)
    return (layer.d_out * s + k * layer.d_in) * BYTES
