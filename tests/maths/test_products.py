"""Products with few rows, frozen matrices and both: the values and gradients of the plain products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coterie.maths.keys import root_key
from coterie.maths.products import by_adapted, by_few, by_frozen, is_fast, packed

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


@given(S=st.integers(1, 3), N=SIZES, r=SIZES, d=SIZES, o=SIZES, biased=st.booleans(), turned=st.booleans())
def test_an_adapted_product_is_that_of_the_dense_sum(
    S: int, N: int, r: int, d: int, o: int, biased: bool, turned: bool
) -> None:
    x, A, B = drawn(S, N, d, name="x"), drawn(S, r, d, name="A"), drawn(S, o, r, name="B")
    weight, bias = drawn(o, d, name="W").detach(), drawn(o, name="b").detach() if biased else None
    asked = drawn(S, N, o, name="w").detach()
    if turned:  # a gradient that does not lie row by row
        asked = asked.transpose(0, 1).contiguous().transpose(0, 1)
    y = by_adapted(x, weight, bias, A, B)
    plain = x @ (weight + B @ A).mT + (0 if bias is None else bias)
    torch.testing.assert_close(y, plain)
    found = torch.autograd.grad(y, (x, A, B), asked)
    for one, other in zip(found, torch.autograd.grad(plain, (x, A, B), asked), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("of", ["x", "A", "B"])
def test_an_adapted_product_s_frozen_part_gets_no_gradient(of: str) -> None:
    tensors = {"x": drawn(2, 5, 4, name="x"), "A": drawn(2, 3, 4, name="A"), "B": drawn(2, 6, 3, name="B")}
    tensors[of].requires_grad_(False)
    by_adapted(tensors["x"], drawn(6, 4, name="W").detach(), None, tensors["A"], tensors["B"]).sum().backward()
    assert {name for name, value in tensors.items() if value.grad is None} == {of}


def test_second_derivatives_of_an_adapted_product_exist() -> None:
    weight, bias = drawn(3, 4, name="W").detach(), drawn(3, name="b").detach()
    tensors = drawn(2, 3, 4, name="x"), drawn(2, 2, 4, name="A"), drawn(2, 3, 2, name="B")
    assert torch.autograd.gradgradcheck(lambda x, A, B: by_adapted(x, weight, bias, A, B), tensors)


def test_each_of_a_stack_has_the_bits_that_it_has_alone() -> None:
    x, A, B, asked = (
        drawn(3, *shape, name=name).detach().bfloat16()
        for name, shape in {"x": (16, 32), "A": (4, 32), "B": (24, 4), "w": (16, 24)}.items()
    )
    weight, bias = drawn(24, 32, name="W").detach().bfloat16(), drawn(24, name="b").detach().bfloat16()

    def played(rows: slice) -> list[Tensor]:
        own = [value[rows].clone().requires_grad_() for value in (x, A, B)]
        y = by_adapted(own[0], weight, bias, own[1], own[2])
        return [y, *torch.autograd.grad(y, own, asked[rows])]

    together = played(slice(3))
    for i in range(3):
        for one, other in zip(played(slice(i, i + 1)), together, strict=True):
            assert torch.equal(one[0], other[i])


@given(
    rows=st.integers(1, 70), d=st.integers(1, 70), o=st.integers(1, 70), dtype=st.sampled_from(["float32", "bfloat16"])
)
def test_a_frozen_product_has_the_bits_of_the_plain_layer(rows: int, d: int, o: int, dtype: str) -> None:
    kind = getattr(torch, dtype)
    x, weight, bias = (drawn(*shape, name="f").detach().to(kind) for shape in ((rows, d), (o, d), (o,)))
    assert torch.equal(by_frozen(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(by_frozen(x, weight, None), F.linear(x, weight))


@pytest.mark.parametrize("turned", [False, True])
def test_a_frozen_product_s_gradient_is_the_plain_layer_s(turned: bool) -> None:
    x, weight, bias = drawn(2, 3, 4, name="x"), drawn(5, 4, name="W").detach(), drawn(5, name="b").detach()
    asked = drawn(2, 3, 5, name="w").detach()
    if turned:
        asked = asked.transpose(0, 1).contiguous().transpose(0, 1)
    (found,) = torch.autograd.grad(by_frozen(x, weight, bias), x, asked)
    (plain,) = torch.autograd.grad(F.linear(x, weight, bias), x, asked)
    torch.testing.assert_close(found, plain)


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    for weight in torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bfloat16, device="meta"):
        assert not is_fast(weight)
        assert packed(weight) is None


@given(rows=st.integers(1, 70), d=st.integers(1, 70), o=st.integers(1, 70))
def test_packed_weights_change_no_bit_forward_or_backward(rows: int, d: int, o: int) -> None:
    x, weight, bias, asked = (
        drawn(*shape, name="p").detach().bfloat16() for shape in ((1, rows, d), (o, d), (o,), (1, rows, o))
    )
    A, B = drawn(1, 3, d, name="A").detach().bfloat16(), drawn(1, o, 3, name="B").detach().bfloat16()
    for product in (
        lambda x, way: by_frozen(x, weight, bias, way),
        lambda x, way: by_frozen(x, weight, None, way),
        lambda x, way: by_adapted(x, weight, bias, A, B, way),
    ):
        said = []
        for way in (None, packed(weight)):
            own = x.clone().requires_grad_()
            y = product(own, way)
            said.append((y, *torch.autograd.grad(y, own, asked)))
        assert all(torch.equal(one, other) for one, other in zip(*said, strict=True))
