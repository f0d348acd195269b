"""Sketches as messages: their sizes, both halves of them, matrices that layers share, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.random_factors import bounded, pair

from algorithms.fixtures import T1_WEIGHTS, t1, t2
from coterie.algorithms.sketches import (
    Sketch,
    SketchSizes,
    check_sketches,
    matrices_for,
    mean_sketches,
    sketch_bytes,
    sketched,
)
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.maths.sketch import unsketch
from coterie.protocol import Card, Layer, LowRank, Uploads
from coterie.protocol.messages import Uploaded
from coterie.wire.codec import size

KEY = root_key(1)
LAYERS = {"first": Layer(20, 15), "second": Layer(14, 18), "third": Layer(20, 15)}


def card(name: str, rank: int, layers: dict[str, Layer] = LAYERS) -> Card:
    return Card(name, rank, 1, 1.0, layers)


def lora(seed: int, rank: int) -> dict[str, LowRank]:
    return {
        name: LowRank(*pair(seed + i, layer.d_out, rank, layer.d_in)) for i, (name, layer) in enumerate(LAYERS.items())
    }


def rebuilt(terms: dict[str, LowRank], weights: dict[str, float], s: int, k: int) -> torch.Tensor:
    """The mean product of these factors as it comes out of averaged sketches."""
    layers = {"w": Layer(terms["1"].B.shape[0], terms["1"].A.shape[1])}
    entries = [
        Uploaded(
            one := card(name, term.rank, layers),
            sketched({"w": term}, one, KEY, lambda _: (s, k)),
            weights[name],
        )
        for name, term in terms.items()
    ]
    Y, Z, matrices = mean_sketches(Uploads(entries), layers, KEY, lambda _: (s, k))["w"]
    B, A = unsketch(Y, Z, matrices.Psi)
    return B @ A


def test_t1_and_t2_come_back_exactly_since_two_columns_hold_them() -> None:
    whole = rebuilt(t1(), T1_WEIGHTS, 2, 4)
    torch.testing.assert_close(whole, torch.diag(torch.tensor([0.75, 0.25]).double()), rtol=0, atol=1e-10)
    mixed = rebuilt(t2(), {"1": 0.5, "2": 0.5}, 2, 4)
    torch.testing.assert_close(mixed, torch.diag(torch.tensor([2.0, 0.0]).double()), rtol=0, atol=1e-10)


@bounded
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 999))
def test_the_mean_of_sketches_is_the_sketch_of_the_mean_product_whatever_the_ranks(ranks: list[int], seed: int) -> None:
    sent, products = [], {name: torch.zeros(layer.d_out, layer.d_in).double() for name, layer in LAYERS.items()}
    for i, rank in enumerate(ranks):
        one, adapter = card(str(i), rank), lora(seed + 10 * i, rank)
        sent.append(Uploaded(one, sketched(adapter, one, KEY, lambda _: (3, 5)), 1.0))
        for name, term in adapter.items():
            products[name] += term.product() / len(ranks)
    for name, (Y, Z, (Omega, Psi)) in mean_sketches(Uploads(sent), LAYERS, KEY, lambda _: (3, 5)).items():
        torch.testing.assert_close(Y, products[name] @ Omega.double(), rtol=0, atol=1e-9)
        torch.testing.assert_close(Z, Psi.double() @ products[name], rtol=0, atol=1e-9)


def test_the_unscaled_product_is_sketched() -> None:
    one, adapter = card("a", 2), lora(1, 2)
    scaled = {name: replace(term, scale=7.0) for name, term in adapter.items()}
    for name, plain in sketched(adapter, one, KEY, lambda _: (3, 5)).items():
        assert torch.equal(plain.Y, sketched(scaled, one, KEY, lambda _: (3, 5))[name].Y)


def test_layers_of_one_shape_and_size_share_their_matrices() -> None:
    found = matrices_for(LAYERS, KEY, lambda _: (3, 5))
    assert found["first"] is found["third"]
    assert found["second"].Omega.shape == (18, 3) and found["second"].Psi.shape == (5, 14)
    wider = matrices_for(LAYERS, KEY, lambda layer: (4 if layer.d_out == 20 else 3, 5))
    assert torch.equal(wider["first"].Omega[:, :3], found["first"].Omega)
    assert torch.equal(wider["second"].Omega, found["second"].Omega)


def test_a_layer_that_only_some_have_is_averaged_over_those() -> None:
    small = {"first": LAYERS["first"]}
    one, two = card("a", 2), card("b", 2, small)
    first, second = lora(1, 2), {"first": lora(9, 2)["first"]}
    sent = [
        Uploaded(one, sketched(first, one, KEY, lambda _: (3, 5)), 0.25),
        Uploaded(two, sketched(second, two, KEY, lambda _: (3, 5)), 0.75),
    ]
    found = mean_sketches(Uploads(sent), LAYERS, KEY, lambda _: (3, 5))
    Omega = found["first"][2].Omega.double()
    mixed = 0.25 * first["first"].product() + 0.75 * second["first"].product()
    torch.testing.assert_close(found["first"][0], mixed @ Omega, rtol=0, atol=1e-10)
    alone = first["second"].product() @ found["second"][2].Omega.double()
    torch.testing.assert_close(found["second"][0], alone, rtol=0, atol=1e-10)


def test_sizes_are_bounded_by_the_layer_and_k_follows_the_columns() -> None:
    assert SketchSizes().sizes(Layer(20, 15), 4) == (4, 6)
    assert SketchSizes(k=9).sizes(Layer(3, 15), 4) == (3, 9)
    for r, k in ((4, 5), (16, 17)):
        with pytest.raises(ValueError, match=f"k must be above {k} for rank {r}, not {k}"):
            SketchSizes(k=k).sizes(Layer(20, 20), r)
    assert SketchSizes(k=6).rows(4) == 6


def test_a_real_sketch_is_as_long_as_the_formula_says() -> None:
    one, method = card("a", 2), SketchSizes()
    sent = sketched(
        {n: LowRank(t.B.float(), t.A.float()) for n, t in lora(1, 2).items()},
        one,
        KEY,
        lambda layer: method.sizes(layer, 2),
    )
    assert size(sent).payload == sum(sketch_bytes(layer, lambda one: method.sizes(one, 2)) for layer in LAYERS.values())


def test_sketches_that_do_not_fit_are_told_with_client_and_layer() -> None:
    one = card("a", 2)
    good = sketched(lora(1, 2), one, KEY, lambda _: (3, 5))
    check_sketches(good, one)
    with pytest.raises(ModelError, match=r"client a, layer first: Y \(20, 3\) and Z \(5, 14\)"):
        check_sketches(good | {"first": Sketch(good["first"].Y, good["first"].Z[:, :-1])}, one)
    with pytest.raises(ModelError, match="client a: one sketch for each of 3 layers expected, not 1 entries"):
        check_sketches({"first": good["first"]}, one)
    with pytest.raises(ModelError, match="client a: one sketch for each of 3 layers expected, not NoneType"):
        check_sketches(None, one)
    flat = Sketch(good["first"].Y[:, 0], good["first"].Z)
    for odd in (flat, good["first"].Y):
        with pytest.raises(ModelError, match="client a, layer first: a sketch of two matrices expected"):
            check_sketches(good | {"first": odd}, one)


def test_sizes_that_are_not_this_rounds_are_told_before_anything_is_averaged() -> None:
    one, two = card("a", 2), card("b", 2)
    sent = Uploads(
        [
            Uploaded(one, sketched(lora(1, 2), one, KEY, lambda _: (2, 5)), 1.0),
            Uploaded(two, sketched(lora(1, 2), two, KEY, lambda _: (3, 5)), 1.0),
        ]
    )
    with pytest.raises(ModelError, match="client a, layer first: a sketch of 2 columns and 5 rows where 3 and 5"):
        mean_sketches(sent, LAYERS, KEY, lambda _: (3, 5))
