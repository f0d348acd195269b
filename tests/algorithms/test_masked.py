"""Values at a random mask: where they stand, that everybody finds the same places, what is refused."""

from __future__ import annotations

import pytest
import torch
from conformance.harness import LAYERS, cards

from coterie.algorithms.masked import Values, at_mask, check_values
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.wire.codec import size

ONE = cards({"a": 2})[0]
COUNTS = {"first": 10, "second": 12}


def values(start: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: torch.arange(start, start + count) for name, count in COUNTS.items()}


def test_the_change_has_the_values_at_the_places_in_order_and_zero_elsewhere() -> None:
    for name, term in at_mask(values(), LAYERS, root_key(1)).items():
        dense = term.dense()
        assert dense.shape == (LAYERS[name].d_out, LAYERS[name].d_in)
        assert torch.equal(dense[dense != 0], values()[name])


def test_places_are_those_of_the_key_whatever_the_values_and_differ_between_layers() -> None:
    first, again = at_mask(values(), LAYERS, root_key(1)), at_mask(values(5.0), LAYERS, root_key(1))
    other = at_mask(values(), LAYERS, root_key(2))
    for name, term in first.items():
        assert torch.equal(term.places, again[name].places) and not torch.equal(term.places, other[name].places)
    square = {"x": LAYERS["second"], "y": LAYERS["second"]}
    both = at_mask({name: torch.ones(12) for name in square}, square, root_key(1))
    assert not torch.equal(both["x"].places, both["y"].places)


def test_the_values_alone_travel() -> None:
    assert size(Values(values())).payload == 4 * (10 + 12)


def test_other_numbers_of_values_than_the_mask_has_are_refused() -> None:
    check_values(Values(values()), ONE, COUNTS)
    shorter = values() | {"first": torch.ones(9)}
    for odd in (shorter, {"first": values()["first"]}, values() | {"second": torch.ones(12, 1)}):
        with pytest.raises(ModelError, match="client a: an upload must be the values at the mask"):
            check_values(Values(odd), ONE, COUNTS)
