"""Contributions to FedSEE's experts: smoothing, warm start, and who trains and uses which expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.algorithms.contributions import assigned, calibrating, smoothed, warm_start
from coterie.maths.keys import root_key
from coterie.maths.simplex import balanced

WIDE = torch.float64


def feasible(seed: int, M: int, N: int) -> Tensor:
    return balanced(root_key(seed).uniform((M, N), 0.1, 1.0, WIDE), torch.arange(N), N, sweeps=200)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 10**6), st.floats(0.05, 1.0))
def test_smoothed_contributions_of_all_clients_stay_feasible(M: int, N: int, seed: int, rate: float) -> None:
    before, found = feasible(seed, M, N), feasible(seed + 1, M, N)
    names = [str(i) for i in range(N)]
    C = smoothed(dict(zip(names, before.T, strict=True)), dict(zip(names, found.T, strict=True)), rate, N)
    now = torch.stack([C[name] for name in names], dim=1)
    assert torch.allclose(now, (1 - rate) * before + rate * found, atol=1e-14)
    assert torch.allclose(now.sum(dim=1), torch.ones(M, dtype=WIDE), atol=1e-9)
    assert torch.allclose(now.sum(dim=0), torch.full((N,), M / N, dtype=WIDE), atol=1e-9)


def test_absent_clients_keep_their_columns_and_all_sums_stay_m_over_n() -> None:
    before, found = feasible(1, 3, 4), feasible(2, 3, 2)
    old = dict(zip("abcd", before.T, strict=True))
    now = smoothed(old, {"b": found[:, 0], "d": found[:, 1]}, 0.9, 4)
    assert torch.equal(now["a"], old["a"]) and torch.equal(now["c"], old["c"])
    assert torch.allclose(now["b"], 0.1 * old["b"] + 0.9 * found[:, 0] / 2, atol=1e-14)
    assert all(float(column.sum()) == pytest.approx(3 / 4, abs=1e-9) for column in now.values())
    late = smoothed({"a": old["a"]}, {"b": found[:, 0], "d": found[:, 1]}, 0.9, 4)
    assert torch.allclose(late["b"], found[:, 0] / 2) and float(late["b"].sum()) == pytest.approx(3 / 4, abs=1e-9)


def test_weights_start_from_contributions_spread_over_a_clients_blocks() -> None:
    C = {"a": torch.tensor([0.6, 0.2], dtype=WIDE), "b": torch.tensor([0.1, 0.5], dtype=WIDE)}
    omega = warm_start(C, ["a", "a", "b", "c"], 2, 4)
    expected = [[0.3, 0.3, 0.1, 0.25], [0.1, 0.1, 0.5, 0.25]]
    assert torch.allclose(omega, torch.tensor(expected, dtype=WIDE))


def of(*column: float, U: int = 4, L: int = 1, tau: float = 0.05) -> Any:
    return assigned(torch.tensor(column, dtype=WIDE), U, L, tau)


def test_assignment_ranks_cuts_and_normalises_over_what_is_kept() -> None:
    one = of(0.1, 0.4, 0.2, 0.3, U=3, L=2)
    assert one.inference == (1, 2, 3) and one.active == (1, 3)
    assert one.target == pytest.approx((0.0, 4 / 9, 2 / 9, 3 / 9))
    assert of(0.1, 0.4, 0.2, 0.3).active == (1,) and of(0.1, 0.4, 0.2, 0.3, L=4).active == (0, 1, 2, 3)


def test_the_floor_leaves_fewer_to_train_but_never_none() -> None:
    assert of(0.04, 0.9, 0.03, 0.03, L=4).active == (1,)
    assert of(0.2, 0.3, 0.3, 0.2, L=3, tau=0.25).active == (1, 2)
    assert of(0.2, 0.3, 0.3, 0.2, L=3, tau=0.5).active == (1,)
    assert of(0.5, 0.5, 0.0, 0.0, U=2, L=2, tau=0.5).active == (0, 1)


def test_the_floor_is_for_shares_of_what_a_client_routes_to_however_little_it_contributes() -> None:
    """Columns sum to M / N: each of 40 clients' contributions to 4 experts are a tenth of their shares."""
    assert of(0.01, 0.04, 0.02, 0.03, L=4).active == (0, 1, 2, 3)
    assert of(0.01, 0.04, 0.02, 0.03, L=4, tau=0.25).active == (1, 3)
    assert of(0.4, 1.6, 0.8, 1.2, L=4, tau=0.25).active == (1, 3)
    assert of(0.4, 0.2, 0.2, 0.2, U=2, L=2, tau=0.3).active == (0, 1)


def test_among_equal_contributions_lower_experts_count() -> None:
    assert of(0.25, 0.25, 0.25, 0.25, U=2).inference == (0, 1)
    assert of(0.1, 0.3, 0.3, 0.3, U=3, L=2).active == (1, 2)


def test_a_client_that_contributes_nothing_has_an_even_target() -> None:
    one = of(0.0, 0.0, 0.0, 0.0, U=2)
    assert one.target == (0.5, 0.5, 0.0, 0.0) and one.active == (0,)


def test_calibration_is_to_the_mixture_evenly_to_what_is_routed_to_or_none() -> None:
    one = of(0.1, 0.4, 0.2, 0.3, U=3)
    (mixture,) = calibrating("mixture", 1e-3, one)
    assert mixture.target.tolist() == pytest.approx(list(one.target)) and mixture.weight == 1e-3
    (even,) = calibrating("uniform", 1e-3, one)
    assert even.target.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert calibrating("none", 1e-3, one) == [] and calibrating("mixture", 0.0, one) == []
