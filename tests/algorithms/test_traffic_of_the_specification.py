"""What travels per layer and round, in figures that stand in the specification and not by a method's own formula."""

from __future__ import annotations

import pytest

from coterie.algorithms import METHODS
from coterie.protocol import Card, Federation, Layer

LAYER = Layer(1024, 1024)
TEN = tuple(Card(f"c{i}", 4, 10, 2.0, {"w": LAYER}) for i in range(10))
BOTH, ONE, ROUTER = 32_768, 16_384, 4096
"""Bytes of B and A, of one factor of rank 4, and of one output of a router on 1024 inputs."""

FIGURES = {
    "fed-plora": (BOTH, BOTH),
    "feddpa-f": (BOTH, BOTH),
    "feddpa-t": (BOTH, BOTH),
    "fedex-lora": (BOTH, BOTH),
    "fedit": (BOTH, BOTH),
    "fedlease": (BOTH + 7 * ROUTER, 4 * BOTH + 7 * ROUTER),
    "fedpa-factors": (BOTH, BOTH),
    "fedpa-lora": (BOTH, BOTH),
    "fedpa-overwritten": (BOTH, BOTH),
    "fedrot-lora": (BOTH, BOTH),
    "fedsa-lora": (ONE, ONE),
    "fedsee": (ONE + BOTH + 24_600, 98_304 + BOTH + 24_600),
    "ffa-lora": (ONE, ONE),
    "flexlora": (BOTH, BOTH),
    "flora": (BOTH, 0),  # and 327 680 bytes as a patch of the base
    "flora-na": (BOTH, BOTH),
    "fslora": (BOTH, BOTH),
    "hetlora": (BOTH, BOTH),
    "ifca": (BOTH, 2 * BOTH),
    "local-only": (0, 0),
    "lora-fair": (BOTH, BOTH),
    "rolora": (ONE, ONE),
    "sefora": (40_960, BOTH),
    "sefora-ho": (40_960, BOTH),
}


@pytest.mark.parametrize("name", FIGURES)
def test_ten_clients_of_rank_4_on_a_layer_of_1024_cost_what_is_printed(name: str) -> None:
    six = tuple(f"public/{task}" for task in range(6))
    asked = METHODS[name]().in_federation(Federation(TEN, 30, six))
    assert (asked.bytes_up(LAYER, TEN[0]), asked.bytes_down(LAYER, TEN[0])) == FIGURES[name]
