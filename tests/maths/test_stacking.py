import pytest
import torch
from hypothesis import given
from reference import dense_lowrank as dense
from reference.random_factors import bounded, mixtures, normal, pair

from coterie.maths.stacking import stack_factors, stack_one_sided

T1 = [
    (torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0, 0.0]])),
    (torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0, 1.0]])),
]


@given(mixtures())
@bounded
def test_both_stacks_multiply_to_the_weighted_sum_of_the_products(mixture):
    factors, weights = mixture
    D = dense.mixture(factors, weights)
    kept = sum(B.shape[-1] for (B, _), c in zip(factors, weights, strict=True) if c > 0)
    for stack in (stack_factors, stack_one_sided):
        B, A = stack(factors, weights)
        assert B.shape[-1] == A.shape[-2] == kept
        torch.testing.assert_close(B @ A, D, rtol=0, atol=1e-12 * (1 + D.abs().max().item()))


def test_fixture_T1_stacks_to_the_products_by_value():
    B, A = stack_one_sided(T1, [0.75, 0.25])
    assert torch.equal(B, torch.eye(2))
    assert torch.equal(A, torch.tensor([[0.75, 0.0], [0.0, 0.25]]))
    B, A = stack_factors(T1, [0.75, 0.25])
    torch.testing.assert_close(B @ A, torch.tensor([[0.75, 0.0], [0.0, 0.25]]))
    torch.testing.assert_close(B, A)  # the same root on both sides


def test_fixture_T2_with_unequal_ranks_sums_by_value():
    T2 = [(T1[0][0], T1[0][1]), (torch.eye(2), torch.diag(torch.tensor([3.0, 0.0])))]
    B, A = stack_factors(T2, [0.5, 0.5])
    assert B.shape == (2, 3)
    torch.testing.assert_close(B @ A, torch.diag(torch.tensor([2.0, 0.0])))


def test_a_one_sided_stack_takes_negative_coefficients():
    first, second = pair(1, 4, 2, 3), pair(2, 4, 3, 3)
    B, A = stack_one_sided([first, second], [1.0, -0.5])
    torch.testing.assert_close(B @ A, dense.mixture([first, second], [1.0, -0.5]))


def test_zero_coefficients_leave_no_trace_even_of_entries_that_are_not_finite():
    B, A = stack_factors([pair(1, 4, 2, 3), (torch.full((4, 1), torch.nan), torch.zeros(1, 3))], [1.0, 0.0])
    assert B.shape == (4, 2)
    assert torch.isfinite(B @ A).all()
    B, A = stack_factors([pair(1, 4, 2, 3)], [0.0])
    assert (B.shape, A.shape) == ((4, 0), (0, 3))


def test_leading_axes_broadcast():
    stacked, shared = pair(1, 4, 2, 3, 5), pair(2, 4, 1, 3)
    B, A = stack_factors([stacked, shared], [0.5, 0.5])
    assert B.shape == (5, 4, 3)
    torch.testing.assert_close(B @ A, 0.5 * stacked[0] @ stacked[1] + 0.5 * shared[0] @ shared[1])


def test_stacks_keep_the_dtype_of_the_factors():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        B, A = stack_factors([pair(1, 4, 2, 3, dtype=dtype)], [0.3])
        assert B.dtype == A.dtype == dtype


def test_weights_of_half_precision_factors_are_not_rounded_themselves():
    ones, threes = torch.ones(2, 1, dtype=torch.bfloat16), torch.full((1, 2), 3.0, dtype=torch.bfloat16)
    _, A = stack_one_sided([(ones, threes)], [0.3])
    assert torch.equal(A, torch.full((1, 2), 0.9).bfloat16())  # a rounded 0.3 would give the next number up


def test_a_given_dtype_is_that_of_the_weighting():
    B, A = stack_factors([pair(1, 4, 2, 3, dtype=torch.float32)], [0.3], dtype=torch.float64)
    exact = dense.mixture([pair(1, 4, 2, 3, dtype=torch.float32)], [0.3])
    torch.testing.assert_close(B @ A, exact, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("factors", "coefficients", "message"),
    [
        ([], [], "no factors"),
        ([pair(1, 4, 2, 3)], [-0.1], "coefficient 0 is -0.1: weights of an average must not be negative"),
        ([pair(1, 4, 2, 3)], [float("nan")], "coefficient 0 is nan"),
        ([pair(1, 4, 2, 3)], [float("inf")], "coefficient 0 is inf"),
        ([pair(1, 4, 2, 3)], [0.5, 0.5], "1 pairs of factors but 2 coefficients"),
        ([pair(1, 4, 2, 3), pair(1, 5, 2, 3)], [0.5, 0.5], "product 1 is 5 x 3 but product 0 is 4 x 3"),
        ([(normal(1, 4, 2), normal(2, 3, 3))], [1.0], r"B \(4, 2\) and A \(3, 3\) are not factors"),
    ],
)
def test_what_cannot_be_stacked_is_refused_with_its_place(factors, coefficients, message):
    with pytest.raises(ValueError, match=message):
        stack_factors(factors, coefficients)


@pytest.mark.parametrize("count", [1, 2])
def test_stacking_leaves_the_factors_as_they_are_and_shares_nothing_with_them(count):
    factors = [pair(i, 4, 2, 3) for i in range(count)]
    before = [(B.clone(), A.clone()) for B, A in factors]
    for stack in (stack_factors, stack_one_sided):
        B, A = stack(factors, [0.25] * count)
        B.zero_(), A.zero_()
    assert all(
        torch.equal(x, y) for one, same in zip(factors, before, strict=True) for x, y in zip(one, same, strict=True)
    )
