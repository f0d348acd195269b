"""Adapters of outer blocks: what they are at the start, their mean, where the last ones begin, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.algorithms.offsite import block_of_last, check_bottlenecks, initial_bottlenecks, mean_terms
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import Bottleneck, Card, Layer, Uploads

LAYERS = {f"h.{block}.up": Layer(6, 4) for block in (0, 1, 8, 9)}
KEY = root_key(5)
ONE = Card("a", 2, 10, 1.0, LAYERS)


def filled(value: float) -> dict[str, Bottleneck]:
    start = initial_bottlenecks(LAYERS, 3, KEY)
    return {name: replace(term, down=torch.full_like(term.down, value)) for name, term in start.items()}


def test_bottlenecks_start_as_the_identity_with_up_within_its_bound() -> None:
    for name, term in initial_bottlenecks(LAYERS, 3, KEY).items():
        assert tuple(term.down.shape) == (3, 6) and tuple(term.up.shape) == (6, 3) and term.rank == 3
        assert not term.down.any() and 0 < float(term.up.abs().max()) <= 3**-0.5, name
        assert torch.equal(term.up, initial_bottlenecks(LAYERS, 3, KEY)[name].up)


def test_the_mean_is_weighted_and_over_those_that_have_the_layer() -> None:
    few = {name: term for name, term in filled(5.0).items() if name != "h.0.up"}
    other = replace(ONE, id="b", layers={name: LAYERS[name] for name in few})
    made = mean_terms(filled(0.0), Uploads({"a": (ONE, filled(1.0), 0.25), "b": (other, few, 0.75)}))
    assert torch.allclose(made["h.0.up"].parameters["down"], torch.tensor(1.0))
    assert torch.allclose(made["h.9.up"].parameters["down"], torch.tensor(4.0))


def test_the_last_blocks_begin_after_the_widest_gap() -> None:
    assert block_of_last(filled(0.0)) == "h.8"
    assert block_of_last({f"h.{block}.up": None for block in (0, 3, 4)}) == "h.3"  # type: ignore[dict-item]


def test_uploads_that_are_no_bottlenecks_of_this_client_are_refused() -> None:
    check_bottlenecks(filled(1.0), ONE, 3)
    for payload in ({}, None, {**filled(1.0), "h.0.up": torch.zeros(3)}):
        with pytest.raises(ModelError, match="client a: a bottleneck of 3 for each of 4 layers expected"):
            check_bottlenecks(payload, ONE, 3)
    with pytest.raises(ModelError, match="a bottleneck of 4"):
        check_bottlenecks(filled(1.0), ONE, 4)
