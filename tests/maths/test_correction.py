"""Corrections of a left factor: fixture N5, dense twins, limits."""

from __future__ import annotations

import pytest
import torch
from algorithms.fixtures import t1
from hypothesis import given
from hypothesis import strategies as st
from reference import dense_server as dense
from reference.dense_lowrank import mixture
from reference.random_factors import bounded, normal, pair
from torch import Tensor

from coterie.maths.correction import cosine_correction, ridge_correction
from coterie.maths.gram import cosine

seeds = st.integers(0, 10_000)
penalties = st.sampled_from([1e-6, 1e-2, 0.3, 10.0])

Problem = tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]], list[float]]


def of_t1() -> Problem:
    factors = [(term.B, term.A) for term in t1().values()]
    return averaged(factors, [0.75, 0.25])


def averaged(factors: list[tuple[Tensor, Tensor]], weights: list[float]) -> Problem:
    B = sum((w * B for w, (B, _) in zip(weights, factors, strict=True)), torch.zeros_like(factors[0][0]))
    A = sum((w * A for w, (_, A) in zip(weights, factors, strict=True)), torch.zeros_like(factors[0][1]))
    return B, A, factors, weights


def clients(seed: int, m: int, r: int, n: int, length: float = 1.0) -> Problem:
    """Three clients around one pair, so that their average points somewhere near their mean product."""
    B, A = pair(seed, m, r, n)
    own = [(length * (B + 0.7 * normal(seed + i, m, r)), A + 0.7 * normal(seed + 9 + i, r, n)) for i in range(3)]
    return averaged(own, [0.5, 0.3, 0.2])


def test_n5_least_squares_points_along_0_9_0_1() -> None:
    made = ridge_correction(*of_t1(), 0.0)
    torch.testing.assert_close(made, torch.tensor([[0.9], [0.1]], dtype=torch.float64))


def test_n5_the_cosine_rises_from_0_885438_to_0_905539() -> None:
    B, A, factors, weights = of_t1()
    D = mixture(factors, weights), torch.eye(2, dtype=torch.float64)
    made = cosine_correction(B, A, factors, weights, 1e-9)
    assert float(cosine(B, A, *D)) == pytest.approx(0.885438, abs=5e-7)
    assert float(cosine(made, A, *D)) == pytest.approx(0.905539, abs=5e-7)


def test_a_vanishing_penalty_takes_the_multiple_of_the_best_direction_that_lies_nearest() -> None:
    expected = torch.tensor([[0.768293], [0.085366]], dtype=torch.float64)
    torch.testing.assert_close(cosine_correction(*of_t1(), 1e-9), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(cosine_correction(*of_t1(), 0.0), expected, atol=1e-6, rtol=0)


@given(seed=seeds, m=st.integers(2, 7), r=st.integers(1, 3), n=st.integers(2, 7), penalty=penalties)
@bounded
def test_ridge_least_squares_equals_its_dense_twin(seed: int, m: int, r: int, n: int, penalty: float) -> None:
    problem = clients(seed, m, min(r, n), n)
    torch.testing.assert_close(
        ridge_correction(*problem, penalty), dense.ridge_correction(*problem, penalty), rtol=1e-6, atol=1e-8
    )


@given(seed=seeds, m=st.integers(2, 7), r=st.integers(1, 3), n=st.integers(2, 7), penalty=penalties)
@bounded
def test_the_cosine_never_falls_and_the_objective_is_at_rest(seed: int, m: int, r: int, n: int, penalty: float) -> None:
    B, A, factors, weights = clients(seed, m, min(r, n), n)
    D = mixture(factors, weights)
    X = cosine_correction(B, A, factors, weights, penalty).requires_grad_()
    before, after = dense.cosine(D, B @ A), dense.cosine(D, X @ A)
    assert float(after.detach()) >= float(before) - 1e-12
    if before > 0:
        (gradient,) = torch.autograd.grad(dense.cosine_objective(X, B, A, D, penalty), X)
        assert float(gradient.norm() * X.detach().norm()) < 1e-5


@pytest.mark.parametrize("length", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("penalty", [1e-4, 1e-2, 1.0])
def test_descent_step_by_step_on_dense_matrices_ends_no_lower(length: float, penalty: float) -> None:
    for seed in range(4):
        B, A, factors, weights = clients(seed, 6, 2, 5, length)
        D = mixture(factors, weights)
        made = dense.cosine_objective(cosine_correction(B, A, factors, weights, penalty), B, A, D, penalty)
        slow = dense.cosine_correction(B, A, factors, weights, penalty, steps=400)
        assert float(made) <= float(dense.cosine_objective(slow, B, A, D, penalty)) + 1e-9


@pytest.mark.parametrize("correct", [cosine_correction, ridge_correction])
def test_a_large_penalty_leaves_b_where_it_is(correct) -> None:  # type: ignore[no-untyped-def]
    B, A, factors, weights = clients(3, 6, 2, 5)
    torch.testing.assert_close(correct(B, A, factors, weights, 1e12), B)


@pytest.mark.parametrize("correct", [cosine_correction, ridge_correction])
def test_one_client_needs_no_correction(correct) -> None:  # type: ignore[no-untyped-def]
    B, A = pair(5, 6, 2, 5)
    torch.testing.assert_close(correct(B, A, [(B, A)], [1.0], 0.01), B, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("correct", [cosine_correction, ridge_correction])
def test_directions_that_a_lacks_are_left_alone(correct) -> None:  # type: ignore[no-untyped-def]
    B, A, factors, weights = clients(4, 6, 2, 5)
    pad = torch.nn.functional.pad
    for penalty in (0.0, 0.01):
        made = correct(pad(B, (0, 1)), pad(A, (0, 0, 0, 1)), factors, weights, penalty)
        torch.testing.assert_close(made[:, :2], correct(B, A, factors, weights, penalty), rtol=1e-6, atol=1e-9)
        assert float(made[:, 2].abs().max()) < 1e-9


def test_where_there_is_no_angle_nothing_is_corrected() -> None:
    B, A = pair(1, 4, 2, 3)
    zero = torch.zeros_like(B)
    assert torch.equal(cosine_correction(zero, A, [(B, A)], [1.0], 0.01), zero)
    assert torch.equal(cosine_correction(B, A, [(zero, A)], [1.0], 0.01), B)
    assert torch.equal(cosine_correction(-B, A, [(B, A)], [1.0], 0.01), -B)


def test_a_penalty_below_zero_and_shapes_that_do_not_fit_are_refused() -> None:
    B, A = pair(1, 4, 2, 3)
    with pytest.raises(ValueError, match="at least 0, not -1"):
        cosine_correction(B, A, [(B, A)], [1.0], -1.0)
    with pytest.raises(ValueError, match="make no 4 x 3 matrix"):
        ridge_correction(B[:3], A, [(B, A)], [1.0], 0.0)
