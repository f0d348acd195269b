"""The base model as a log of low-rank patches, so that a client that missed rounds can catch up exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from coterie.maths.keys import Key
from coterie.protocol.messages import message
from coterie.protocol.terms import Adapter, LowRank

Distribution = Literal["gaussian", "uniform"]


@message
class SeededPatch:
    """W + s B A of which one factor of each layer travels, the other one is drawn by whoever needs it.

    factors: by layer, A (r, d_in) where `side` is "A", else B (d_out, r). widths: by layer, d_out of the B that is
    drawn, or d_in of the A; see `drawn_factor`. The key's 8 bytes are all that travels of them.
    """

    factors: dict[str, Tensor]
    widths: dict[str, int]
    side: str
    key: Key
    scale: float
    distribution: str = "gaussian"

    def adapter(self) -> Adapter:
        """The same as a pair of factors for each layer."""
        made: Adapter = {}
        for name, factor in self.factors.items():
            rank = factor.shape[0 if self.side == "A" else 1]
            drawn = drawn_factor(self.key.fold(name), rank, self.widths[name], self.distribution)
            pair = (drawn.mT.contiguous(), factor) if self.side == "A" else (factor, drawn)
            made[name] = LowRank(*pair, self.scale)
        return made


Patch = Adapter | SeededPatch
"""What one version of the base adds to the one before it, as it travels and is stored."""


@message
class BaseLog:
    """W = W_0 + sum of patches, in order; version v has the first v patches, which never change."""

    patches: tuple[Patch, ...] = ()

    @property
    def version(self) -> int:
        return len(self.patches)

    def add(self, patch: Mapping[str, LowRank] | SeededPatch) -> BaseLog:
        """The next version, W + s B A on the layers of the patch."""
        return replace(self, patches=(*self.patches, patch if isinstance(patch, SeededPatch) else dict(patch)))

    def since(self, version: int) -> tuple[Patch, ...]:
        """The patches that a holder of `version` lacks."""
        if not 0 <= version <= self.version:
            raise ValueError(f"version {version} of a base that has {self.version}")
        return self.patches[version:]


def as_adapters(patches: Sequence[Patch]) -> list[Adapter]:
    """Patches as pairs of factors, with whatever has to be drawn."""
    return [patch.adapter() if isinstance(patch, SeededPatch) else patch for patch in patches]


def layers_of(patch: Patch) -> list[str]:
    """The layers that a patch changes."""
    return list(patch.factors if isinstance(patch, SeededPatch) else patch)


def drawn_factor(key: Key, rank: int, width: int, distribution: str) -> Tensor:
    """A random factor (rank, width), float32: an A of d_in = width, or the transpose of a B of d_out = width.

    distribution: "gaussian" of variance 1 / width, or "uniform" on [-1, 1] / sqrt(width), LoRA's initial A. Of both,
    E[A^T A] is a multiple of the identity.
    """
    bound = 1 / math.sqrt(width)
    if distribution == "uniform":
        return key.uniform((rank, width), -bound, bound)
    return key.normal((rank, width), std=bound)
