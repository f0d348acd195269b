"""What methods that upload sketches share: the message, both sides of it, what arrives, and what it lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from coterie.algorithms.base import BYTES
from coterie.algorithms.factors import by_layer
from coterie.errors import ModelError
from coterie.maths import lowrank
from coterie.maths.keys import Key
from coterie.maths.sketch import SketchMatrices, error_bound, sketch, sketch_matrices, tail_energies
from coterie.protocol import Adapter, Card, Layer, LowRank, Seen, Uploads, message, weighted_sum

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
    for card, payload, _ in uploads.items():
        for name, one in payload.items():
            s, k = sizes(layers[name])
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


def sketch_losses(
    trained: Mapping[str, tuple[float, Adapter]], rebuilt: Adapter, rank: int, sizes: Callable[[str], tuple[int, int]]
) -> dict[str, float]:
    """What the sketches lost, over all layers together and relative to ||W||_F, W = sum p_i B_i A_i unscaled.

    sketch_error: ||What - W||_F. tail_energy: tau_{rank + 1}, what the best approximation of that rank would lose.
    sketch_bound: the root of Lemma 2's bound on E||What - W||_F^2 for the plain reconstruction from the same sketch
    before any truncation, left out where a layer's sizes are outside of it; of a method that truncates or shrinks it
    is no bound on sketch_error. Nothing where nobody trained or W is zero. Figures below 1e-8 are rounding.

    trained: weight and factors of each client. sizes: s and k of a layer by its name.
    """
    error = tail = bound = energy = 0.0
    bounded = True
    for name, term in rebuilt.items():
        held = [(weight, adapter[name]) for weight, adapter in trained.values() if name in adapter]
        total = sum(weight for weight, _ in held)
        if total <= 0:
            continue
        factors, weights = [(one.left, one.A) for _, one in held], [weight / total for weight, _ in held]
        W, What = lowrank.stack_factors(factors, weights, dtype=torch.float64), (term.left.double(), term.A.double())
        spectrum = product_spectrum(*W)
        tails = tail_energies(spectrum)
        apart = tails[0] - 2 * lowrank.inner(*W, *What) + lowrank.squared_norm(*What)
        error += max(0.0, float(apart))
        energy += float(tails[0])
        tail += float(tails[rank]) if rank < len(tails) else 0.0
        s, k = sizes(name)
        bounded = bounded and s >= 2 and k > s + 1
        bound += float(error_bound(spectrum, s, k)) if bounded else 0.0
    if energy <= 0:
        return {}
    found = {"sketch_error": error, "tail_energy": tail} | ({"sketch_bound": bound} if bounded else {})
    return {name: (value / energy) ** 0.5 for name, value in found.items()}


def product_spectrum(B: Tensor, A: Tensor) -> Tensor:
    """The singular values of B A, descending, as roots of the eigenvalues of a Gram matrix of r or m rows.

    Half the work of the SVD of a core; those below about 1e-8 of the largest are rounding, or 0.
    """
    core = torch.linalg.qr(B, mode="r").R @ A
    spectrum: Tensor = torch.linalg.eigvalsh(core @ core.mT).clamp(min=0).sqrt().flip(-1)
    return spectrum


def trained_by(seen: Mapping[str, Seen]) -> dict[str, tuple[float, Adapter]]:
    """Weight and trained factors of everybody of whom simulation knows them."""
    return {
        name: (one.weight, cast("dict[str, LowRank]", one.model["lora"]))
        for name, one in seen.items()
        if one.model is not None and "lora" in one.model
    }
