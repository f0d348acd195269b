"""Sparse changes of W against whole matrices: what they add, their gradient, stacks, training, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines.world import FAST, base, text
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear

from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import Fit, Layer, LowRank, Model, SparseDelta
from coterie.training.asks import Ask, Done, Plan
from coterie.training.executor import Executor
from coterie.wire.codec import decode, encode

SIZES = st.integers(1, 7)


def change(m: int, n: int, k: int, seed: int = 0) -> SparseDelta:
    key = root_key(seed)
    places = torch.from_numpy(key.permutation(m * n)[:k].copy()).to(torch.int32)
    return SparseDelta(key.fold("values").normal((k,), dtype=torch.float64), places, m, n)


def looped(one: SparseDelta) -> torch.Tensor:
    """The slow twin: one entry after another."""
    made = torch.zeros(one.d_out, one.d_in, dtype=torch.float64)
    for value, place in zip(one.values.tolist(), one.places.tolist(), strict=True):
        made[place // one.d_in, place % one.d_in] = value
    return made


@given(m=SIZES, n=SIZES, share=st.floats(0, 1), seed=st.integers(0, 20))
def test_it_adds_what_the_slow_twin_adds_and_nothing_elsewhere(m: int, n: int, share: float, seed: int) -> None:
    one = change(m, n, round(share * m * n), seed)
    assert torch.equal(one.dense(), looped(one))
    x = root_key(seed).fold("x").normal((3, n), dtype=torch.float64)
    assert torch.allclose(one.apply(x), linear(x, looped(one)), atol=1e-12)


def test_its_gradient_is_that_of_w_at_the_places() -> None:
    one = change(5, 4, 7)
    x = root_key(1).normal((6, 4), dtype=torch.float64)
    values = one.values.clone().requires_grad_()
    (mine,) = torch.autograd.grad(replace(one, values=values).apply(x).pow(3).sum(), [values])
    W = looped(one).requires_grad_()
    (whole,) = torch.autograd.grad(linear(x, W).pow(3).sum(), [W])
    assert torch.allclose(mine, whole.flatten()[one.places.long()], atol=1e-12)


def test_a_stack_adds_each_clients_own_change_also_at_other_places() -> None:
    clients = [change(5, 4, 6, seed) for seed in range(3)]
    stack = SparseDelta.stack(clients, 8)
    x = root_key(2).normal((3, 2, 4), dtype=torch.float64)
    for index, one in enumerate(clients):
        assert torch.allclose(stack.apply(x)[index], one.apply(x[index]), atol=1e-12)
        back = stack.unstack(index, one)
        assert torch.equal(back.values, one.values) and torch.equal(back.places, one.places)
    assert clients[0].signature == clients[1].signature != change(5, 4, 7).signature


def test_it_travels() -> None:
    one = change(5, 4, 6)
    back = decode(encode(one))
    assert torch.equal(back.values, one.values) and torch.equal(back.places, one.places)
    assert (back.d_out, back.d_in) == (5, 4) and one.low_rank() is None


def test_training_moves_the_places_alone_and_stacked_as_alone() -> None:
    """Also beside a low-rank term that is frozen."""
    network = base()
    (name, layer), *_ = network.layers.items()
    m, n = layer.d_out, layer.d_in
    own = [replace(change(m, n, 40, seed), values=torch.zeros(40)) for seed in range(3)]
    frozen = LowRank(torch.zeros(m, 2), torch.ones(2, n))
    answers = []
    for together in (1, 3):
        executor = Executor({"base": base()}, FAST, Plan(dtype="float64", clients_per_step=together))
        asks = [
            Ask(str(i), Fit(Model(sparse={name: one}, lora={name: frozen}), train=("sparse.*",)), "base",
                network.head, text(20, seed=i), root_key(i))
            for i, one in enumerate(own)
        ]  # fmt: skip
        answers.append([done.answer for done in executor.answer(asks) if isinstance(done, Done)])
    for one, alone, stacked in zip(own, *answers, strict=True):
        trained = alone.model["sparse"][name]
        assert torch.equal(trained.places, one.places) and float(trained.values.abs().min()) > 0
        assert torch.allclose(trained.values, stacked.model["sparse"][name].values, atol=1e-7)
        assert torch.equal(alone.model["lora"][name].A, frozen.A)


def test_what_does_not_fit_is_refused_with_its_place() -> None:
    one, layer = change(5, 4, 6), Layer(5, 4)
    one.check("here", layer, 1)
    odd = [
        (one, Layer(4, 5), "a change of 5 x 4 does not fit a layer of 4 x 5"),
        (replace(one, values=one.values[:-1]), layer, "values"),
        (replace(one, places=one.places.double()), layer, "int32"),
        (replace(one, places=one.places + 20), layer, "below 20"),
        (replace(one, places=one.places * 0), layer, "two values for one place"),
    ]
    for term, where, reason in odd:
        with pytest.raises(ModelError, match=f"^here: .*{reason}"):
            term.check("here", where, None)
