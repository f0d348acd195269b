"""SeFoRA-Ho: SeFoRA at equal ranks without updates, and none of its options for ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conformance.harness import Outcome, cards, play, random_training

from coterie.algorithms import SeFoRA, SeFoRAHo
from coterie.errors import ConfigError
from coterie.experiments.methods import algorithm
from coterie.protocol import Card, Layer
from coterie.wire.codec import encode

LAYERS = {"first": Layer(20, 15), "second": Layer(14, 18)}


def test_equal_ranks_without_an_update_are_sefora_ho_to_the_bit() -> None:
    members: list[Card] = cards(dict.fromkeys("abc", 2), layers=LAYERS)
    one: Outcome | None = None
    two: Outcome | None = None
    for number in (1, 2, 3):
        one, two = (
            play(
                method,
                members,
                random_training(number),
                number=number,
                state=last.state if last else None,
                memories=last.memories if last else None,
            )
            for method, last in ((SeFoRA(), one), (SeFoRAHo(), two))
        )
        assert encode(one.state) == encode(two.state)
        assert encode(one.payloads) == encode(two.payloads)
    assert one is not None and two is not None
    assert all(memory["ranks"] == {"first": 2, "second": 2} for memory in one.memories.values())
    assert not any(two.memories.values())


def test_in_a_round_in_which_sefora_updates_ranks_it_does_not() -> None:
    members = cards(dict.fromkeys("abc", 2), layers=LAYERS)
    first = play(SeFoRAHo(), members, random_training(1))
    options = {"state": first.state, "number": 101}
    mine = play(SeFoRAHo(), members, random_training(2), **options)  # type: ignore[arg-type]
    theirs = play(SeFoRA(tau=0.5), members, random_training(2), **options)  # type: ignore[arg-type]
    assert encode(mine.payloads) != encode(theirs.payloads)
    plain = play(SeFoRA(update_every=None), members, random_training(2), **options)  # type: ignore[arg-type]
    assert encode(mine.payloads) == encode(plain.payloads)


def test_what_is_downloaded_is_trained_as_it_is() -> None:
    members, entered = cards({"a": 2, "b": 2}, layers=LAYERS), {}
    first = play(SeFoRAHo(), members, random_training())

    def watch(name: str, model: object) -> object:
        entered[name] = model["lora"]  # type: ignore[index]
        return model

    play(SeFoRAHo(), members, watch, state=first.state, number=2)  # type: ignore[arg-type]
    assert all(encode(lora) == encode(first.state.lora) for lora in entered.values())


def test_clients_of_unequal_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="SeFoRA-Ho needs one rank for all clients, but a has 1 and b has 2"):
        play(SeFoRAHo(), cards({"a": 1, "b": 2}), random_training())


def test_options_for_ranks_that_change_are_not_known() -> None:
    for name in ("update_every", "tau", "per_layer"):
        with pytest.raises(ConfigError, match=name):
            algorithm("sefora-ho", {name: 1})
    assert not SeFoRAHo().updates(101) and SeFoRA().updates(101)


@pytest.mark.parametrize(("r", "k"), [(16, 32), (16, 18), (8, 16), (8, 10), (4, 8), (4, 6), (2, 4)])
def test_the_sizes_of_table_3_are_options(r: int, k: int) -> None:
    assert algorithm("sefora-ho", {"k": k}).sizes(Layer(1024, 1024), r) == (r, k)  # type: ignore[attr-defined]
    card = replace(cards({"a": r})[0], layers=LAYERS)
    assert SeFoRAHo(k=k).bytes_up(Layer(1024, 1024), card) == (r + k) * 1024 * 4
