"""Sparse tensors: back and forth, the shorter way of saying where, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.arrivals import check_arrival, misshapen
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import Card, Sparse
from coterie.protocol.sparse import sparse_bytes
from coterie.wire.codec import decode, encode, size


def sparse(rows: int, columns: int, count: int, seed: int = 0) -> tuple[Sparse, torch.Tensor]:
    """So many Gaussian entries at random places, and the whole tensor."""
    key = root_key(seed)
    mask = torch.zeros(rows * columns, dtype=torch.bool)
    mask[torch.from_numpy(key.permutation(rows * columns)[:count])] = True
    whole = torch.where(mask, key.fold("values").normal((rows * columns,)), 0.0).view(rows, columns)
    return Sparse.at(whole, mask.view(rows, columns)), whole


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), share=st.floats(0, 1), seed=st.integers(0, 20))
def test_nothing_is_lost_on_the_way_and_the_bytes_are_those_of_the_formula(
    rows: int, columns: int, share: float, seed: int
) -> None:
    count = round(share * rows * columns)
    one, whole = sparse(rows, columns, count, seed)
    arrived = decode(encode(one))
    arrived.check("here")
    assert torch.equal(arrived.dense(), whole) and int(arrived.mask.sum()) == count
    assert torch.equal(arrived.positions, arrived.mask.flatten().nonzero().flatten())
    assert size(one).payload == sparse_bytes(count, rows * columns)


def test_few_places_are_listed_and_many_are_bits() -> None:
    few, many = sparse(100, 100, 312)[0], sparse(100, 100, 313)[0]
    assert few.places.dtype == torch.int32 and size(few).payload == 312 * 8
    assert many.places.dtype == torch.uint8 and size(many).payload == 313 * 4 + 1250


def test_a_zero_at_a_place_travels_too() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    one = Sparse.at(torch.tensor([[0.0, 9.0], [2.0, 0.0]]), mask)
    assert one.values.tolist() == [0.0, 2.0, 0.0] and torch.equal(one.mask, mask)
    assert one.dense().tolist() == [[0.0, 0.0], [2.0, 0.0]]


def test_what_does_not_fit_together_is_refused_on_arrival_with_its_place() -> None:
    card = Card("a", 2, 1, 1.0, {})
    listed, bits = sparse(100, 100, 3)[0], sparse(10, 10, 50)[0]
    odd = [
        (replace(listed, places=listed.places.flip(0)), "rise"),
        (replace(listed, places=listed.places + 10_000), "rise and lie below 10000"),
        (replace(listed, places=listed.places.long()), "int64"),
        (replace(listed, values=listed.values[:-1]), "do not make a sparse"),
        (replace(bits, values=bits.values[:-1]), "49 values at 50 places"),
        (replace(bits, shape=(10, 11)), "do not make a sparse"),
        (misshapen(bits), "client a, B.first: "),
        (replace(bits, values=bits.values * float("nan")), "not finite"),
    ]
    for one, reason in odd:
        with pytest.raises(ModelError, match=reason):
            check_arrival({"B": {"first": one}}, card)
    check_arrival({"B": {"first": bits, "second": listed}}, card)
