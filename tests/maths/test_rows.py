"""Rows taken and put back are plain indexing, in their gradients too."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from coterie.maths.keys import root_key
from coterie.maths.rows import Rows


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[int]]:
    count = draw(st.integers(1, 12))
    return count, draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count))


@given(cases())
def test_taken_and_placed_are_indexing(case: tuple[int, list[int]]) -> None:
    count, places = case
    index = torch.tensor(places, dtype=torch.int64)
    x, rows = root_key(1).normal((count, 3)), Rows.of(index, count)
    taken = rows.picked(x)
    assert torch.equal(taken, x[index])
    expected = torch.zeros_like(x)
    expected[index] = x[index]
    assert torch.equal(rows.placed(taken), expected)


def test_gradients_are_the_numerical_ones_twice() -> None:
    rows = Rows.of(torch.tensor([4, 0, 3]), 6)
    key = root_key(2)
    x = key.fold("x").normal((6, 2), dtype=torch.float64).requires_grad_()
    y = key.fold("y").normal((3, 2), dtype=torch.float64).requires_grad_()
    for function, value in ((rows.picked, x), (rows.placed, y)):
        assert gradcheck(lambda v, f=function: f(v) ** 2, value)
        assert gradgradcheck(lambda v, f=function: f(v) ** 3, value)
