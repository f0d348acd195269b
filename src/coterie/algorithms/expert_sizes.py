"""How many experts a client can hold and train, and what then travels: FedSEE's capacities and byte formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from coterie.algorithms.base import BYTES
from coterie.algorithms.extraction import public_tasks
from coterie.algorithms.factors import factor_bytes, pair_bytes
from coterie.errors import ConfigError
from coterie.protocol import Card, Federation, Layer, Phase


@dataclass(frozen=True)
class Capacity:
    """Experts that a client can hold (U_i) and train (L_i)."""

    inference: int
    training: int


@dataclass(frozen=True)
class ExpertSizes:
    """The options of a method with an expert for each public task that decide what travels, and by how many bytes.

    tasks: the public tasks that get an expert (None: all of which the server has examples). inference, training: U_i
    (None: all M) and L_i of clients whose cards do not say. shared: whether there is a shared adapter.
    """

    tasks: tuple[str, ...] | None = None
    inference: int | None = None
    training: int = 1
    shared: bool = True

    def __post_init__(self) -> None:
        if self.training < 1 or (self.inference is not None and self.inference < 1):
            raise ValueError(
                f"training ({self.training}) and inference ({self.inference}) must be at least 1; leave inference null "
                "for all experts"
            )

    def trainable(self, card: Card) -> int:
        """L_i: the card's, else the method's."""
        return self.training if card.trained_experts is None else card.trained_experts

    def capacity(self, card: Card, experts: int) -> Capacity:
        """A client's U_i and L_i: those of its card, else the method's; without either U_i is all M experts.

        Raises:
            ConfigError: not 1 <= L_i <= U_i <= M.
        """
        chosen = self.inference if card.routed_experts is None else card.routed_experts
        U, L = experts if chosen is None else chosen, self.trainable(card)
        if not 1 <= L <= U <= experts:
            raise ConfigError(
                f"client {card.id}: it would train {L} of the {U} experts that it routes to, of {experts} in all; set "
                "options.training (or clients.trained_experts) to 1 at least, options.inference (or "
                "clients.routed_experts) no lower, and neither above the number of public tasks"
            )
        return Capacity(U, L)

    def in_federation(self, federation: Federation) -> Self:
        """The method with its tasks by name, on whose number M what travels depends."""
        return replace(self, tasks=public_tasks(federation.server_data, self.tasks))

    def bytes_up(self, layer: Layer, card: Card) -> int:
        """L_i blocks and what all share."""
        return self.capacity(card, self._M).training * factor_bytes(layer, card.rank, "B") + self._common(layer, card)

    def bytes_down(self, layer: Layer, card: Card) -> int:
        """U_i blocks and what all share."""
        return self._experts(layer, card) + self._common(layer, card)

    def bytes_of_round(self, layer: Layer, card: Card, number: int, phase: Phase) -> tuple[int, int]:
        """First a pair goes up; in round 2 nobody has trained yet what all share."""
        if phase.name == "init":
            return pair_bytes(layer, card.rank), 0
        return self.bytes_up(layer, card), self.bytes_down(layer, card) if number > 2 else self._experts(layer, card)

    def _experts(self, layer: Layer, card: Card) -> int:
        """U_i blocks B, m r scalars each."""
        return self.capacity(card, self._M).inference * factor_bytes(layer, card.rank, "B")

    def _common(self, layer: Layer, card: Card) -> int:
        """The shared pair, (m + n) r scalars, and the router, M n + M."""
        return (pair_bytes(layer, card.rank) if self.shared else 0) + self._M * (layer.d_in + 1) * BYTES

    @property
    def _M(self) -> int:
        if self.tasks is None:
            raise ConfigError("there are as many experts as public tasks; name them, or ask in_federation")
        return len(self.tasks)
