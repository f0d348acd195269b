"""The contract that every federated method meets.

An algorithm object holds hyper-parameters only; all that changes is explicit state, in frozen message dataclasses.
It never touches files, devices, loggers, global random state or the transport, so the same object runs in one
process, on a stack of clients at once, and over a network.

`start`, `local`, `aggregate` and `finish` may be plain functions or generators that yield requests
(`fitted = yield Fit(...)`) and return their result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Self

from coterie.protocol import Card, Client, Federation, Layer, Model, Phase, Seen, Server, Traits, Upload, Uploads

Program = Generator[Any, Any, Any]
"""A generator of requests (or lists of requests); what it returns is the program's result."""

BYTES = 4
"""Bytes of a scalar on the wire, fp32."""


class Algorithm(ABC):
    """One federated method: server and client half."""

    traits: ClassVar[Traits]

    def phases(self, rounds: int) -> list[Phase]:
        """The stretches of a run; `rounds` in a configuration counts the main phase."""
        return [Phase("main", rounds)]

    @abstractmethod
    def start(self, federation: Federation, server: Server) -> Any:
        """=> State: the server's state before the first round."""

    @abstractmethod
    def send(self, state: Any, card: Card) -> Any:
        """The message that this client downloads; None is legal."""

    @abstractmethod
    def local(self, client: Client, download: Any) -> Upload | Program:
        """=> Upload: the client's program of a round. Upload(None) is legal."""

    @abstractmethod
    def aggregate(self, state: Any, uploads: Uploads, server: Server) -> Any:
        """=> State: not called when nobody answered, except in phases with clients="none".

        The values of dicts in payloads may be read from disk when they are asked for, each time anew: take the layers
        one after another, and of each layer all clients, and memory holds no more than that (`factors.each_layer`).
        """

    def finish(self, state: Any, server: Server) -> Any:
        """=> State: after the last round."""
        return state

    @abstractmethod
    def site_model(self, client: Client, download: Any) -> Model:
        """The model that this site uses and is evaluated with; memory is read-only here."""

    def further_models(self, client: Client, download: Any) -> Mapping[str, Model]:
        """Other models of this site worth measuring beside `site_model`, by name; memory is read-only here."""
        return {}

    def part_models(self, client: Client, download: Any) -> Mapping[str, Model]:
        """What this site uses in place of `site_model` for examples of one part of a mixture, by the part's name."""
        return {}

    @abstractmethod
    def global_model(self, state: Any) -> Model | None:
        """The model that the server would deploy, evaluated and exported; None while there is none."""

    def further_global_models(self, state: Any) -> Mapping[str, Model]:
        """Other models of the server worth measuring beside `global_model`, by name; not asked while that is None."""
        return {}

    @abstractmethod
    def bytes_up(self, layer: Layer, card: Card) -> int:
        """Payload bytes of one upload for one adapted layer, by the paper's formula."""

    @abstractmethod
    def bytes_down(self, layer: Layer, card: Card) -> int:
        """Payload bytes of one download for one adapted layer, by the paper's formula, set-up and base apart."""

    def bytes_of_round(self, layer: Layer, card: Card, number: int, phase: Phase) -> tuple[int, int]:
        """Payload bytes (up, down) of round `number`, one of `phase`, for a client that missed none.

        `bytes_up` and `bytes_down`, but for phases in which nothing is uploaded. Overridden where what travels depends
        on the phase (`bytes_up` and `bytes_down` are of the main one) or alternates (they are means over the rounds).
        """
        return self.bytes_up(layer, card) if phase.uploads else 0, self.bytes_down(layer, card)

    def bytes_apart(self, card: Card, federation: Federation) -> tuple[int, int]:
        """Payload bytes (up, down) of a round that belong to no layer, by the paper's formula; none by default."""
        return 0, 0

    def emulation(self) -> tuple[float, int] | None:
        """(drop, outer), where the clients' base model is an emulator of the server's (see `coterie.models.emulator`).

        The part of its middle blocks that it lacks, and the blocks at each end that are not middle ones; None: it is no
        emulator.
        """
        return None

    def in_federation(self, federation: Federation) -> Self:
        """The same method as its byte formulas are to be asked in this federation, on which their sizes may depend."""
        return self

    def check(self, payload: Any, card: Card) -> None:
        """Raises CoterieError for an upload this method cannot use; shapes, ranks, finiteness are checked before."""

    def head_group(self, state: Any, card: Card) -> str:
        """Clients of one group share an averaged head; one group for all unless a method clusters its clients.

        With `head_choices`: the one of them that this client uses before it has chosen.
        """
        return "all"

    def head_choices(self, state: Any, card: Card) -> tuple[str, ...]:
        """The head groups between which this client chooses itself; it is sent the head of each. None by default.

        Its Fit and Evaluate name one of them, and its `Upload.head_group` says which it chose.
        """
        return ()

    def measures(self, state: Any, federation: Federation, seen: Mapping[str, Seen]) -> dict[str, Any]:
        """Figures of the new state worth a curve, by name; `seen` is what simulation knows of those who answered.

        A figure named `regulariser` is added to the clients' mean task loss as the joint objective. A mapping of
        figures is kept with the metrics, and not drawn.
        """
        return {}
