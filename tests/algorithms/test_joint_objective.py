"""The joint objective's figures: distances by hand, Eq. 20 with one lambda and with many, Eqs. 86-87."""

from __future__ import annotations

import pytest

from algorithms.fixtures import adapter, card, t1, term
from coterie.algorithms.joint_objective import joint_terms, mismatch, truncation_delta
from coterie.protocol import Federation, Model, Seen

REFERENCE = {"w": term([[3, 0], [0, 4]], [[1, 0], [0, 1]])}
"""B_g = U Sigma with singular values 3 and 4, A_g = V^T."""

BOTH = Federation((card("1", 2, reference_rank=2), card("2", 1, reference_rank=1)), 1)


def seen(weights: dict[str, float]) -> dict[str, Seen]:
    return {name: Seen(weight, Model(lora=adapter(t1()[name])), None) for name, weight in weights.items()}


def test_the_mismatch_is_the_distance_of_unscaled_products_over_all_layers() -> None:
    """||e1 e1' - e2 e2'|| = sqrt 2, in two layers 2; scales do not count."""
    one, two = t1()["1"], t1()["2"]
    assert mismatch({"w": one}, {"w": two}) == pytest.approx(2**0.5)
    assert mismatch({"v": one, "w": one}, {"v": two, "w": two}) == pytest.approx(2.0)
    assert mismatch({"w": term([[1], [0]], [[1, 0]], 9.0)}, {"w": one}) == pytest.approx(0.0, abs=1e-12)


def test_only_the_layers_that_a_client_has_count() -> None:
    assert mismatch({"w": t1()["1"]}, {"v": t1()["2"], "w": t1()["2"]}) == pytest.approx(2**0.5)


def test_delta_is_what_the_reference_has_beyond_the_smallest_reference_rank() -> None:
    assert truncation_delta(REFERENCE, BOTH) == pytest.approx(4.0)
    assert truncation_delta(REFERENCE | {"v": REFERENCE["w"]}, BOTH) == pytest.approx(32**0.5)
    assert truncation_delta(REFERENCE, Federation((card("1", 2),), 1)) == 0.0


def test_the_regulariser_is_the_weighted_mean_of_half_lambda_times_squared_distances() -> None:
    """||e1 e1' - diag(3, 4)||^2 = 4 + 16, ||e2 e2' - diag(3, 4)||^2 = 9 + 9."""
    told = joint_terms(REFERENCE, BOTH, seen({"1": 0.75, "2": 0.25}), 2.0)
    assert told == pytest.approx({"truncation_delta": 4.0, "regulariser": 0.75 * 20 + 0.25 * 18})
    own = joint_terms(REFERENCE, BOTH, seen({"1": 0.75, "2": 0.25}), {"1": 2.0, "2": 6.0})
    assert own["regulariser"] == pytest.approx(0.75 * 20 + 3 * 0.25 * 18)


def test_a_client_of_which_no_model_is_known_adds_nothing() -> None:
    told = joint_terms(REFERENCE, BOTH, seen({"1": 0.75}) | {"2": Seen(0.25, None, None)}, 2.0)
    assert told["regulariser"] == pytest.approx(15.0)


def test_products_that_nearly_coincide_are_told_apart_beyond_what_squares_resolve() -> None:
    """A distance of 1e-12 beside a norm of 1, of which the squares' difference would be lost."""
    one = term([[1], [0]], [[1, 0]])
    near = term([[1 + 1e-12], [0]], [[1, 0]])
    assert mismatch({"w": one}, {"w": near}) == pytest.approx(1e-12, rel=1e-3)
