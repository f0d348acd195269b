"""What a run consists of, fixed before its first round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from coterie.algorithms import Algorithm
from coterie.data.sequences import DataSet
from coterie.errors import ConfigError
from coterie.protocol import Card, Federation, Traits
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
    (FedPA-LoRA, Eqs. 1-2), of every layer too with mismatch_layers. untrained: every base model as it is, on the task's
    tests, in the first round (zero-shot).
    """

    every: int = 1
    clients_every: int = 1
    pooled_limit: int | None = None
    objective_examples: int = 64
    mismatch: bool = True
    mismatch_layers: bool = False
    untrained: bool = False


@dataclass(frozen=True)
class OwnTests:
    """The task's pooled test and its further tests by name, as one base model's tokens."""

    pooled: DataSet | None
    more: Mapping[str, DataSet]


@dataclass(frozen=True)
class Setting:
    """A run: who, what, how long.

    sample: the number of clients in a round (None: all). head: unless frozen, overridden by a method that knows but one
    policy; where the server trains on pooled data, `local` means the server's own as `averaged` does.
    more_tests: what the task is tested with beside the pooled test. pooled_of: those of them that together are the
    pooled test, whose scores are then theirs; where it is given and limited, it is scored itself. metrics: names of
    `coterie.data.metrics.METRICS`, the first the one by which models are judged.

    server_base: the spec of the server's base model; None: that of the first client in id order. server_card: what the
    server itself trains, see `Federation`. given: the bytes of the examples that each client gives to a pool, which the
    others are sent before the first round. own_tests: the tests
    in the tokens of base models that have others than the server's, by spec. set_up: bytes of a base model that every
    client with it is sent before its first round, by spec.
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
    pooled_of: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    measuring: Measuring = Measuring()
    faults: tuple[Fault, ...] = ()
    strict: bool = False
    server_base: str | None = None
    server_card: Card | None = None
    given: Mapping[str, int] = field(default_factory=dict)
    own_tests: Mapping[str, OwnTests] = field(default_factory=dict)
    set_up: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "server" in self.sites:
            raise ConfigError("no client may be called 'server'; give it another id (clients.ids)")
        require_bases(self.algorithm.traits, {name: site.card.spec for name, site in self.sites.items()})
        only = self.algorithm.traits.head
        if only is not None and self.head != "frozen":
            object.__setattr__(self, "head", only)
        if self.algorithm.traits.pools_data and self.head == "local":  # no site trains a head to keep
            object.__setattr__(self, "head", "averaged")

    @cached_property
    def federation(self) -> Federation:
        """The cards in id order."""
        cards = tuple(self.sites[name].card for name in sorted(self.sites))
        return Federation(cards, self.rounds, tuple(sorted(self.server_data)), self.server_card)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The clients in id order."""
        return tuple(card.id for card in self.federation.cards)

    @cached_property
    def holders(self) -> dict[str, tuple[str, ...]]:
        """The clients that hold examples in a data set, by its name, in id order: found once, not in each round."""
        held: dict[str, list[str]] = {}
        for name in self.names:
            for part, data in self.sites[name].data.items():
                if len(data):
                    held.setdefault(part, []).append(name)
        return {part: tuple(names) for part, names in held.items()}

    @cached_property
    def server_spec(self) -> str:
        """The base model of the server; see `server_base`."""
        return self.server_base or self.federation.cards[0].spec

    @cached_property
    def specs(self) -> list[str]:
        """All base models in use, the server's among them, sorted."""
        return sorted({card.spec for card in self.federation.cards} | {self.server_spec})

    def head_owner(self, spec: str) -> str:
        """The base model in whose name heads are kept and averaged: the server's own of all that were cut from it."""
        return self.server_spec if self.algorithm.traits.bases == "compressed" else spec

    @cached_property
    def members(self) -> dict[str, tuple[str, ...]]:
        """The clients with each base model, by its spec."""
        cards = self.federation.cards
        return {spec: tuple(card.id for card in cards if card.spec == spec) for spec in sorted({c.spec for c in cards})}

    def tests_of(self, spec: str) -> OwnTests:
        """What a party with this base model is tested with."""
        return self.own_tests.get(spec) or OwnTests(self.pooled_test, self.more_tests)

    def initial_head(self, spec: str) -> Head | None:
        """The head that every party with this base model starts from."""
        return self.heads.get(spec)


def require_bases(traits: Traits, specs: Mapping[str, str]) -> None:
    """Refuse base models that differ where the method has one for all; specs: by client.

    Raises:
        ConfigError: naming two clients whose base models differ.
    """
    first = next(iter(specs), "")
    for name, spec in specs.items():
        if traits.bases == "one" and spec != specs[first]:
            raise ConfigError(
                f"{traits.title} trains one base model, but {first} has {specs[first]!r} and {name} has {spec!r}; give "
                "all clients one, or leave the others out with federation.only=full"
            )
