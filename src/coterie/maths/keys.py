"""Random keys: every random draw of a run follows from (seed, purpose, round, client, ...) alone.

A key is one 64-bit integer, so a matrix that both sides draw travels as eight bytes. Draws come from
numpy's counter-based Philox bit stream, whose raw output is the same on every machine and version; the
step from bits to numbers is done here, since numpy may change its own between versions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Part = str | int


@dataclass(frozen=True)
class Key:
    """A named place in the tree of random streams."""

    seed: int

    def fold(self, *parts: Part) -> Key:
        """The key of a child stream. Parts are told apart by type and length, so ("a", "b") is not ("ab",)."""
        digest = hashlib.blake2b(self.seed.to_bytes(8, "big"), digest_size=8)
        for part in parts:
            kind, text = ("i", str(part)) if isinstance(part, int) else ("s", part)
            raw = text.encode()
            digest.update(f"{kind}{len(raw)}:".encode() + raw)
        return Key(int.from_bytes(digest.digest(), "big"))

    def bits(self, count: int) -> np.ndarray:
        """The first `count` raw words of this stream, uint64."""
        return np.random.Philox(key=self.seed).random_raw(count)

    def unit(self, count: int) -> np.ndarray:
        """`count` float64 numbers, uniform on [0, 1), with 53 random bits each."""
        return (self.bits(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def uniform(self, shape: Sequence[int], low: float, high: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform on [low, high) before rounding to `dtype`, filled row by row: fewer rows are a prefix."""
        values = low + (high - low) * self.unit(math.prod(shape))
        return torch.from_numpy(values).reshape(tuple(shape)).to(dtype)

    def normal(self, shape: Sequence[int], std: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """A Gaussian tensor (Box-Muller in float64, pair by pair: fewer rows are a prefix).

        The same on every machine in float32; float64 may differ in the last bit, so what two sides share is drawn
        in float32.
        """
        count = math.prod(shape)
        pairs = self.unit(2 * ((count + 1) // 2)).reshape(-1, 2)
        radius = np.sqrt(-2.0 * np.log1p(-pairs[:, 0]))
        angle = 2.0 * np.pi * pairs[:, 1]
        values = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count]
        return torch.from_numpy(std * values).reshape(tuple(shape)).to(dtype)

    def permutation(self, count: int) -> np.ndarray:
        """A random order of range(count), int64."""
        return np.argsort(self.bits(count), kind="stable").astype(np.int64)

    def choice(self, count: int, size: int) -> list[int]:
        """`size` different indices below `count`, ascending."""
        if not 0 <= size <= count:
            raise ValueError(f"cannot draw {size} of {count}")
        return sorted(int(i) for i in self.permutation(count)[:size])

    def generator(self) -> torch.Generator:
        """A torch CPU generator for draws inside one machine (dropout); never for what both sides must share."""
        return torch.Generator().manual_seed(self.seed >> 1)


def root_key(seed: int) -> Key:
    """The key of a whole experiment."""
    return Key(0).fold("coterie", seed)
