"""What a run consists of, fixed before its first round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from coterie.algorithms import Algorithm
from coterie.data.text import TextSet
from coterie.errors import ConfigError
from coterie.protocol import Card, Federation
from coterie.training.asks import Head

HeadPolicy = Literal["frozen", "averaged", "local"]
WeightPolicy = Literal["paper", "uniform", "examples", "processed"]


@dataclass(frozen=True)
class Site:
    """One simulated site: its card and its data sets by name (`train`, `test`, ...)."""

    card: Card
    data: Mapping[str, TextSet]


@dataclass(frozen=True)
class Fault:
    """A rehearsed failure of one client in one round.

    exception: the site raises. nan, shape: it uploads a NaN or a tensor of the wrong shape. late: its round is
    committed at the site but arrives after the server has moved on.
    """

    client: str
    round: int
    kind: Literal["exception", "nan", "shape", "late"]


@dataclass(frozen=True)
class Measuring:
    """What is measured, and when; the last round is always measured.

    every, clients_every: after how many rounds the pooled test, and every client's own test, are evaluated.
    pooled_limit: how many examples of the pooled test are used before the last round, and for every client's own
    model in the last one (None: all). objective_examples: how many training examples of each client the joint
    objective is evaluated on (0: not at all). mismatch: aggregation and initialisation mismatch (FedPA-LoRA,
    Eqs. 1-2).
    """

    every: int = 1
    clients_every: int = 1
    pooled_limit: int | None = None
    objective_examples: int = 64
    mismatch: bool = True


@dataclass(frozen=True)
class Setting:
    """A run: who, what, how long.

    sample: the number of clients in a round (None: all). head: overridden by a method that knows but one policy.
    """

    algorithm: Algorithm
    sites: Mapping[str, Site]
    rounds: int
    seed: int = 0
    sample: int | None = None
    min_replies: int = 1
    weights: WeightPolicy = "paper"
    head: HeadPolicy = "averaged"
    heads: Mapping[str, Head | None] = field(default_factory=dict)
    server_data: Mapping[str, TextSet] = field(default_factory=dict)
    pooled_test: TextSet | None = None
    measuring: Measuring = Measuring()
    faults: tuple[Fault, ...] = ()
    strict: bool = False

    def __post_init__(self) -> None:
        if "server" in self.sites:
            raise ConfigError("no client may be called 'server'; give it another id (clients.ids)")
        only = self.algorithm.traits.head
        if only is not None:
            object.__setattr__(self, "head", only)

    @property
    def federation(self) -> Federation:
        """The cards in id order."""
        cards = tuple(self.sites[name].card for name in sorted(self.sites))
        return Federation(cards, self.rounds, tuple(sorted(self.server_data)))

    @property
    def server_spec(self) -> str:
        """The base model of the server: that of the first client in id order."""
        return self.federation.cards[0].spec

    def initial_head(self, spec: str) -> Head | None:
        """The head that every party with this base model starts from."""
        return self.heads.get(spec)
