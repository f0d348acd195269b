"""What methods that move one factor of a common pair at a time share: whose turn it is, and what a client lacks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from coterie.algorithms.factors import Factor, factor_of_pair, kept_factors, with_factor
from coterie.protocol import Adapter, Card, Client, Uploads, message


def factor_in_turn(number: int, first: Factor = "B") -> Factor:
    """The factor that moves in round 1, 2, ...: `first` in odd ones, the other one in even ones."""
    other: Factor = "A" if first == "B" else "B"
    return first if number % 2 == 1 else other


@message
class Turns:
    """In which round each factor last changed, and each client last answered."""

    changed: dict[str, int]
    answered: dict[str, int]

    @classmethod
    def none(cls) -> Turns:
        """Before the first round."""
        return cls({"B": 0, "A": 0}, {})

    def after(self, number: int, factor: Factor, uploads: Uploads) -> Turns:
        """After this factor moved in round `number`, with these who answered."""
        answered = dict.fromkeys((one.card.id for one in uploads), number)
        return Turns(self.changed | {factor: number}, self.answered | answered)

    def seen_by(self, card: Card) -> int:
        """The last round at whose start this client had the pair; who never answered draws that of the first."""
        return self.answered.get(card.id, 1)

    def lacking(self, card: Card) -> list[str]:
        """Which factors changed since then."""
        return [factor for factor, number in self.changed.items() if number >= self.seen_by(card)]


@message
class Changed:
    """The factors that a client lacks, by name and layer; the seed of A: a Once when sent, the Key on arrival."""

    factors: dict[str, dict[str, Tensor]]
    init_key: Any


def lacking_factors(lora: Adapter, turns: Turns, card: Card) -> dict[str, dict[str, Tensor]]:
    """What a client lacks of the global pair, by factor and layer."""
    return {factor: factor_of_pair(lora, factor, card.layers) for factor in turns.lacking(card)}


def current_pair(client: Client, download: Changed) -> Adapter:
    """The global pair: what the client had in its last round, or drew, with what it was sent in its place."""
    pair = kept_factors(client, download.init_key)
    for factor, values in download.factors.items():
        pair = with_factor(pair, factor, values)
    return pair
