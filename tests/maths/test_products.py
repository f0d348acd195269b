"""Products of many rows by few: the values and gradients of the plain product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coterie.maths.keys import root_key
from coterie.maths.products import by_few

SIZES = st.integers(1, 7)


def drawn(*shape: int, name: str) -> Tensor:
    return root_key(0).fold(name, *shape).normal(shape, 1.0).double().requires_grad_()


@given(S=st.integers(0, 3), N=SIZES, r=SIZES, d=SIZES)
def test_values_and_gradients_are_those_of_the_plain_product(S: int, N: int, r: int, d: int) -> None:
    stack = (S,) if S else ()
    x, A = drawn(*stack, N, d, name="x"), drawn(*stack, r, d, name="A")
    weights = drawn(*stack, N, r, name="w").detach()
    z = by_few(x, A)
    torch.testing.assert_close(z, torch.einsum("...nd,...rd->...nr", x, A))
    found = torch.autograd.grad((weights * z).sum(), (x, A))
    plain = torch.autograd.grad((weights * torch.einsum("...nd,...rd->...nr", x, A)).sum(), (x, A))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_one_matrix_may_serve_a_stack() -> None:
    x, A = drawn(3, 5, 4, name="x"), drawn(2, 4, name="A")
    (found,) = torch.autograd.grad(by_few(x, A).square().sum(), A)
    (plain,) = torch.autograd.grad((x @ A.mT).square().sum(), A)
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("of", ["x", "A"])
def test_what_needs_no_gradient_gets_none(of: str) -> None:
    x, A = drawn(2, 5, 4, name="x"), drawn(2, 3, 4, name="A")
    fixed = x if of == "x" else A
    fixed.requires_grad_(False)
    by_few(x, A).sum().backward()
    assert fixed.grad is None
    assert (A if of == "x" else x).grad is not None


def test_second_derivatives_exist() -> None:
    assert torch.autograd.gradgradcheck(by_few, (drawn(2, 3, 4, name="x"), drawn(2, 2, 4, name="A")))
