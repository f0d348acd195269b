"""Theorem 1 of FedSLM on quadratics: the bound holds, and its floor is one of the proof, not of the method."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.random_factors import bounded, normal
from torch import Tensor

from coterie.theory.fedslm.convergence import Averaging, averaged_cores, theorem_1
from coterie.theory.fedslm.misalignment import CoreLoss, Quadratic
from coterie.theory.fedslm.subspaces import smoothness_of_factors, truncated


def world(seed: int, rank: int, apart: float = 1.0) -> tuple[list[CoreLoss], list[float], float]:
    """Three clients around one layer of 4 x 3, each with an optimum and a curvature of its own, and their L_eff."""
    W = normal(seed, 4, 3)
    U, V = truncated(W, rank)
    clients = []
    for index in range(3):
        left, right = normal(seed + 10 * index + 1, 4, 4), normal(seed + 10 * index + 2, 3, 3)
        Wloc = W + apart * normal(seed + 10 * index + 3, 4, 3)
        clients.append(CoreLoss(Quadratic(Wloc, left @ left.T, right @ right.T), U, V))
    return clients, [0.5, 0.3, 0.2], max(smoothness_of_factors(each.of.smoothness, U, V) for each in clients)


def gap(clients: list[CoreLoss], shares: list[float], X: Tensor) -> float:
    """f(X) - min f of the mean loss, by least squares on the entries of the core."""
    rank = len(X)
    basis = torch.eye(rank * rank, dtype=torch.float64).reshape(-1, rank, rank)
    zero = torch.zeros_like(X)
    hessian, slope = torch.zeros(rank**2, rank**2, dtype=torch.float64), torch.zeros(rank**2, dtype=torch.float64)
    for client, share in zip(clients, shares, strict=True):
        at_zero = client.gradient(zero)
        slope += share * at_zero.flatten()
        hessian += share * torch.stack([(client.gradient(each) - at_zero).flatten() for each in basis], dim=1)
    away = X.flatten() + torch.linalg.solve(hessian, slope)
    return 0.5 * float(away @ hessian @ away)


def start(rank: int) -> Tensor:
    return torch.eye(rank, dtype=torch.float64)


@bounded
@given(
    st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 5), st.integers(1, 12), st.sampled_from([0.1, 0.5, 1.0])
)
def test_theorem_1_holds(seed: int, rank: int, E: int, T: int, part: float) -> None:
    clients, shares, smoothness = world(seed, rank)
    eta = part / (8 * smoothness * E)
    run = averaged_cores(clients, shares, start(rank), eta, E, T)
    rate = theorem_1(smoothness, gap(clients, shares, start(rank)), eta, E, T, run.G)
    assert run.mean_gradient <= rate.bound * (1 + 1e-9)
    assert run.cores.shape == (T + 1, rank, rank)


def long_run(E: int, eta: float, T: int) -> Averaging:
    """Two clients of one weight, with optima 0 and 3 and curvatures 1 and 2; L_eff is 2."""
    one = torch.ones(1, 1, dtype=torch.float64)
    clients = [CoreLoss(Quadratic(t * one, a * one, one), one, one) for t, a in ((0, 1), (3, 2))]
    return averaged_cores(clients, [0.5, 0.5], one, eta, E, T)


def test_the_heterogeneity_floor_is_not_reached_and_one_local_step_has_none() -> None:
    """The gradients' deviations from their mean sum to 0, so they leave the cross term of Eq. 57 and come back by drift
    alone: the floor falls with the step size, and "irreducible" is too much said."""
    alone = long_run(E=1, eta=1 / 16, T=500)
    assert alone.last_gradient < 1e-20
    coarse, fine = long_run(E=4, eta=1 / 64, T=500), long_run(E=4, eta=1 / 256, T=2000)
    assert 1e-6 < coarse.last_gradient < 1e-3 * theorem_1(2, 1, 1 / 64, 4, 500, coarse.G).floor
    assert coarse.last_gradient / 20 < fine.last_gradient < coarse.last_gradient / 12  # as eta^2


def test_equal_clients_drift_nowhere() -> None:
    clients, _, smoothness = world(1, 2)
    run = averaged_cores([clients[0]] * 3, [0.5, 0.3, 0.2], start(2), 1 / (32 * smoothness), 4, 5)
    assert run.G < 1e-9
    X = start(2)
    for _ in range(20):
        X = X - clients[0].gradient(X) / (32 * smoothness)
    torch.testing.assert_close(run.cores[-1], X)


def test_larger_steps_than_the_theorem_s_are_refused_and_its_terms_are_those_of_eq_17() -> None:
    with pytest.raises(ValueError, match=r"up to eta = 0\.0125"):
        theorem_1(5, 1, 0.02, 2, 10, 1)
    rate = theorem_1(5, 1, 0.01, 2, 10, 3, sigma=2)
    assert (rate.optimisation, rate.stochastic, rate.floor) == pytest.approx((20, 0.8, 18))
    assert rate.drift == pytest.approx(8 * 25 * 1e-4 * 4 * (4 + 108))
    assert math.isclose(rate.bound, 20 + 0.8 + 18 + rate.drift)
