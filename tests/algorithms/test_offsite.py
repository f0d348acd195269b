"""Adapters of outer blocks: what they are at the start, their mean, where the last ones begin, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.algorithms.offsite import (
    Bottlenecks,
    Factors,
    Kind,
    block_of_last,
    check_bottlenecks,
    initial_bottlenecks,
    mean_terms,
    of_layers,
)
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import Bottleneck, Card, Federation, Layer, Model, Uploads

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


@pytest.mark.parametrize(("kind", "term"), [(Factors(), "lora"), (Bottlenecks(3), "bottleneck")])
def test_what_a_client_gets_of_a_fresh_adapter_fits_it_has_the_size_that_is_booked_and_no_distance(
    kind: Kind, term: str
) -> None:
    large = replace(ONE, id="b", rank=4)
    few = of_layers(ONE, ("h.0.up", "h.8.up", "elsewhere"))
    fresh = kind.initial(LAYERS, Federation((ONE, large), 1), KEY)
    for card in (few, large):
        held = kind.cut({name: fresh[name] for name in card.layers}, card)
        kind.check(held, card)
        for name, layer in card.layers.items():
            assert sum(value.nbytes for value in held[name].parameters.values()) == kind.size(layer, card)
        stack = kind.distance(held, 0.5).stack([kind.distance(held, 0.5)], 0)
        apart = {name: one.with_parameters({n: v + 1 for n, v in one.parameters.items()}) for name, one in held.items()}
        near, far = (float(stack.value(Model.stack([Model(**{term: part})]))) for part in (held, apart))
        assert near == pytest.approx(0, abs=1e-5) and far > 1


def test_a_mean_of_factors_is_over_those_of_every_rank_and_keeps_what_nobody_sent() -> None:
    kind, large = Factors(), replace(ONE, id="b", rank=4)
    fresh = kind.initial(LAYERS, Federation((ONE, large), 1), KEY)
    few = of_layers(large, [name for name in LAYERS if name != "h.0.up"])
    sent = kind.cut({name: fresh[name] for name in few.layers}, few)
    moved = {name: one.with_parameters({"B": one.parameters["B"] + 1}) for name, one in sent.items()}
    made = kind.mean(fresh, Uploads({"b": (few, moved, 1.0)}))
    assert torch.allclose(made["h.9.up"].parameters["B"], torch.tensor(1.0)) and made["h.0.up"] is fresh["h.0.up"]
