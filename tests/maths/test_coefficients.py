"""Alternating least squares for coefficients: fixture N6, its dense twin, what never rises."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from algorithms.fixtures import t1
from hypothesis import given
from hypothesis import strategies as st
from reference.dense_lowrank import mixture
from reference.dense_server import alternating_errors
from reference.random_factors import bounded, pair
from torch import Tensor

from coterie.maths.coefficients import product_coefficients

T1 = [(term.B, term.A) for term in t1().values()]
P1 = [0.75, 0.25]


def product(factors: list[tuple[Tensor, Tensor]], weights: list[float], sweeps: int) -> Tensor:
    P, Q = product_coefficients(factors, weights, sweeps)
    B = torch.einsum("u,umr->mr", Q, torch.stack([B for B, _ in factors]))
    return B @ torch.einsum("u,urn->rn", P, torch.stack([A for _, A in factors]))


def error(factors: list[tuple[Tensor, Tensor]], weights: list[float], sweeps: int) -> float:
    return float((product(factors, weights, sweeps) - mixture(factors, weights)).norm())


def test_n6_the_best_combination_of_t1_is_the_first_client_s() -> None:
    torch.testing.assert_close(
        product(T1, P1, 20), torch.diag(torch.tensor([0.75, 0.0], dtype=torch.float64)), atol=1e-6, rtol=0
    )
    assert error(T1, P1, 20) == pytest.approx(0.25, abs=1e-9)


def test_n6_the_first_sweeps_from_the_weights_and_from_uniform_coefficients() -> None:
    assert [error(T1, P1, sweeps) for sweeps in (0, 1, 2)] == pytest.approx([0.375, 0.2619, 0.2502], abs=5e-5)
    assert alternating_errors(T1, P1, P1, 2) == pytest.approx([0.375, 0.2619, 0.2502], abs=5e-5)
    assert alternating_errors(T1, P1, [0.5, 0.5], 2)[1:] == pytest.approx([0.3354, 0.2514], abs=5e-5)


@given(seed=st.integers(0, 10_000), N=st.integers(1, 4), m=st.integers(1, 6), r=st.integers(1, 3), n=st.integers(1, 6))
@bounded
def test_no_sweep_raises_the_error_and_all_equal_the_dense_twin(seed: int, N: int, m: int, r: int, n: int) -> None:
    factors = [pair(seed + i, m, r, n) for i in range(N)]
    weights = [(i + 1) / sum(range(1, N + 1)) for i in range(N)]
    errors = [error(factors, weights, sweeps) for sweeps in range(5)]
    length = float(mixture(factors, weights).norm()) + errors[0]
    for before, after in pairwise(errors):
        assert after <= before + 1e-10 * length
    twin = alternating_errors(factors, weights, weights, 4)
    assert errors == pytest.approx(twin, abs=1e-6 * length)


def test_one_client_is_exact_and_equal_clients_are_too() -> None:
    one = pair(1, 5, 2, 4)
    P, Q = product_coefficients([one], [1.0], 20)
    assert float(P * Q) == pytest.approx(1.0, abs=1e-10)
    assert error([one] * 3, [0.5, 0.3, 0.2], 20) < 1e-8


@pytest.mark.parametrize("apart", [1e-3, 1e-4])
def test_of_clients_that_nearly_coincide_last_bits_move_the_coefficients_by_an_ulp_over_their_distance(
    apart: float,
) -> None:
    """In terms of the clients themselves it is an ulp over the square: 1e-9 to 1e-8 here, which rounds then amplify."""
    own = [pair(i, 12, 3, 10) for i in range(4)]
    factors = [(own[0][0] + apart * B, own[0][1] + apart * A) for B, A in own]
    nudged = [(torch.nextafter(B, 2 * B), torch.nextafter(A, 2 * A)) for B, A in factors]
    first, second = (product_coefficients(one, [0.4, 0.3, 0.2, 0.1], 20) for one in (factors, nudged))
    for one, other in zip(first, second, strict=True):
        assert float((one - other).abs().max()) < 100 * 2.2e-16 / apart


def test_no_sweep_at_all_leaves_the_weights() -> None:
    P, Q = product_coefficients(T1, P1, 0)
    assert P.tolist() == Q.tolist() == P1


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks \[1, 2\]"):
        product_coefficients([pair(1, 4, 1, 3), pair(2, 4, 2, 3)], [0.5, 0.5], 1)
    with pytest.raises(ValueError, match="2 pairs of factors, 1 weights"):
        product_coefficients(T1, [1.0], 1)
