import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense_lowrank as dense
from reference.random_factors import bounded, mixtures, normal, pair

from coterie.maths.gram import (
    cosine,
    distance,
    inner,
    lower_gram,
    mixture_distance,
    mixture_squared_norm,
    squared_distance,
    squared_norm,
    whole_gram,
)

shapes = {"m": st.integers(1, 9), "n": st.integers(1, 9), "r": st.integers(1, 11), "r2": st.integers(1, 11)}
seeds = st.integers(0, 10_000)


def N16():
    B, A = (
        torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 0.0]]),
        torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]]),
    )
    return B, A, torch.tensor([[1.0], [1.0], [0.0]]), torch.tensor([[2.0, 1.0, 0.0]])


def test_fixture_N16_has_squared_distance_68():
    assert squared_distance(*N16()).item() == 68
    assert distance(*N16()).item() == pytest.approx(68**0.5)


def test_fixture_T2_has_norms_1_and_3():
    assert squared_norm(torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0, 0.0]])).item() == 1
    assert squared_norm(torch.eye(2), torch.diag(torch.tensor([3.0, 0.0]))).item() == 9


@given(seed=seeds, **shapes)
@bounded
def test_values_and_gradients_equal_the_dense_form(seed, m, n, r, r2):
    leaves = [x.requires_grad_() for x in (*pair(seed, m, r, n), *pair(seed + 1, m, r2, n))]
    for fast, slow in ((inner, dense.inner), (squared_distance, dense.squared_distance)):
        value, twin = fast(*leaves), slow(*leaves)
        scale = 1 + twin.abs().item()
        torch.testing.assert_close(value, twin, rtol=0, atol=1e-10 * scale)
        for ours, theirs in zip(torch.autograd.grad(value, leaves), torch.autograd.grad(twin, leaves), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10 * scale)


def test_the_gradient_is_the_formula_of_the_paper():
    B, A = (x.requires_grad_() for x in pair(1, 7, 3, 5))
    B_g, A_g = pair(2, 7, 4, 5)
    on_B, on_A = torch.autograd.grad(0.5 * squared_distance(B, A, B_g, A_g), (B, A))
    torch.testing.assert_close(on_B, B @ (A @ A.mT) - B_g @ (A_g @ A.mT))
    torch.testing.assert_close(on_A, (B.mT @ B) @ A - (B.mT @ B_g) @ A_g)


def test_second_derivatives_exist():
    B, A = pair(1, 4, 2, 3)
    B2, A2 = pair(2, 4, 3, 3)
    assert torch.autograd.gradgradcheck(
        lambda B, A: squared_distance(B, A, B2, A2), (B.requires_grad_(), A.requires_grad_())
    )


def nearly_equal(seed: int, gap: float):
    """Two factorisations, in different gauges, of products that differ by `gap` in one direction."""
    B, A = pair(seed, 40, 3, 30)
    G = normal(seed + 7, 3, 3) + 3 * torch.eye(3, dtype=torch.float64)
    u, v = (torch.nn.functional.normalize(normal(seed + i, size), dim=0) for i, size in ((3, 40), (4, 30)))
    return B, A, torch.cat([B @ G, gap * u[:, None]], dim=1), torch.cat([torch.linalg.solve(G, A), v[None]])


def test_a_negative_rounding_is_clamped_to_0_but_its_gradient_is_kept():
    clamped = 0
    for seed in range(20):
        B, A, B2, A2 = nearly_equal(seed, 1e-9)
        B.requires_grad_()
        value = squared_distance(B, A, B2, A2)
        assert value.item() >= 0
        if value.item() == 0:
            clamped += 1
            (gradient,) = torch.autograd.grad(value, B)
            expected = 2 * (B @ A - B2 @ A2) @ A.mT
            assert expected.norm() > 1e-9
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-11)
    assert clamped >= 3, "no case of negative rounding among the seeds: the test shows nothing"


def test_distance_is_accurate_where_the_gram_form_is_not():
    for seed in range(5):
        factors = nearly_equal(seed, 1e-10)
        assert distance(*factors).item() == pytest.approx(1e-10, rel=1e-3)
        assert squared_distance(*factors).sqrt().item() != pytest.approx(1e-10, rel=1e-1)


@given(seed=seeds, **shapes)
@bounded
def test_distance_equals_the_dense_one(seed, m, n, r, r2):
    factors = (*pair(seed, m, r, n), *pair(seed + 1, m, r2, n))
    torch.testing.assert_close(distance(*factors), dense.squared_distance(*factors).sqrt(), rtol=1e-12, atol=1e-12)


@given(mixtures())
@bounded
def test_norm_of_and_distance_to_a_mixture_equal_the_dense_ones(mixture):
    factors, weights = mixture
    D = dense.mixture(factors, weights)
    scale = 1 + D.norm().item() ** 2
    torch.testing.assert_close(mixture_squared_norm(factors, weights), D.square().sum(), rtol=0, atol=1e-12 * scale)
    B, A = pair(3, D.shape[0], 2, D.shape[1])
    torch.testing.assert_close(
        mixture_distance(B, A, factors, weights),
        torch.linalg.matrix_norm(B @ A - D),
        rtol=1e-12,
        atol=1e-12 * scale,
    )


def test_distance_to_a_mixture_is_accurate_when_it_nearly_vanishes():
    factors, weights = [pair(i, 40, 2, 30) for i in range(3)], [0.5, 0.3, 0.2]
    B = torch.cat([c * B for (B, _), c in zip(factors, weights, strict=True)], dim=1)
    A = torch.cat([A for _, A in factors])
    assert mixture_distance(B, A, factors, weights).item() < 1e-13
    u, v = (torch.nn.functional.normalize(normal(i, size), dim=0) for i, size in ((3, 40), (4, 30)))
    off_B, off_A = torch.cat([B, 1e-9 * u[:, None]], dim=1), torch.cat([A, v[None]])
    assert mixture_distance(off_B, off_A, factors, weights).item() == pytest.approx(1e-9, rel=1e-4)


def test_leading_axes_broadcast_and_equal_a_loop():
    B, A = pair(1, 6, 2, 5, 3, 4)
    B2, A2 = pair(2, 6, 3, 5)
    for f in (inner, squared_distance, distance):
        looped = torch.stack([torch.stack([f(B[i, j], A[i, j], B2, A2) for j in range(4)]) for i in range(3)])
        torch.testing.assert_close(f(B, A, B2, A2), looped, rtol=1e-12, atol=1e-12)
    pairs, weights = [(B, A), (B2, A2)], [0.4, 0.6]
    looped = torch.stack([mixture_squared_norm([(B[i], A[i]), (B2, A2)], weights) for i in range(3)])
    torch.testing.assert_close(mixture_squared_norm(pairs, weights), looped, rtol=1e-12, atol=1e-12)
    looped = torch.stack([mixture_distance(B2, A2, [(B[i], A[i]), (B2, A2)], weights) for i in range(3)])
    torch.testing.assert_close(mixture_distance(B2, A2, pairs, weights), looped, rtol=1e-12, atol=1e-12)


def test_results_have_the_factors_dtype_and_float64_accuracy():
    factors = [x.float() for x in nearly_equal(0, 1e-3)]
    exact = dense.squared_distance(*(x.double() for x in factors))
    assert squared_distance(*factors).dtype == torch.float32
    assert squared_distance(*factors).item() == pytest.approx(exact.item(), rel=1e-6)
    assert squared_distance(*factors, dtype=torch.float32).item() != pytest.approx(exact.item(), rel=1e-2)
    assert distance(*factors).dtype == torch.float32
    assert inner(*(x.bfloat16() for x in factors)).dtype == torch.bfloat16


def test_autocast_does_not_lower_the_gram_matrices():
    factors = [x.float() for x in (*pair(1, 9, 2, 8), *pair(2, 9, 3, 8))]
    outside = squared_distance(*factors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(squared_distance(*factors), outside)


def test_the_accurate_distances_carry_no_gradient():
    B, A = (x.requires_grad_() for x in pair(1, 4, 2, 3))
    assert not distance(B, A, B, A).requires_grad
    assert not mixture_distance(B, A, [(B, A)], [1.0]).requires_grad


def test_products_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match="product 1 is 4 x 5 but product 0 is 4 x 3"):
        squared_distance(*pair(1, 4, 2, 3), *pair(1, 4, 2, 5))


@given(seed=seeds, **shapes)
@bounded
def test_the_cosine_is_that_of_the_flattened_products(seed, m, n, r, r2):
    first, second = pair(seed, m, r, n), pair(seed + 1, m, r2, n)
    expected = torch.nn.functional.cosine_similarity(
        (first[0] @ first[1]).flatten(), (second[0] @ second[1]).flatten(), 0
    )
    torch.testing.assert_close(cosine(*first, *second), expected, rtol=0, atol=1e-9)


def test_the_cosine_with_nothing_is_zero_and_has_no_gradient():
    (B, A), zero = pair(1, 4, 2, 3), torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    value = cosine(zero, A, B, A)
    assert value.item() == 0.0
    assert torch.autograd.grad(value, zero)[0].abs().max() == 0.0


@pytest.mark.parametrize("shape", [(6, 1), (5, 4), (7, 11), (2, 9, 13), (3, 0)])
def test_a_gram_matrix_in_blocks_is_the_whole_one(shape):
    X = normal(1, *shape)
    torch.testing.assert_close(lower_gram(X).tril(), (X.mT @ X).tril(), rtol=0, atol=1e-13)
    torch.testing.assert_close(whole_gram(X), X.mT @ X, rtol=0, atol=1e-13)
