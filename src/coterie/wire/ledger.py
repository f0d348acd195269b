"""The ledger of what travelled: rows of the rounds under way, and totals of the whole run, in bytes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from coterie.wire.codec import Size

Kind = Literal["message", "base", "head", "setup", "data", "evaluation"]
"""`data` are clients' own examples, which leave them as they are."""
Direction = Literal["up", "down"]
Totals = dict[tuple[Kind, Direction], Size]
"""Bytes by (kind, direction); what never travelled has no entry."""

KINDS: tuple[str, ...] = get_args(Kind)
DIRECTIONS: tuple[str, ...] = get_args(Direction)


class Ledger:
    """Books messages. Rows wait until `drain`; totals (whole run, per client, per round) are kept throughout.

    Memory grows with clients, rounds and undrained rows, never with the number of messages booked.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._all: Totals = {}
        self._clients: defaultdict[str, Totals] = defaultdict(dict)
        self._rounds: defaultdict[int, Totals] = defaultdict(dict)
        self._written: dict[str, str] = {}  # clients as in `state_text`, until they are booked again

    def add(
        self,
        round: int,
        phase: str,
        client: str,
        direction: Direction,
        kind: Kind,
        payload: int,
        overhead: int,
    ) -> None:
        """Books a message of `payload` + `overhead` bytes; ValueError for an unknown kind or direction."""
        if kind not in KINDS or direction not in DIRECTIONS:
            raise ValueError(f"a ledger knows {KINDS} and {DIRECTIONS}, not {kind!r} {direction!r}")
        if payload < 0 or overhead < 0:
            raise ValueError(f"bytes cannot be negative: payload {payload}, overhead {overhead}")
        self._rows.append(
            {
                "round": round,
                "phase": phase,
                "client": client,
                "direction": direction,
                "kind": kind,
                "payload": payload,
                "overhead": overhead,
            }
        )
        self._written.pop(client, None)
        for totals in (self._all, self._clients[client], self._rounds[round]):
            totals[kind, direction] = totals.get((kind, direction), Size(0, 0)) + Size(payload, overhead)

    def rows(self) -> list[dict[str, Any]]:
        """The rows booked since the last `drain`, in order of booking."""
        return [dict(row) for row in self._rows]

    def drain(self) -> list[dict[str, Any]]:
        """Those rows, which are then no longer held here; totals stay."""
        rows, self._rows = self._rows, []
        return rows

    def totals(self) -> Totals:
        """Bytes of the whole run."""
        return dict(self._all)

    def client_totals(self, client: str) -> Totals:
        """Bytes from and to one client; nothing for one that is unknown."""
        return dict(self._clients.get(client, {}))

    def per_client(self) -> dict[str, Totals]:
        """Bytes from and to each client, in id order."""
        return {client: dict(self._clients[client]) for client in sorted(self._clients)}

    def per_round(self) -> dict[int, Totals]:
        """Bytes of each round, ascending."""
        return {number: dict(self._rounds[number]) for number in sorted(self._rounds)}

    def round_totals(self, round: int) -> dict[str, dict[str, dict[str, int]]]:
        """Bytes of one round for a metrics row: {kind: {direction: {"payload": ..., "overhead": ...}}}."""
        nested: dict[str, dict[str, dict[str, int]]] = {}
        for (kind, direction), amount in sorted(self._rounds.get(round, {}).items()):
            nested.setdefault(kind, {})[direction] = {"payload": amount.payload, "overhead": amount.overhead}
        return nested

    def state(self) -> dict[str, Any]:
        """All of it as JSON-able data, undrained rows too, for a checkpoint."""
        return {
            "rows": self.rows(),
            "all": _listed(self._all),
            "clients": [[client, _listed(totals)] for client, totals in self.per_client().items()],
            "rounds": [[number, _listed(totals)] for number, totals in self.per_round().items()],
        }

    def state_text(self) -> str:
        """`state` as JSON, of which only clients that were booked since the last time are written anew."""
        for client, totals in self._clients.items():
            if client not in self._written:
                self._written[client] = json.dumps([client, _listed(totals)], separators=(",", ":"))
        clients = ",".join(self._written[client] for client in sorted(self._clients))
        others = {
            "rows": self._rows,
            "all": _listed(self._all),
            "rounds": [[number, _listed(totals)] for number, totals in self.per_round().items()],
        }
        return f'{json.dumps(others, separators=(",", ":"))[:-1]},"clients":[{clients}]}}'

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ledger:
        """The ledger as it was when `state` was called."""
        made = cls()
        made._rows = [dict(row) for row in state["rows"]]
        made._all = _mapped(state["all"])
        made._clients.update({client: _mapped(totals) for client, totals in state["clients"]})
        made._rounds.update({number: _mapped(totals) for number, totals in state["rounds"]})
        return made


def to_jsonl(rows: Iterable[Mapping[str, Any]]) -> str:
    """One JSON object a line, each line ended, keys in their own order."""
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def _listed(totals: Totals) -> list[list[Any]]:
    return [[kind, direction, size.payload, size.overhead] for (kind, direction), size in sorted(totals.items())]


def _mapped(listed: Iterable[Iterable[Any]]) -> Totals:
    return {(kind, direction): Size(payload, overhead) for kind, direction, payload, overhead in listed}
