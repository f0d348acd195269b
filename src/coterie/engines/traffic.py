"""What crosses the wire between server and client, booked to the byte; in strict mode it really becomes bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coterie.protocol import Held, Once, copied, map_nodes, message
from coterie.wire.codec import decode, digest, encode, size
from coterie.wire.ledger import Direction, Kind, Ledger

BASE_MODEL = "base model"
"""What stands among the contents that a client holds for the base model that it was sent."""


@message
class Chosen:
    """A payload on its way up, and the head group that its client chose."""

    group: str
    payload: Any


@dataclass(frozen=True)
class Traffic:
    """The messages of one round. `strict` sends everything through bytes; otherwise the other side gets a copy."""

    ledger: Ledger
    round: int
    phase: str
    strict: bool

    def carry(self, client: str, direction: Direction, kind: Kind, content: Any) -> Any:
        """Books a message and returns what the other side receives; None costs nothing."""
        if content is None:
            return None
        self.book(client, direction, kind, content)
        return self.transferred(content)

    def book(self, client: str, direction: Direction, kind: Kind, content: Any) -> None:
        """Books a message that the other side gets by another way than this."""
        amount = size(content)
        self.ledger.add(self.round, self.phase, client, direction, kind, amount.payload, amount.overhead)

    def transferred(self, content: Any) -> Any:
        """The same content as the other side's own: through bytes in strict mode, else a copy."""
        return decode(encode(content)) if self.strict else copied(content)

    def upload(self, client: str, payload: Any, group: str | None) -> tuple[Any, str | None]:
        """What arrives of a client's payload and of its choice of a head group, where it made one."""
        if group is None:
            return self.carry(client, "up", "message", payload), None
        arrived: Chosen = self.carry(client, "up", "message", Chosen(group, payload))
        return arrived.payload, arrived.group

    def pool(self, given: Mapping[str, int]) -> None:
        """Books the examples that clients give to a pool, by their bytes, and what each is sent of the others'."""
        total = sum(given.values())
        for client, amount in sorted(given.items()):
            self.ledger.add(self.round, self.phase, client, "up", "data", amount, 0)
            self.ledger.add(self.round, self.phase, client, "down", "data", total - amount, 0)

    def set_up(self, client: str, amount: int, held: tuple[str, ...]) -> tuple[str, ...]:
        """Books a base model of so many bytes once; returns the contents that the client holds from now on."""
        if not amount or BASE_MODEL in held:
            return held
        self.ledger.add(self.round, self.phase, client, "down", "setup", amount, 0)
        return tuple(sorted({*held, BASE_MODEL}))

    def download(self, client: str, content: Any, held: Iterable[str]) -> tuple[Any, tuple[str, ...]]:
        """What arrives of a download with `Once` parts unwrapped, and the contents the client holds from now on.

        A content the client lacks is booked as set-up; one that it holds is its own copy.
        """
        body, parts = separated(content)
        known = set(held)
        arrived = {
            name: self.transferred(value) if name in known else self.carry(client, "down", "setup", value)
            for name, value in parts.items()
        }
        return joined(self.carry(client, "down", "message", body), arrived), tuple(sorted(known | set(parts)))


def separated(content: Any) -> tuple[Any, dict[str, Any]]:
    """A download with every `Once` replaced by `Held`, and their contents by hash."""
    parts: dict[str, Any] = {}

    def hold(once: Once) -> Held:
        name = digest(once.value)
        parts[name] = once.value
        return Held(name)

    return map_nodes(content, Once, hold), parts


def joined(body: Any, parts: dict[str, Any]) -> Any:
    """The reverse of `separated`, with the contents themselves in place."""
    return map_nodes(body, Held, lambda held: parts[held.content])


def unwrapped(content: Any) -> Any:
    """A download as it arrives, without any traffic."""
    return joined(*separated(content))
