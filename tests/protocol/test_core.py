"""Cores: what they add, how unequal heads and widths stack, identity at the start, the way over the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.dense_core import dense_core

from coterie.engines.arrivals import check_arrival
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import Card, Core, Layer, LowRank, Model
from coterie.wire.codec import decode, encode

LAYER = Layer(7, 6)


def core(heads: int = 2, width: int = 2, seed: int = 0, gain: bool = True) -> Core:
    key, wide = root_key(seed), heads * width
    return Core(
        key.fold("U").normal((LAYER.d_out, wide), dtype=torch.float64),
        key.fold("H").normal((heads, width, width), dtype=torch.float64),
        key.fold("V").normal((wide, LAYER.d_in), dtype=torch.float64),
        key.fold("s").normal((heads,), dtype=torch.float64) if gain else None,
    )


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=40, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=4), st.booleans(), st.integers(0, 12))
def test_a_stack_of_unequal_heads_and_widths_acts_as_its_members_and_gives_them_back(
    sizes: list[tuple[int, int]], gain: bool, pad: int
) -> None:
    terms = [core(h, r, seed, gain) for seed, (h, r) in enumerate(sizes)]
    stack = Core.stack(terms, pad)
    assert stack.rank >= max(pad, *(term.rank for term in terms))
    x = root_key(9).normal((len(terms), 5, LAYER.d_in), dtype=torch.float64)
    y = stack.apply(x)
    for index, one in enumerate(terms):
        assert torch.allclose(one.dense(), dense_core(one), atol=1e-12)
        assert torch.allclose(y[index], x[index] @ dense_core(one).T, atol=1e-12)
        back = stack.unstack(index, one)
        assert all(torch.equal(value, one.parameters[name]) for name, value in back.parameters.items())
        assert torch.equal(back.U, one.U) and torch.equal(back.V, one.V)


@settings(max_examples=20, deadline=None)
@given(SIZES, SIZES)
def test_padding_has_no_gradient_and_real_entries_have_their_own(size: tuple[int, int], more: tuple[int, int]) -> None:
    one = core(*size)
    wide = one.padded(size[0] + more[0], size[1] + more[1])
    grads = {}
    for name, term in (("own", one), ("padded", wide)):
        leaves = [value.clone().requires_grad_() for value in term.parameters.values()]
        out = term.with_parameters(dict(zip(term.parameters, leaves, strict=True))).dense().square().sum()
        grads[name] = torch.autograd.grad(out, leaves)
    for own, padded in zip(grads["own"], grads["padded"], strict=True):
        real = padded[tuple(slice(length) for length in own.shape)]
        assert torch.allclose(real, own, atol=1e-9)
        assert abs(float(padded.abs().sum() - real.abs().sum())) < 1e-9


def test_a_core_is_low_rank_factors_of_all_heads_side_by_side() -> None:
    one = core(3, 2)
    factors = one.low_rank()
    assert isinstance(factors, LowRank) and factors.rank == one.rank == 6
    assert torch.allclose(factors.product(), dense_core(one), atol=1e-12)
    assert LowRank(factors.B, factors.A).low_rank() is not None


def test_folding_the_gain_into_the_core_changes_nothing_that_is_added() -> None:
    one = core(3, 2)
    assert torch.allclose(replace(one, core=one.folded(), gain=None).dense(), one.dense(), atol=1e-12)


def test_heads_taken_apart_add_up_to_the_whole() -> None:
    one = core(4, 2)
    parts = one.chosen([3, 1]), one.chosen([0, 2])
    assert [part.heads for part in parts] == [2, 2] and torch.equal(parts[0].core[0], one.core[3])
    assert torch.allclose(parts[0].dense() + parts[1].dense(), one.dense(), atol=1e-12)


def test_cores_with_and_without_gain_do_not_stack() -> None:
    plain = core()
    assert plain.signature != core(gain=False).signature
    assert plain.signature == core(3, 1).signature


def test_parameters_are_the_core_and_its_gain_alone() -> None:
    model = Model(core={"x.w": core()}, shared={"x.w": core(gain=False)})
    assert set(model.parameters) == {"core.x.w.core", "core.x.w.gain", "shared.x.w.core"}


def test_a_core_travels_and_arrives_checked() -> None:
    card = Card("c", 1, 1, 1.0, {"w": LAYER})
    back = decode(encode({"w": core()}))
    check_arrival(back, card)
    assert torch.equal(back["w"].dense(), core().dense())
    with pytest.raises(ModelError, match=r"client c, layer w: U \(6, 4\) and V \(4, 6\) do not fit a layer of 7 x 6"):
        check_arrival({"w": replace(core(), U=core().U[1:])}, card)
    with pytest.raises(ModelError, match=r"layer w: a core \(2, 2, 1\) where"):
        check_arrival({"w": replace(core(), core=core().core[..., :1])}, card)
    with pytest.raises(ModelError, match=r"gain \(1,\) where \(2,\) is expected"):
        check_arrival({"w": replace(core(), gain=torch.ones(1))}, card)
    with pytest.raises(ModelError, match="not finite"):
        check_arrival({"w": replace(core(), gain=torch.tensor([1.0, float("nan")]))}, card)
