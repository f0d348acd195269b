"""A network's blocks by the names of their layers, and which of them an emulator keeps (FedBiOT)."""

from __future__ import annotations

import re
from collections.abc import Collection

_PLACE = re.compile(r"(?:^|\.)(\d+)(?=\.)")


def block_of(layer: str) -> int | None:
    """The number of the block that a layer belongs to, the first in its name; None for one outside all blocks."""
    found = _PLACE.search(layer)
    return int(found.group(1)) if found else None


def block_name(layer: str) -> str:
    """The name of that block, such as `model.layers.3`; raises ValueError for a layer outside all blocks."""
    found = _PLACE.search(layer)
    if found is None:
        raise ValueError(f"layer {layer} is in no numbered block")
    return layer[: found.end()]


def kept_blocks(count: int, drop: float) -> list[int]:
    """Which of `count` blocks stay when the part `drop` goes: K = round(count (1 - drop)), evenly spread.

    floor(i (count - 1) / (K - 1)) for i = 0 … K - 1 (FedBiOT's code); a single one is the first.

    Raises:
        ValueError: drop outside [0, 1), or nothing would stay.
    """
    if not 0 <= drop < 1:
        raise ValueError(f"drop ({drop:g}) must lie in [0, 1)")
    K = round(count * (1 - drop))
    if count and K < 1:
        raise ValueError(f"drop={drop:g} leaves none of {count} blocks; drop fewer")
    return [0] if K == 1 else [i * (count - 1) // (K - 1) for i in range(K)]


def outer_layers(layers: Collection[str], outer: int) -> set[str]:
    """The layers of the first and last `outer` blocks that have any, and those outside all blocks."""
    numbers = sorted({number for layer in layers if (number := block_of(layer)) is not None})
    ends = set(numbers[:outer]) | set(numbers[len(numbers) - min(outer, len(numbers)) :])
    return {layer for layer in layers if (number := block_of(layer)) is None or number in ends}
