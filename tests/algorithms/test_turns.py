"""Factors that move in turns: whose turn it is, what a client lacks, and how it comes up to date."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from algorithms.fixtures import card, t1, uploads
from coterie.algorithms.factors import initial_factors
from coterie.algorithms.turns import Changed, Turns, current_pair, factor_in_turn, lacking_factors
from coterie.maths.keys import root_key
from coterie.protocol import Client, LowRank, Memory, copied
from coterie.wire.codec import decode, encode

ONE, TWO = card("1", 1), card("2", 1)


def client(memory: dict[str, Any]) -> Client:
    return Client(ONE, Memory(memory, copied), (), root_key(0).fold, 3, "main")


def answered(*names: str) -> Any:
    return uploads({name: t1()[name] for name in names})


def test_the_first_factor_moves_in_odd_rounds_and_the_other_one_in_even_ones() -> None:
    assert [factor_in_turn(number) for number in (1, 2, 3, 4)] == ["B", "A", "B", "A"]
    assert [factor_in_turn(number, "A") for number in (1, 2, 3, 4)] == ["A", "B", "A", "B"]


def test_before_the_first_round_nobody_lacks_anything_since_all_draw_the_same() -> None:
    assert Turns.none().lacking(ONE) == []


def test_who_answered_lacks_what_that_round_moved_and_who_missed_rounds_lacks_both() -> None:
    first = Turns.none().after(1, "B", answered("1", "2"))
    assert first.lacking(ONE) == ["B"] and first.lacking(TWO) == ["B"]
    second = first.after(2, "A", answered("1"))
    assert second.lacking(ONE) == ["A"] and set(second.lacking(TWO)) == {"B", "A"}
    assert set(second.lacking(card("9", 1))) == {"B", "A"}  # it never took part
    third = second.after(3, "B", answered("2"))
    assert set(third.lacking(ONE)) == {"B", "A"} and third.lacking(TWO) == ["B"]


def test_a_round_leaves_the_turns_before_it_as_they_were() -> None:
    before = Turns.none()
    after = before.after(1, "B", answered("1"))
    assert before.changed == {"B": 0, "A": 0} and before.answered == {}
    assert decode(encode(after)) is not after and encode(decode(encode(after))) == encode(after)


def test_only_what_is_lacking_is_sent_and_only_of_the_clients_layers() -> None:
    lora = {"w": t1()["1"], "other": t1()["2"]}
    turns = Turns.none().after(1, "B", answered("1"))
    sent = lacking_factors(lora, turns, ONE)
    assert list(sent) == ["B"] and list(sent["B"]) == ["w"] and torch.equal(sent["B"]["w"], lora["w"].B)


def test_a_client_has_what_it_drew_or_kept_with_what_it_was_sent_in_its_place() -> None:
    key = root_key(5)
    drawn = current_pair(client({}), Changed({}, key))["w"]
    assert torch.equal(drawn.A, initial_factors(ONE, key)["w"].A) and not drawn.B.any()
    kept: LowRank = replace(t1()["1"], A=torch.full((1, 2), 7.0).double())
    moved = torch.full((2, 1), 3.0).double()
    found = current_pair(client({"factors": {"w": kept}}), Changed({"B": {"w": moved}}, key))["w"]
    assert torch.equal(found.B, moved) and torch.equal(found.A, kept.A)
