"""How many experts a FedSEE client trains and uses, and the bytes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conformance.harness import cards

from coterie.algorithms import FedSEE
from coterie.algorithms.expert_sizes import Capacity, ExpertSizes
from coterie.errors import ConfigError
from coterie.protocol import (
    Card,
    Federation,
    Layer,
    Phase,
)


def test_a_cards_capacities_come_before_the_methods() -> None:
    card = cards({"a": 2})[0]
    method, wide = ExpertSizes(), ExpertSizes(inference=4, training=2)
    assert method.capacity(card, 6) == Capacity(6, 1) and wide.capacity(card, 6) == Capacity(4, 2)
    assert replace(wide, training=1).capacity(replace(card, routed_experts=3, trained_experts=2), 6) == Capacity(3, 2)
    for U, L, M in ((2, 3, 6), (None, 3, 2), (7, 1, 6)):
        with pytest.raises(ConfigError, match=r"^client a: it would train . of the . experts"):
            ExpertSizes(inference=U, training=L).capacity(card, M)
    for none in (replace(card, routed_experts=0), replace(card, trained_experts=0)):
        with pytest.raises(ConfigError, match=r"^client a: it would train . of the . experts"):
            wide.capacity(none, 6)


def test_bytes_are_those_of_the_specification() -> None:
    """m = n = 1024, r = 4, M = 6, L = 1: 16 384 + 32 768 + 24 600 up, 98 304 + 32 768 + 24 600 down."""
    layer, card = Layer(1024, 1024), Card("a", 4, 10, 2.0, {"w": Layer(1024, 1024)})
    tasks = tuple(f"public/{m}" for m in range(6))
    one = FedSEE().in_federation(Federation((card,), 10, tasks))
    assert one.bytes_up(layer, card) == 16_384 + 32_768 + 24_600
    assert one.bytes_down(layer, card) == 98_304 + 32_768 + 24_600
    main, init = Phase("main", 10), Phase("init", 1)
    assert one.bytes_of_round(layer, card, 1, init) == (32_768, 0)
    assert one.bytes_of_round(layer, card, 2, main) == (one.bytes_up(layer, card), 98_304)
    assert one.bytes_of_round(layer, card, 3, main) == (one.bytes_up(layer, card), one.bytes_down(layer, card))
    assert replace(one, training=6).bytes_up(layer, card) == one.bytes_down(layer, card)
    assert replace(one, shared=False).bytes_up(layer, card) == 16_384 + 24_600
    assert replace(one, shared=False).bytes_down(layer, card) == 98_304 + 24_600
    with pytest.raises(ConfigError, match="in_federation"):
        FedSEE().bytes_up(layer, card)
