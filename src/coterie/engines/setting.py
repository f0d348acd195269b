"""What a run consists of, fixed before its first round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from coterie.algorithms import Algorithm
from coterie.data.sequences import DataSet
from coterie.errors import ConfigError
from coterie.protocol import Card, Federation
from coterie.training.asks import Head

HeadPolicy = Literal["frozen", "averaged", "local"]
WeightPolicy = Literal["paper", "uniform", "examples", "processed"]


@dataclass(frozen=True)
class Site:
    """One simulated site: its card and its data sets by name (`train`; `validation` and `test` where it has them)."""

    card: Card
    data: Mapping[str, DataSet]


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

    every, clients_every: after how many rounds the pooled test, and every client's own test, are evaluated. Clients'
    validation shares go with the model that is scored on them: the global one with the pooled test, the sites' own
    with their tests.
    pooled_limit: how many examples of the pooled test (and of each further test) are used before the last round, and
    for every client's own model in the last one (None: all). objective_examples: how many training examples of each
    client the joint objective is evaluated on (0: not at all). mismatch: aggregation and initialisation mismatch
    (FedPA-LoRA, Eqs. 1-2), of every layer too with mismatch_layers.
    """

    every: int = 1
    clients_every: int = 1
    pooled_limit: int | None = None
    objective_examples: int = 64
    mismatch: bool = True
    mismatch_layers: bool = False


@dataclass(frozen=True)
class Setting:
    """A run: who, what, how long.

    sample: the number of clients in a round (None: all). head: unless frozen, overridden by a method that knows but one
    policy; where the server trains on pooled data, `local` means the server's own as `averaged` does.
    more_tests: what the task is tested with beside the pooled test. metrics: names of
    `coterie.data.metrics.METRICS`, the first the one by which models are judged.
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
    server_data: Mapping[str, DataSet] = field(default_factory=dict)
    pooled_test: DataSet | None = None
    more_tests: Mapping[str, DataSet] = field(default_factory=dict)
    metrics: tuple[str, ...] = ("accuracy",)
    measuring: Measuring = Measuring()
    faults: tuple[Fault, ...] = ()
    strict: bool = False

    def __post_init__(self) -> None:
        if "server" in self.sites:
            raise ConfigError("no client may be called 'server'; give it another id (clients.ids)")
        only = self.algorithm.traits.head
        if only is not None and self.head != "frozen":
            object.__setattr__(self, "head", only)
        if self.algorithm.traits.pools_data and self.head == "local":  # no site trains a head to keep
            object.__setattr__(self, "head", "averaged")

    @cached_property
    def federation(self) -> Federation:
        """The cards in id order."""
        cards = tuple(self.sites[name].card for name in sorted(self.sites))
        return Federation(cards, self.rounds, tuple(sorted(self.server_data)))

    @cached_property
    def server_spec(self) -> str:
        """The base model of the server: that of the first client in id order."""
        return self.federation.cards[0].spec

    def initial_head(self, spec: str) -> Head | None:
        """The head that every party with this base model starts from."""
        return self.heads.get(spec)
