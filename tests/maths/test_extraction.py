"""Extraction of experts: the chain rule, what descends where, what is clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.maths.extraction import CLIP, Descent, clipped, flat, mixtures, unflat, weight_gradients
from coterie.maths.keys import root_key
from coterie.maths.simplex import block_sums

WIDE = torch.float64
FREE: dict[str, Any] = {"regulariser": 0.0, "steps": 400}


def descended(descent: Descent, start: Tensor, pool: Tensor, owners: Tensor, targets: Tensor) -> Tensor:
    """The weights after a descent on L_m(B) = ||B - B*_m||^2."""
    clients = len(owners.unique())
    omega = descent.feasible(start, owners, clients)
    for number in range(1, descent.steps + 1):
        gradients = 2 * (mixtures(omega, pool) - targets)
        omega = descent.stepped(number, omega, pool, gradients, owners, clients)
    return omega


def uniform(M: int, P: int) -> Tensor:
    return torch.full((M, P), 1 / P, dtype=WIDE)


@pytest.mark.parametrize("together", [True, False])
def test_pure_clients_of_a_squared_loss_toy_are_found_again(together: bool) -> None:
    """The pool holds each task's own optimum: the weights become the identity, the experts the optima."""
    M = 3
    pool, descent = root_key(1).normal((M, 8), dtype=WIDE), Descent(800, lr=0.03, regulariser=0.0, balanced=together)
    omega = descended(descent, uniform(M, M), pool, torch.arange(M), pool)
    assert torch.allclose(omega, torch.eye(M, dtype=WIDE), atol=1e-9)
    assert torch.allclose(mixtures(omega, pool), pool, atol=1e-8)
    order = torch.tensor([2, 0, 1])
    omega = descended(descent, uniform(M, M), pool[order], torch.arange(M), pool)
    assert torch.allclose(omega[:, order.argsort()], torch.eye(M, dtype=WIDE), atol=1e-9)


def test_one_task_and_one_client_have_one_weight_and_the_upload_for_an_expert() -> None:
    pool = root_key(2).normal((1, 5))
    for together in (True, False):
        omega = descended(Descent(balanced=together), uniform(1, 1), pool, torch.tensor([0]), torch.zeros(1, 5))
        assert omega.tolist() == [[1.0]] and torch.equal(mixtures(omega, pool), pool)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 10**6))
def test_the_chain_rule_is_the_numerical_derivative(M: int, P: int, seed: int) -> None:
    key = root_key(seed)
    pool, omega = key.fold("pool").normal((P, 6), dtype=WIDE), key.fold("omega").uniform((M, P), 0, 1, WIDE)

    def losses(weights: Tensor) -> Tensor:
        return mixtures(weights, pool).sin().sum(dim=1)

    found = weight_gradients(mixtures(omega, pool).cos(), pool)
    for p in range(P):
        step = torch.zeros_like(omega)
        step[:, p] = 1e-6
        numerical = (losses(omega + step) - losses(omega - step)) / 2e-6
        assert torch.allclose(found[:, p], numerical, atol=1e-7)


def test_balanced_weights_hold_both_marginals_and_independent_ones_only_the_rows() -> None:
    """Every task is best served by client 0 alone, which balance does not grant."""
    pool = root_key(3).normal((4, 6), dtype=WIDE)
    owners, targets = torch.tensor([0, 1, 1, 2]), pool[:1].repeat(2, 1)
    apart = descended(Descent(balanced=False, **FREE), uniform(2, 4), pool, owners, targets)
    assert torch.allclose(apart[:, 0], torch.ones(2, dtype=WIDE), atol=1e-3)
    together = descended(Descent(**FREE), uniform(2, 4), pool, owners, targets)
    C = block_sums(together, owners, 3)
    assert torch.allclose(C.sum(dim=1), torch.ones(2, dtype=WIDE), atol=1e-12)
    assert torch.allclose(C.sum(dim=0), torch.full((3,), 2 / 3, dtype=WIDE), atol=1e-6)


def test_between_two_scalings_weights_are_only_kept_from_being_negative() -> None:
    pool, owners = root_key(4).normal((3, 4), dtype=WIDE), torch.arange(3)
    omega = Descent().feasible(torch.tensor([[0.999, 5e-4, 5e-4]]), owners, 3)
    gradients = 100 * pool[1:2] + 100 * pool[2:3]
    for number, sums in ((1, False), (4, False), (5, True), (50, True)):
        moved = Descent(lr=10.0).stepped(number, omega, pool, gradients, owners, 3)
        assert float(moved.min()) >= 0
        assert (abs(float(moved.sum()) - 1) <= 1e-12) == sums
    last = Descent(lr=10.0, steps=3).stepped(3, omega, pool, gradients, owners, 3)
    assert float(last.sum()) == pytest.approx(1, abs=1e-12)


def test_gradients_are_clipped_by_expert_and_by_row_of_the_weights() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0]], dtype=WIDE)
    norms = clipped(rows).norm(dim=1)
    assert torch.allclose(norms, torch.tensor([CLIP, 0.05, 0.0], dtype=WIDE))
    pool, owners = torch.eye(2, dtype=WIDE) * 100, torch.arange(2)
    omega = uniform(1, 2)
    moved = Descent(regulariser=0.0).stepped(1, omega, pool, torch.tensor([[7.0, 0.0]], dtype=WIDE), owners, 2)
    assert torch.allclose(omega - moved, torch.tensor([[0.1 * CLIP, 0.0]], dtype=WIDE), atol=1e-15)


def test_an_experts_gradient_is_clipped_before_the_pool_is_multiplied_by_it() -> None:
    """A row of the weights' gradient below the bound shows it: (7, 24) becomes 0.1 (7, 24) / 25 in a small pool."""
    pool, gradients = torch.eye(2, dtype=WIDE) / 2, torch.tensor([[7.0, 24.0]], dtype=WIDE)
    omega = uniform(1, 2)
    moved = Descent(regulariser=0.0).stepped(1, omega, pool, gradients, torch.arange(2), 2)
    expected = 0.1 * CLIP * torch.tensor([[7 / 25, 24 / 25]], dtype=WIDE) / 2
    assert torch.allclose(omega - moved, expected, atol=1e-15)


@pytest.mark.parametrize("together", [True, False])
def test_the_regulariser_is_added_to_the_slopes_of_either_kind_of_weights(together: bool) -> None:
    """A step without a loss is by lr times the coefficient times the weights, whose row's norm is below the bound."""
    omega, pool = torch.tensor([[0.7, 0.1, 0.2]], dtype=WIDE), torch.zeros(3, 2, dtype=WIDE)
    descent = Descent(regulariser=0.02, balanced=together)
    moved = descent.stepped(1, omega, pool, torch.zeros(1, 2, dtype=WIDE), torch.arange(3), 3)
    shrunk = omega - 0.1 * 0.02 * omega
    expected = shrunk if together else shrunk + (1 - shrunk.sum()) / 3
    assert torch.allclose(moved, expected, atol=1e-15)


def test_the_regulariser_draws_weights_together() -> None:
    pool, owners = torch.zeros(4, 3), torch.arange(4)
    start = torch.tensor([[0.7, 0.1, 0.1, 0.1]], dtype=WIDE)
    kept = descended(Descent(balanced=False, regulariser=0.0), start, pool, owners, torch.zeros(1, 3))
    drawn = descended(Descent(balanced=False), start, pool, owners, torch.zeros(1, 3))
    assert torch.allclose(kept, start, atol=1e-12) and 0.25 < float(drawn[0, 0]) < 0.7


def test_layers_lie_side_by_side_and_come_back() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0)}
    row = flat(tensors, ["b", "a"])
    assert row.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    back = unflat(row, {"b": (4,), "a": (2, 3)})
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
