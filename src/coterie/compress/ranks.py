"""How many terms a layer keeps at a ratio, the share of its parameters that stays."""

from __future__ import annotations

import math

from coterie.errors import ConfigError, ModelError
from coterie.protocol.parties import Layer


def check_ratio(ratio: float) -> None:
    """Raises ConfigError for a ratio outside (0, 1]."""
    if not 0 < ratio <= 1:
        raise ConfigError(f"ratio {ratio:g} is the share of parameters to keep: it must be above 0 and at most 1")


def rank_of(name: str, layer: Layer, ratio: float, *, remap: bool = False) -> int:
    """k = floor(ratio m n / (m + n)): U (m, k) and V (k, n) hold that share of the layer's m n parameters.

    At ratio 1 too, k is below min(m, n), so that something is lost. remap: k = floor(ratio min(m, n)), which is meant
    for Dobi-SVD's storage of max(m, n) k numbers. Source: FedSLM's specification, L1; Dobi-SVD (arXiv 2502.02723).

    Raises:
        ConfigError: as `check_ratio`.
        ModelError: a rank below 1, with the least ratio that leaves one.
    """
    check_ratio(ratio)
    m, n = layer.d_out, layer.d_in
    whole = min(m, n) if remap else m * n / (m + n)
    k = _floor(ratio * whole)
    if k < 1:
        raise ModelError(
            f"layer {name} ({m} x {n}) would keep a rank below 1 at ratio {ratio:g}; take at least "
            f"{math.ceil(1e4 / whole) / 1e4:g}, or leave the layer out"
        )
    return min(k, m, n)


def rank_by_method(name: str, layer: Layer, share: float, ratio: float, method: str) -> int:
    """As `rank_of`, for the share of this one layer that a method derives from the ratio that was asked for.

    Raises:
        ModelError: a rank below 1, in terms of that ratio.
    """
    m, n = layer.d_out, layer.d_in
    k = _floor(share * m * n / (m + n))
    if k < 1:
        raise ModelError(
            f"layer {name} ({m} x {n}) would keep a rank below 1: at ratio {ratio:g} {method} leaves it {share:.2g} of "
            "its parameters; take a larger ratio, or leave the layer out"
        )
    return min(k, m, n)


def _floor(terms: float) -> int:
    """Rounded down; a product that is an integer on paper counts as one."""
    return math.floor(terms * (1 + 1e-12))


def parameters(layer: Layer, rank: int) -> int:
    """k (m + n)."""
    return rank * (layer.d_out + layer.d_in)
