"""The step in one factor towards a product: the slow least-squares twin, what it reaches, and where it is cut off."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense_fedsrd as slow
from reference.random_factors import bounded, normal, pair

from coterie.maths.factor_step import factor_step, pseudo_inverse

SIZES = st.integers(1, 8)


@bounded
@given(
    m=SIZES, n=SIZES, r=st.integers(1, 4), q=st.integers(1, 5), seed=st.integers(0, 500), moved=st.sampled_from("BA")
)
def test_the_step_is_the_least_squares_solution_of_least_norm(
    m: int, n: int, r: int, q: int, seed: int, moved: str
) -> None:
    B, A = pair(seed, m, r, n)
    left, right = pair(seed + 1000, m, q, n)
    step = factor_step(B, A, (left, right), moved)  # type: ignore[arg-type]
    expected = slow.step(left @ right, B, A, moved)
    assert float((step - expected).norm()) <= 1e-6 * (1 + float(expected.norm()))


def test_a_step_in_the_factor_that_was_changed_meets_the_product() -> None:
    B, A = pair(1, 6, 2, 5)
    target = B + normal(2, 6, 2)
    torch.testing.assert_close(B + factor_step(B, A, (target, A), "B"), target, rtol=0, atol=1e-10)
    other = A + normal(3, 2, 5)
    torch.testing.assert_close(A + factor_step(B, A, (B, other), "A"), other, rtol=0, atol=1e-10)


def test_of_a_zero_factor_the_other_one_does_not_move() -> None:
    B, A = pair(1, 6, 2, 5)
    assert not factor_step(torch.zeros_like(B), A, (B, A), "A").any()
    assert factor_step(torch.zeros_like(B), A, (B, A), "B").any()


def test_directions_that_are_rounding_of_fp32_are_left_alone() -> None:
    """Two rows of A that differ by 1e-9: the inverse of what they differ in would be of size 1e9."""
    row = normal(1, 1, 5)
    A = torch.cat([row, row + 1e-9 * normal(2, 1, 5)])
    assert float(pseudo_inverse(A).abs().max()) < 1e2 < float(torch.linalg.pinv(A).abs().max())
    apart = torch.cat([row, row + 1e-3 * normal(2, 1, 5)])
    torch.testing.assert_close(pseudo_inverse(apart), torch.linalg.pinv(apart))


def test_single_precision_factors_get_a_step_in_double() -> None:
    B, A = (one.float() for one in pair(1, 6, 2, 5))
    assert factor_step(B, A, (B + 1, A), "B").dtype == torch.float64


def test_products_that_do_not_fit_are_refused() -> None:
    B, A = pair(1, 6, 2, 5)
    with pytest.raises(ValueError, match="product 1 is 6 x 5 but product 0 is 6 x 4"):
        factor_step(B, A, pair(2, 6, 2, 4), "B")
