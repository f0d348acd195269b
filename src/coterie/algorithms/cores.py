"""What a method with cores between frozen bases needs: sizes, their terms, which of them count, what may arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.errors import ConfigError, ModelError
from coterie.maths.bases import gaussian_columns, orthonormal_columns
from coterie.maths.keys import Key
from coterie.protocol import Card, Core, Layer, message

Bases = Literal["orthonormal", "gaussian"]
"""Gram-Schmidt over all heads of a layer, or Gaussian columns."""


@message
class Heads:
    """The heads that a client trained, ascending, and s_j H_j of these (h_i, r, r) by layer."""

    chosen: list[int]
    cores: dict[str, Tensor]


@dataclass(frozen=True)
class HeadSizes:
    """How many heads there are, how wide they are, and how many a client trains.

    heads: h. rank_per_head: how much of a client's rank one head takes. head_rank: r of every layer; unless given, as
    wide as that much of a low-rank pair would cost, r^2 <= rank_per_head (m + n), and all heads together no wider than
    the layer where they are to be orthogonal. bases: Gram-Schmidt over all heads, or Gaussian.
    """

    heads: int = 4
    rank_per_head: int = 2
    head_rank: int | None = None
    bases: Bases = "orthonormal"

    def __post_init__(self) -> None:
        if self.heads < 1 or self.rank_per_head < 1 or (self.head_rank is not None and self.head_rank < 1):
            raise ValueError("heads, rank_per_head and head_rank must be 1 at least")

    def width(self, layer: Layer) -> int:
        """r, the width of each head in this layer."""
        room = min(layer.d_out, layer.d_in) // self.heads if self.bases == "orthonormal" else layer.d_out
        return self.head_rank or min(isqrt(self.rank_per_head * (layer.d_out + layer.d_in)), room)

    def sizes(self, layers: Mapping[str, Layer]) -> dict[str, tuple[int, ...]]:
        """(h, r, r) of every layer."""
        return {name: (self.heads, *[self.width(layer)] * 2) for name, layer in layers.items()}

    def number(self, card: Card) -> int:
        """h_i, the heads that this client trains: one at least."""
        return min(self.heads, max(1, card.rank // self.rank_per_head))


def between_bases(
    cores: Mapping[str, Tensor], layers: Mapping[str, Layer], key: Key, bases: Bases, *, gain: bool = False
) -> dict[str, Core]:
    """All heads H (h, r, r) of every layer between the bases that `key` draws; with `gain`, s_j = 1 to be trained."""
    columns = orthonormal_columns if bases == "orthonormal" else gaussian_columns
    made = {}
    for name, H in cores.items():
        rank = len(H) * H.shape[-1]
        U = columns(key.fold(name, "U"), layers[name].d_out, rank)
        V = columns(key.fold(name, "V"), layers[name].d_in, rank).mT
        made[name] = Core(U, H, V, torch.ones(len(H)) if gain else None)
    return made


def require_orthogonal(sizes: Mapping[str, tuple[int, ...]], layers: Mapping[str, Layer], method: str) -> None:
    """Raises ConfigError for a layer in which heads of these sizes (h, r, r) cannot all be orthogonal."""
    for name, (heads, width, _) in sizes.items():
        limit, wide = min(layers[name].d_out, layers[name].d_in), max(1, width)
        if heads * wide > limit:
            raise ConfigError(
                f"{method}: {heads} heads of width {wide} do not fit layer {name}, in which only {limit} directions "
                "are orthogonal; lower heads or head_rank, or take bases=gaussian"
            )


def squared_norms(parts: Sequence[Tensor]) -> Tensor:
    """The squared Frobenius norm of each head (h, r, r), summed over layers: (h,)."""
    return torch.stack([part.double().square().sum(dim=(-2, -1)) for part in parts]).sum(dim=0)


def check_heads(payload: Any, card: Card, number: int, sizes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelError unless the upload is `number` different heads, and their cores, of layers of these sizes."""
    if not isinstance(payload, Heads) or set(payload.cores) != set(sizes):
        raise ModelError(f"client {card.id}: the trained heads of each of {len(sizes)} layers are expected")
    heads = max(size[0] for size in sizes.values())
    if len(set(payload.chosen)) != number or not set(payload.chosen) <= set(range(heads)):
        raise ModelError(f"client {card.id}: heads {payload.chosen} where {number} of {heads} are expected")
    for name, core in payload.cores.items():
        wanted = (number, *sizes[name][1:])
        if tuple(core.shape) != wanted or len(payload.chosen) != number:
            raise ModelError(f"client {card.id}, layer {name}: cores {tuple(core.shape)} where {wanted} is expected")
