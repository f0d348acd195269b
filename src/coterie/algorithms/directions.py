"""A global pair of rank r of which every client trains some directions: which, and what becomes of the pair.

Direction j is column j of B with row j of A, in all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.factors import check_adapter, initial_adapter, pair_bytes, rank_of
from coterie.maths.keys import Key
from coterie.protocol import Adapter, Card, Federation, Layer, LowRank, Model, Server, message, weighted_sum


@message
class State:
    """The global pair, the seed of all selections, and the last round's number."""

    lora: Adapter
    key: Key
    round: int

    def selected(self, card: Card) -> list[int]:
        """What this client trains in the next round: as many directions as its rank allows, at random, ascending."""
        rank = rank_of(self.lora)
        return self.key.fold(self.round).fold(card.id).choice(rank, min(card.rank, rank))


@dataclass(frozen=True)
class GlobalPair:
    """The rank of the global pair, and what follows from it for what clients send.

    rank: r, the largest rank of any client unless given; clients of a higher rank train all of it.
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank must be 1 at least, not {self.rank}")

    def width(self, card: Card) -> int:
        """How many directions a client trains."""
        return min(card.rank, self.rank or card.rank)

    def begun(self, federation: Federation, server: Server, purpose: str) -> State:
        """Before the first round; `purpose` names the key of the selections."""
        rank, scale = self.rank or federation.rank, federation.cards[0].scale
        lora = initial_adapter(federation.layers, rank, scale, server.key("init"))
        return State(lora, server.key(purpose), 0)

    def check(self, payload: Any, card: Card) -> None:
        check_adapter(payload, card, rank=self.width(card))

    def global_model(self, state: State) -> Model:
        return Model(lora=state.lora)

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, self.width(card))


def moved_pair(
    term: LowRank, trained: Sequence[tuple[float, Sequence[int], LowRank]], *, among_trainers: bool
) -> LowRank:
    """`moved_rows` of A and of the columns of B, where clients trained some directions each, in their own scales."""
    own = [(weight, chosen, one.rescaled(float(term.scale))) for weight, chosen, one in trained]
    left = [(weight, chosen, one.B) for weight, chosen, one in own]
    right = [(weight, chosen, one.A) for weight, chosen, one in own]
    B = moved_rows(term.B, left, among_trainers=among_trainers, dim=-1)
    return replace(term, B=B, A=moved_rows(term.A, right, among_trainers=among_trainers))


def moved_rows(
    whole: Tensor, trained: Sequence[tuple[float, Sequence[int], Tensor]], *, among_trainers: bool, dim: int = 0
) -> Tensor:
    """A tensor (n, ...) after clients trained some of its rows each; rows that nobody trained stay to the bit.

    trained: a client's weight p_i, the rows that it trained (each once), and their values (rows, ...). Row j moves by
    sum p_i (x_ij - w_j) over those who trained it: who did not counts as a change of zero. With `among_trainers` it
    moves to their own mean, the weights renormalised over them. Summed in fp64, cast back. dim: what stands for rows.
    """
    alike: dict[tuple[int, ...], list[tuple[float, Tensor]]] = {}
    for weight, rows, values in trained:
        alike.setdefault(tuple(rows), []).append((weight, values))
    total = torch.zeros_like(whole, dtype=torch.float64)
    share = torch.zeros(whole.shape[dim], dtype=torch.float64, device=whole.device)
    for rows, held in alike.items():
        index = torch.tensor(rows, dtype=torch.int64, device=whole.device)
        total.index_add_(dim, index, weighted_sum(held, torch.float64))
        share[index] += sum(weight for weight, _ in held)
    shape = [1] * whole.dim()
    shape[dim] = -1
    change = total - share.reshape(shape) * whole.double()
    if among_trainers:
        change /= share.where(share > 0, 1).reshape(shape)
    return (whole.double() + change).to(whole.dtype)
