"""A method around another one: everything is the inner method's but what a subclass changes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from coterie.algorithms.base import Algorithm, Program
from coterie.protocol import Card, Client, Federation, Layer, Model, Phase, Seen, Server, Traits, Upload, Uploads


@dataclass(frozen=True)
class Wrapped(Algorithm):
    """Hands every call on to `inner`."""

    inner: Algorithm

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # as a method's own, but known only with `inner`
        return self.inner.traits

    def inner_state(self, state: Any) -> Any:
        """The inner method's state within this one's."""
        return state

    def phases(self, rounds: int) -> list[Phase]:
        return self.inner.phases(rounds)

    def start(self, federation: Federation, server: Server) -> Any:
        return self.inner.start(federation, server)

    def send(self, state: Any, card: Card) -> Any:
        return self.inner.send(self.inner_state(state), card)

    def local(self, client: Client, download: Any) -> Upload | Program:
        return self.inner.local(client, download)

    def aggregate(self, state: Any, uploads: Uploads, server: Server) -> Any:
        return self.inner.aggregate(self.inner_state(state), uploads, server)

    def finish(self, state: Any, server: Server) -> Any:
        return self.inner.finish(self.inner_state(state), server)

    def site_model(self, client: Client, download: Any) -> Model:
        return self.inner.site_model(client, download)

    def further_models(self, client: Client, download: Any) -> Mapping[str, Model]:
        return self.inner.further_models(client, download)

    def part_models(self, client: Client, download: Any) -> Mapping[str, Model]:
        return self.inner.part_models(client, download)

    def global_model(self, state: Any) -> Model | None:
        return self.inner.global_model(self.inner_state(state))

    def further_global_models(self, state: Any) -> Mapping[str, Model]:
        return self.inner.further_global_models(self.inner_state(state))

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return self.inner.bytes_up(layer, card)

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return self.inner.bytes_down(layer, card)

    def bytes_of_round(self, layer: Layer, card: Card, number: int, phase: Phase) -> tuple[int, int]:
        return self.inner.bytes_of_round(layer, card, number, phase)

    def bytes_apart(self, card: Card, federation: Federation) -> tuple[int, int]:
        return self.inner.bytes_apart(card, federation)

    def emulation(self) -> tuple[float, int] | None:
        return self.inner.emulation()

    def in_federation(self, federation: Federation) -> Self:
        return replace(self, inner=self.inner.in_federation(federation))

    def check(self, payload: Any, card: Card) -> None:
        self.inner.check(payload, card)

    def head_group(self, state: Any, card: Card) -> str:
        return self.inner.head_group(self.inner_state(state), card)

    def head_choices(self, state: Any, card: Card) -> tuple[str, ...]:
        return self.inner.head_choices(self.inner_state(state), card)

    def measures(self, state: Any, federation: Federation, seen: Mapping[str, Seen]) -> dict[str, float]:
        return self.inner.measures(self.inner_state(state), federation, seen)


def result_through(program: Any, change: Callable[[Any], Any]) -> Any:
    """A program (or a plain result) whose result passes through `change`."""
    if not isinstance(program, Generator):
        return change(program)

    def changed() -> Program:
        return change((yield from program))

    return changed()


def requests_through(program: Any, change: Callable[[Any], Any]) -> Any:
    """A program whose requests pass through `change`, those of a list one by one; a plain result as it is."""
    if not isinstance(program, Generator):
        return program

    def changed() -> Program:
        try:
            wanted = next(program)
            while True:
                asked = [change(one) for one in wanted] if isinstance(wanted, list) else change(wanted)
                try:
                    answer = yield asked
                except Exception as error:  # of the engine; the inner program may know what to do about it
                    wanted = program.throw(error)
                else:
                    wanted = program.send(answer)
        except StopIteration as stop:
            return stop.value
        finally:
            program.close()

    return changed()
