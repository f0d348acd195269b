"""What travels of a change of factors in FedSRD: up the entries that count most, down a random part; their bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from coterie.algorithms.factors import check_factor, factor_shape
from coterie.errors import ModelError
from coterie.maths.keys import Key
from coterie.maths.sparsify import (
    at_least_quantile,
    kept_count,
    pruning_ratio,
    random_count,
    random_mask,
    same_mass,
)
from coterie.maths.stacking import Factors
from coterie.protocol import Card, Layer, LowRank, Sparse, message
from coterie.protocol.sparse import sparse_bytes


@message
class Deltas:
    """What is kept of a client's dB and dA, by layer."""

    B: dict[str, Sparse]
    A: dict[str, Sparse]

    def added_to(self, start: LowRank, name: str) -> Factors:
        """B + dB_i and A + dA_i of one layer, in fp64."""
        return start.B.double() + self.B[name].dense().double(), start.A.double() + self.A[name].dense().double()


@dataclass(frozen=True)
class Pruning:
    """How much is left out, and what the rest weighs.

    pruning: the share of entries that a client leaves out, and up to `most` more by growth log(kurtosis).
    down_pruning: the share that the server leaves out.
    """

    pruning: float = 0.85
    growth: float = 0.1
    most: float = 0.11
    down_pruning: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.pruning < 1 or not 0 <= self.down_pruning < 1 or self.growth < 0 or self.most < 0:
            raise ValueError(
                f"pruning ({self.pruning:g}) and down_pruning ({self.down_pruning:g}) must lie in [0, 1), growth "
                f"({self.growth:g}) and most ({self.most:g}) must not be negative"
            )
        if self.pruning + self.most > 1:
            raise ValueError(f"pruning + most must not exceed 1, not {self.pruning:g} + {self.most:g}")

    def kept(self, delta: Tensor, importance: Tensor) -> Sparse:
        """The entries that count most, scaled up to the L1 norm of the whole."""
        mask = at_least_quantile(importance, pruning_ratio(importance, self.pruning, self.growth, self.most))
        return Sparse.at(same_mass(delta, mask), mask)

    def drawn(self, step: Tensor, key: Key) -> Sparse:
        """A random part of a step, divided by the share that it is, so that it is the step in the mean."""
        mask = random_mask(tuple(step.shape), self.down_pruning, key)
        return Sparse.at(step * (mask.numel() / int(mask.sum())), mask)

    def bytes_up(self, layer: Layer, card: Card) -> int:
        """Of both deltas, at most."""
        sizes = [math.prod(factor_shape(layer, card.rank, factor)) for factor in ("B", "A")]
        return sum(sparse_bytes(kept_count(size, self.pruning), size) for size in sizes)

    def bytes_down(self, layer: Layer, card: Card) -> int:
        """The mean of a step in B and one in A."""
        return sum(self.step_bytes(layer, card, factor) for factor in ("B", "A")) // 2

    def step_bytes(self, layer: Layer, card: Card, factor: str) -> int:
        """Of what is sent of a step in this factor."""
        entries = math.prod(factor_shape(layer, card.rank, factor))
        return sparse_bytes(random_count(entries, self.down_pruning), entries)


def added(term: LowRank, factor: str, delta: Sparse) -> LowRank:
    """The term with the delta added to one factor; the same to the bit for server and client."""
    return replace(term, **{factor: term.parameters[factor] + delta.dense()})


def check_deltas(payload: Any, card: Card) -> None:
    """Raises ModelError unless the upload is `Deltas` of the client's layers and rank."""
    known = isinstance(payload, Deltas) and isinstance(payload.B, dict) and isinstance(payload.A, dict)
    if not known or not all(isinstance(one, Sparse) for one in (*payload.B.values(), *payload.A.values())):
        raise ModelError(f"client {card.id}: an upload must be one sparse dB and dA for each adapted layer")
    check_factor(payload.B, card, "B")
    check_factor(payload.A, card, "A")
