"""Ranks by layer from spectra, under a byte budget for every client, nested between clients.

The paper says of Theorem 3 that residuals known before training enable this, and leaves it to future work. What is
minimised is the truncation loss sum over layers of sum_{k > r} lambda_k^2, the square of delta for all layers together;
spectra of whitened weights make it the loss in outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

BYTES = 4
"""Bytes of a scalar, fp32."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A layer (d_out, d_in) by its singular values (q,), descending; ranks go no further than q."""

    values: Tensor
    d_out: int
    d_in: int

    @property
    def bytes_per_rank(self) -> int:
        """Of a column of U and a row of V."""
        return (self.d_out + self.d_in) * BYTES

    def rank_at(self, ratio: float) -> int:
        """floor(ratio m n / (m + n)), at least 1 and at most q: the rank that keeps this share of the parameters."""
        whole = self.d_out * self.d_in / (self.d_out + self.d_in)
        rank = math.floor(ratio * whole * (1 + 1e-12))  # a product that is an integer on paper counts as one
        return max(1, min(rank, len(self.values)))


@dataclass(frozen=True)
class Allocation:
    """A client's ranks by layer, their bytes, the truncation loss, and what no ranks within the budget go below."""

    ranks: dict[str, int]
    bytes: int
    loss: float
    least: float


def allocate(layers: Mapping[str, Spectrum], budgets: Mapping[str, int]) -> dict[str, Allocation]:
    """Ranks of every client: the rank-one terms of all layers by gain per byte, as long as the budget lasts.

    Every layer keeps one term at least, and beyond it none without a gain. Within a layer terms cost the same and gains
    fall, so the list never asks for a term before its predecessors. A client takes the terms from the front that fit,
    those behind one that is too large too, but none that a client of a larger budget lacks. So ranks are nested:
    r_l(small) <= r_l(large) in every layer.

    Where all layers cost the same a term, no ranks have a smaller loss, nested or not; nor do they, whatever the costs,
    where the budget ends exactly at a term of the list. Otherwise it is a knapsack and `least`, which takes the last
    term in part, says how far from the best it can be: less than one term's gain.

    Args:
        layers: spectra by name. budgets: bytes by client, of the factors of all layers.

    Returns:
        Allocations by client, in the order of `budgets`.

    Raises:
        ValueError: a spectrum that is not descending and non-negative, or a budget below rank 1 in every layer.
    """
    for name, layer in layers.items():
        values = layer.values
        if len(values) == 0 or not bool(values.isfinite().all() and (values >= 0).all() and (values.diff() <= 0).all()):
            raise ValueError(f"layer {name}: singular values must be there, finite, descending and not negative")
    first = sum(layer.bytes_per_rank for layer in layers.values())
    for client, budget in budgets.items():
        if budget < first:
            raise ValueError(f"client {client}: {budget} bytes are below rank 1 in every layer, {first} bytes")
    terms = _terms(layers)
    limits = {name: len(layer.values) for name, layer in layers.items()}
    found: dict[str, Allocation] = {}
    for client in sorted(budgets, key=lambda name: -budgets[name]):
        found[client] = _allocate(layers, terms, limits, budgets[client])
        limits = found[client].ranks
    return {client: found[client] for client in budgets}


def at_ratio(layers: Mapping[str, Spectrum], ratio: float) -> Allocation:
    """The paper's choice, one ratio for all layers, to be compared at its own bytes."""
    ranks = {name: layer.rank_at(ratio) for name, layer in layers.items()}
    size = sum(ranks[name] * layer.bytes_per_rank for name, layer in layers.items())
    return Allocation(ranks, size, truncation_loss(layers, ranks), _least(layers, _terms(layers), size))


def truncation_loss(layers: Mapping[str, Spectrum], ranks: Mapping[str, int]) -> float:
    """Sum over layers of the squared singular values beyond the rank."""
    return math.fsum(float(layer.values[ranks[name] :].double().square().sum()) for name, layer in layers.items())


@dataclass(frozen=True)
class _Term:
    layer: str
    gain: float
    bytes: int


def _terms(layers: Mapping[str, Spectrum]) -> list[_Term]:
    """Rank-one terms with a gain beyond the first of each layer, by gain per byte; equals by layer and rank."""
    terms = [
        _Term(name, gain, layer.bytes_per_rank)
        for name, layer in layers.items()
        for gain in layer.values[1:].double().square().tolist()
        if gain > 0
    ]
    return sorted(terms, key=lambda term: -term.gain / term.bytes)


def _allocate(layers: Mapping[str, Spectrum], terms: list[_Term], limits: Mapping[str, int], budget: int) -> Allocation:
    ranks = dict.fromkeys(layers, 1)
    left = budget - sum(layer.bytes_per_rank for layer in layers.values())
    for term in terms:
        if term.bytes <= left and ranks[term.layer] < limits[term.layer]:
            ranks[term.layer] += 1
            left -= term.bytes
    return Allocation(ranks, budget - left, truncation_loss(layers, ranks), _least(layers, terms, budget))


def _least(layers: Mapping[str, Spectrum], terms: list[_Term], budget: int) -> float:
    """The loss of taking terms from the front until the budget ends, the last one in part: no ranks go below it."""
    loss = truncation_loss(layers, dict.fromkeys(layers, 1))
    left = float(budget - sum(layer.bytes_per_rank for layer in layers.values()))
    gains = []
    for term in terms:
        part = min(1.0, left / term.bytes)
        gains.append(part * term.gain)
        left -= part * term.bytes
        if part < 1:
            break
    return max(0.0, loss - math.fsum(gains))
