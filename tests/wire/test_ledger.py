"""The ledger of what travelled."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.wire.codec import Size, decode, encode
from coterie.wire.ledger import DIRECTIONS, KINDS, Ledger, to_jsonl

Entry = tuple[int, str, str, Any, Any, int, int]

entries = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.sampled_from(["main", "warm-up"]),
        st.sampled_from(["a", "b", "site-3"]),
        st.sampled_from(DIRECTIONS),
        st.sampled_from(KINDS),
        st.integers(0, 10**12),
        st.integers(0, 10**4),
    ),
    max_size=20,
)


def booked(listed: list[Entry]) -> Ledger:
    ledger = Ledger()
    for entry in listed:
        ledger.add(*entry)
    return ledger


@given(entries, st.integers(0, 20))
def test_totals_are_sums_over_all_rows_whatever_was_drained(listed: list[Entry], drained_at: int) -> None:
    ledger = booked(listed[:drained_at])
    rows = ledger.drain()
    for entry in listed[drained_at:]:
        ledger.add(*entry)
    rows += ledger.drain()
    assert ledger.rows() == [] and len(rows) == len(listed)
    payload: Counter[Any] = Counter()
    overhead: Counter[Any] = Counter()
    for row in rows:
        what = (row["kind"], row["direction"])
        for scope in ("all", row["client"], row["round"]):
            payload[scope, what] += row["payload"]
            overhead[scope, what] += row["overhead"]
    for scope, totals in [
        ("all", ledger.totals()),
        *ledger.per_client().items(),
        *ledger.per_round().items(),
    ]:
        for what, amount in totals.items():
            assert amount == Size(payload.pop((scope, what)), overhead.pop((scope, what)))
    assert not payload and not overhead


@given(entries, entries)
def test_a_ledger_restored_from_its_state_goes_on_as_if_never_stopped(before: list[Entry], after: list[Entry]) -> None:
    kept, stopped = booked(before), booked(before)
    restored = [
        Ledger.from_state(json.loads(json.dumps(stopped.state()))),
        Ledger.from_state(stopped.state()),
    ]
    restored.append(Ledger.from_state(decode(encode(stopped.state()))))
    for ledger in (kept, *restored):
        for entry in after:
            ledger.add(*entry)
    assert all(ledger.state() == kept.state() and ledger.totals() == kept.totals() for ledger in restored)


@given(entries, entries)
def test_the_text_of_a_ledger_is_its_state_whenever_it_was_written_before(
    before: list[Entry], after: list[Entry]
) -> None:
    ledger = booked(before)
    assert json.loads(ledger.state_text()) == json.loads(json.dumps(ledger.state()))
    for entry in after:
        ledger.add(*entry)
    assert json.loads(ledger.state_text()) == json.loads(json.dumps(ledger.state()))
    assert ledger.state_text() == Ledger.from_state(json.loads(ledger.state_text())).state_text()


def test_a_row_says_who_what_when_and_how_much() -> None:
    ledger = booked([(3, "main", "a", "up", "message", 100, 7)])
    assert ledger.rows() == ledger.drain()
    ledger.add(3, "main", "b", "down", "head", 5, 1)
    (line,) = to_jsonl(ledger.drain()).splitlines()
    assert json.loads(line) == {
        "round": 3,
        "phase": "main",
        "client": "b",
        "direction": "down",
        "kind": "head",
        "payload": 5,
        "overhead": 1,
    }
    assert to_jsonl([]) == "" and to_jsonl([{"a": 1}, {"a": 2}]) == '{"a":1}\n{"a":2}\n'


def test_totals_of_a_round_and_a_client() -> None:
    ledger = booked(
        [
            (1, "main", "a", "up", "message", 100, 7),
            (1, "main", "b", "up", "message", 50, 7),
            (1, "main", "b", "down", "base", 9, 1),
            (2, "main", "b", "up", "message", 1, 1),
        ]
    )
    assert ledger.round_totals(1) == {
        "base": {"down": {"payload": 9, "overhead": 1}},
        "message": {"up": {"payload": 150, "overhead": 14}},
    }
    assert ledger.round_totals(9) == {} and ledger.client_totals("nobody") == {}
    assert ledger.client_totals("b") == {("message", "up"): Size(51, 8), ("base", "down"): Size(9, 1)}
    assert ledger.totals()["message", "up"].total == 151 + 15
    assert list(ledger.per_client()) == ["a", "b"] and list(ledger.per_round()) == [1, 2]


def test_memory_does_not_grow_with_drained_messages() -> None:
    ledger = Ledger()

    def a_round(number: int) -> int:
        for _ in range(200):
            ledger.add(1, "main", "a", "up", "message", 10, 1)
        ledger.drain()
        return len(json.dumps(ledger.state()))

    assert a_round(1) == pytest.approx(max(a_round(n) for n in range(2, 6)), abs=10)
    assert ledger.totals()["message", "up"] == Size(10_000, 1000)


def test_unknown_kinds_directions_and_negative_bytes_are_refused() -> None:
    ledger = Ledger()
    for wrong in (("sideways", "message", 1, 1), ("up", "gossip", 1, 1), ("up", "message", -1, 1)):
        with pytest.raises(ValueError, match=r"ledger knows|negative"):
            ledger.add(1, "main", "a", *wrong)  # type: ignore[arg-type]
    assert ledger.rows() == [] and ledger.totals() == {} and ledger.per_client() == {}


def test_callers_cannot_change_the_books() -> None:
    ledger = booked([(1, "main", "a", "up", "message", 100, 7)])
    ledger.rows()[0]["payload"] = 0
    ledger.totals().clear()
    ledger.per_client()["a"].clear()
    assert ledger.drain()[0]["payload"] == 100 and ledger.client_totals("a") == ledger.totals() != {}
