"""FedSLM's statements on subspaces, misalignment and fusion: bounds hold, are reached, and fail with their premises."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense_fedslm_theory as dense
from reference.random_factors import bounded, normal
from torch import Tensor

from coterie.maths.keys import Key
from coterie.theory.fedslm.aggregation import Group, barycentre, compressed_group, theorem_2, theorem_3
from coterie.theory.fedslm.misalignment import (
    CoreLoss,
    Quadratic,
    commutator,
    commutator_from_below,
    misalignment_bound,
    proposition_2a,
    proposition_2b,
    proposition_7,
    propositions_5_and_6,
)
from coterie.theory.fedslm.subspaces import (
    amplification,
    condition,
    effective_smoothness,
    geometric_core,
    lemma_6,
    proposition_1,
    residuals,
    shells,
    smoothness_of_factors,
    subspace,
    truncated,
)

ROOM = 1 + 1e-9
"""What rounding may add to a bound that is met."""


def diag(*values: float) -> Tensor:
    return torch.diag(torch.tensor(values, dtype=torch.float64))


def spread(seed: int, size: int, least: float = 0.5) -> Tensor:
    """A symmetric matrix with eigenvalues from `least` to 2 in directions of its own."""
    Q = torch.linalg.qr(normal(seed, size, size)).Q
    return Q * torch.linspace(least, 2, size, dtype=torch.float64) @ Q.T


@st.composite
def layers(draw: st.DrawFn) -> tuple[int, Tensor, int]:
    """A seed, a layer W of any shape, and a rank that it has."""
    seed, m, n = draw(st.integers(0, 10_000)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    W = normal(seed, m, n)
    q = min(m, n)
    if draw(st.booleans()):  # a spectrum that falls fast
        U, _, V = torch.linalg.svd(W, full_matrices=False)
        W = U * 0.3 ** torch.arange(q, dtype=torch.float64) @ V
    return seed, W, draw(st.integers(1, q))


def scaling(seed: int, rank: int) -> Tensor:
    return normal(seed + 17, rank, rank) + 2 * torch.eye(rank, dtype=torch.float64)


def toy(seed: int, W: Tensor, *, singular: bool = False) -> Quadratic:
    """A group's loss near W; `singular` takes away the curvature of a direction, if there is more than one."""
    m, n = W.shape
    least = 0.0 if singular and n > 1 else 0.5
    return Quadratic(W + 0.3 * normal(seed + 1, m, n), spread(seed + 2, m), spread(seed + 3, n, least))


# Definitions 1 to 3, Proposition 1, Lemmas 3 and 6


@bounded
@given(layers(), st.booleans())
def test_projectors_are_nested_and_absorb_each_other(layer: tuple[int, Tensor, int], scaled: bool) -> None:
    seed, W, rank = layer
    space = subspace(*truncated(W, rank, scaling(seed, rank) if scaled else None))
    P, Q = dense.projectors(W, rank)
    torch.testing.assert_close(space.U0 @ space.U0.T, P)
    torch.testing.assert_close(space.V0.T @ space.V0, Q)
    plain = subspace(*truncated(W, min(W.shape)))
    for small in range(1, rank + 1):
        nesting = proposition_1(plain.cut(small), plain.cut(rank))
        assert max(nesting.left, nesting.right) < 1e-12
        P1, _ = dense.projectors(W, small)
        torch.testing.assert_close(P1 @ P, P1)


def test_models_compressed_on_their_own_are_not_nested_and_a_larger_one_can_leave_out_more() -> None:
    """The premise of Proposition 1, one decomposition, as it fails for Dobi-SVD trained ratio by ratio (L6)."""
    W = diag(3, 2, 1)
    first = torch.eye(3, dtype=torch.float64)
    small, large = subspace(first[:, :1], first[:1]), subspace(first[:, 1:], first[1:])
    assert proposition_1(small, large).left == pytest.approx(1)
    mixed = proposition_1(subspace(first[:, :1], first[2:]), subspace(first[:, :2], first[:2]))
    assert (mixed.left, mixed.right) == pytest.approx((0, 1))
    assert float(small.leave(W).norm()) == pytest.approx(math.sqrt(5))
    assert float(large.leave(W).norm()) == pytest.approx(3)


def test_factors_without_full_rank_have_no_projector() -> None:
    with pytest.raises(ValueError, match="ranks 1 and 2"):
        subspace(torch.ones(3, 2), torch.eye(2))
    with pytest.raises(ValueError, match="no truncation"):
        truncated(torch.ones(3, 2), 3)


@bounded
@given(layers())
def test_residuals_of_all_ranks_are_those_of_projectors_and_fall(layer: tuple[int, Tensor, int]) -> None:
    seed, W, _ = layer
    q = min(W.shape)
    space = subspace(*truncated(W, q))
    for M in (W, W + normal(seed + 5, *W.shape)):
        delta = residuals(shells(space, M))
        for rank in range(q + 1):
            P, Q = dense.projectors(W, rank)
            assert float(delta[rank]) == pytest.approx(float((M - P @ M @ Q).norm()), abs=1e-9)
        assert bool((delta.diff() <= 1e-12).all())
    spectrum = torch.linalg.svdvals(W)
    closed = residuals(torch.nn.functional.pad(spectrum.square(), (0, 1)))
    torch.testing.assert_close(residuals(shells(space, W)), closed, atol=1e-9, rtol=0)


def test_at_full_rank_a_layer_that_is_not_square_can_still_leave_out_a_part_of_another_reference() -> None:
    """So a group's compression term need not vanish as its rank grows, as the text after Proposition 7 has it."""
    W, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    space = subspace(*truncated(W, 1))
    assert residuals(shells(space, other)).tolist() == pytest.approx([math.sqrt(2), 1])


def test_the_closed_form_of_a_residual_is_of_plain_svd_whitened_factors_lose_more_of_the_weights() -> None:
    """L5, L7: factors of W S cut at rank k have the tail of W S as their loss in outputs, not that of W in weights."""
    W, S = normal(3, 5, 4), spread(8, 4, 0.1)
    U0, spectrum, V0 = torch.linalg.svd(W @ S, full_matrices=False)
    U, V = U0 * spectrum.sqrt(), torch.linalg.solve(S, spectrum.sqrt()[:, None] * V0, left=False)
    space, plain = subspace(U, V), torch.linalg.svdvals(W)
    assert float(amplification(U, V).greatest) <= float(spectrum[0] / torch.linalg.svdvals(S)[-1]) * ROOM
    for rank in (1, 2, 3):
        cut = space.cut(rank)
        torch.testing.assert_close(cut.project(W), U[:, :rank] @ V[:rank])
        lost = cut.leave(W)
        assert float((lost @ S).norm()) == pytest.approx(float(spectrum[rank:].norm()))
        assert float(lost.norm()) > 1.001 * float(plain[rank:].norm())


def test_diagonal_toy_diag_1_2_scaled_by_diag_4_1_keeps_diag_1_0() -> None:
    """N22: activations decide which direction stays; the loss is 4 in outputs where plain SVD has 16."""
    W, S = diag(1, 2), diag(4, 1)
    U0, spectrum, V0 = torch.linalg.svd(W @ S)
    whitened = subspace(U0[:, :1], spectrum[:1, None] * V0[:1] @ torch.linalg.inv(S))
    plain = subspace(*truncated(W, 1))
    torch.testing.assert_close(whitened.project(W), diag(1, 0))
    torch.testing.assert_close(plain.project(W), diag(0, 2))
    assert [float((each.leave(W) @ S).square().sum()) for each in (whitened, plain)] == pytest.approx([4, 16])
    assert [float(each.leave(W).norm()) for each in (whitened, plain)] == pytest.approx([2, 1])


@bounded
@given(layers(), st.booleans())
def test_the_geometric_core_is_the_nearest_and_reaches_the_projection(
    layer: tuple[int, Tensor, int], scaled: bool
) -> None:
    seed, W, rank = layer
    U, V = truncated(W, rank, scaling(seed, rank) if scaled else None)
    W_hat = normal(seed + 6, *W.shape)
    core, space = geometric_core(U, V, W_hat), subspace(U, V)
    torch.testing.assert_close(U @ core @ V, space.project(W_hat), atol=1e-7, rtol=1e-6)
    other = core + 0.1 * normal(seed + 7, rank, rank)
    assert float((U @ core @ V - W_hat).norm()) <= float((U @ other @ V - W_hat).norm()) * ROOM


def test_the_geometric_core_of_the_layer_itself_is_the_identity() -> None:
    W = normal(2, 4, 6)
    torch.testing.assert_close(geometric_core(*truncated(W, 3), W), torch.eye(3, dtype=torch.float64))


@bounded
@given(layers(), st.booleans())
def test_lemma_6_holds_and_bounds_of_the_factors_are_closer(layer: tuple[int, Tensor, int], scaled: bool) -> None:
    seed, W, rank = layer
    S = scaling(seed, rank) if scaled else None
    found = lemma_6(W, normal(seed + 4, rank, rank), S)
    assert found.lower <= found.least * ROOM
    assert found.least <= found.measured * ROOM
    assert found.measured <= found.greatest * ROOM
    assert found.greatest <= found.upper * ROOM


def test_lemma_6_is_reached_at_either_end_and_everywhere_by_a_flat_spectrum() -> None:
    W = diag(4, 2, 1)
    last, first = diag(0, 0, 1), diag(1, 0, 0)
    assert lemma_6(W, first).measured == pytest.approx(lemma_6(W, first).upper) == pytest.approx(4)
    assert lemma_6(W, last).measured == pytest.approx(lemma_6(W, last).lower) == pytest.approx(1)
    flat = lemma_6(diag(2, 2), normal(1, 2, 2))
    assert flat.lower == pytest.approx(flat.measured) == pytest.approx(flat.upper)


def test_the_scaling_of_eq_15_cancels_in_the_product() -> None:
    """L5."""
    W = normal(4, 5, 3)
    (U, V), (U2, V2) = truncated(W, 2), truncated(W, 2, scaling(4, 2))
    torch.testing.assert_close(U @ V, U2 @ V2)
    assert not torch.allclose(V, V2)


@bounded
@given(layers(), st.booleans())
def test_the_loss_of_a_core_is_as_smooth_as_definition_1_says(layer: tuple[int, Tensor, int], scaled: bool) -> None:
    """Lemma 7."""
    seed, W, rank = layer
    S = scaling(seed, rank) if scaled else None
    U, V = truncated(W, rank, S)
    loss = toy(seed, W)
    f, X, Y = CoreLoss(loss, U, V), normal(seed + 8, rank, rank), normal(seed + 9, rank, rank)
    change = float((f.gradient(X) - f.gradient(Y)).norm()) / float((X - Y).norm())
    of_factors = smoothness_of_factors(loss.smoothness, U, V)
    paper = effective_smoothness(loss.smoothness, float(torch.linalg.svdvals(W)[0]), S)
    assert change <= of_factors * ROOM
    assert of_factors <= paper * ROOM


def test_the_effective_smoothness_is_reached_by_squared_distance() -> None:
    W, eye = diag(3, 1), torch.eye(2, dtype=torch.float64)
    f = CoreLoss(Quadratic(W, eye, eye), *truncated(W, 2))
    step = f.gradient(diag(2, 1)) - f.gradient(diag(1, 1))
    assert float(step.norm()) == pytest.approx(effective_smoothness(1.0, 3.0)) == pytest.approx(9)
    assert condition(None) == 1
    assert condition(diag(4, 1)) == pytest.approx(4)


# Propositions 2, 5, 6, 7


@bounded
@given(layers(), st.booleans(), st.booleans())
def test_the_best_core_is_that_of_least_squares_and_proposition_2_holds(
    layer: tuple[int, Tensor, int], scaled: bool, singular: bool
) -> None:
    seed, W, rank = layer
    S = scaling(seed, rank) if scaled else None
    U, V = truncated(W, rank, S)
    loss = toy(seed, W, singular=singular)
    X = torch.eye(rank, dtype=torch.float64) + normal(seed + 8, rank, rank)
    f = CoreLoss(loss, U, V)
    best = f.minimiser(X)
    near = dense.best_core(loss.A, loss.C, loss.Wloc, U, V, X)
    assert float((best - near).norm()) <= 1e-5 * (1 + float(near.norm()))
    assert loss.loss(U @ X @ V) - loss.loss(U @ best @ V) == pytest.approx(f.gap(X), abs=1e-8, rel=1e-6)
    for growth in (proposition_2a(loss, U, V, X), proposition_2b(loss, U, V, W + normal(seed + 10, *W.shape))):
        assert growth.measured <= growth.bound * ROOM
        assert growth.bound <= growth.by_gradient * ROOM


def test_proposition_2_is_reached_where_the_growth_is_slowest_and_the_factors_greatest() -> None:
    W, eye = diag(2, 2), torch.eye(2, dtype=torch.float64)
    growth = proposition_2a(Quadratic(W, eye, eye), *truncated(W, 2), diag(3, 1))
    assert growth.measured == pytest.approx(growth.bound) == pytest.approx(growth.by_gradient) == pytest.approx(4)


def test_gradient_steps_lower_the_optimisation_residual_to_nothing() -> None:
    W = normal(5, 4, 4)
    loss, (U, V) = toy(5, W), truncated(W, 2)
    f, X, seen = CoreLoss(loss, U, V), torch.eye(2, dtype=torch.float64), []
    for _ in range(4):
        seen.append(proposition_2a(loss, U, V, X).measured)
        for _ in range(100):
            X = X - f.gradient(X) / smoothness_of_factors(loss.smoothness, U, V)
    assert all(after < before for before, after in pairwise(seen))
    assert seen[-1] < 1e-3 * seen[0]


def test_a_common_target_has_no_misalignment() -> None:
    """Proposition 2(b): the group's optimum itself as the reference, isotropic curvature."""
    W, eye = diag(3, 2, 1), torch.eye(3, dtype=torch.float64)
    W_hat = normal(6, 3, 3)
    growth = proposition_2b(Quadratic(W_hat, eye, eye), *truncated(W, 2), W_hat)
    assert growth.gap == pytest.approx(0, abs=1e-20)
    assert growth.measured == pytest.approx(0, abs=1e-10)


def test_without_a_unique_minimiser_the_one_that_training_finds_can_break_proposition_2b() -> None:
    """The choice of the minimiser is not immaterial: Delta is 0 here, while the trained core stays away from it."""
    W, eye = diag(1, 1), torch.eye(2, dtype=torch.float64)
    loss = Quadratic(diag(3, 3), eye, diag(1, 0))  # inputs that never use the second direction
    U, V = truncated(W, 2)
    W_hat = diag(3, 3)
    growth = proposition_2b(loss, U, V, W_hat)
    trained = CoreLoss(loss, U, V).minimiser(torch.eye(2, dtype=torch.float64))
    assert growth.bound == pytest.approx(0, abs=1e-12)
    assert float((U @ trained @ V - W_hat).norm()) == pytest.approx(2)
    own = CoreLoss(loss, U, V).minimiser(geometric_core(U, V, W))  # of the layer itself, training starts there
    torch.testing.assert_close(own, trained)


@bounded
@given(layers())
def test_propositions_5_and_6_hold_and_the_gradient_at_the_projection_is_closer(
    layer: tuple[int, Tensor, int],
) -> None:
    seed, W, rank = layer
    space, loss = subspace(*truncated(W, rank)), toy(seed, W)
    found = propositions_5_and_6(loss, space, W + 0.1 * normal(seed + 11, *W.shape))
    assert found.measured <= found.by_projection * ROOM
    assert found.by_projection <= found.bound * ROOM + 1e-12
    assert found.commutator == pytest.approx(dense.commutator(loss.A, loss.C, *dense.projectors(W, rank)), abs=1e-9)


def test_aligned_curvature_and_a_gradient_outside_the_subspace_leave_no_misalignment() -> None:
    """Proposition 5, with curvature that is far from isotropic and an optimum that is not the reference."""
    W = diag(3, 2, 1)
    loss = Quadratic(W + diag(0, 0, 5), diag(7, 2, 1), diag(1, 4, 9))
    found = propositions_5_and_6(loss, subspace(*truncated(W, 2)), W)
    assert (found.leakage, found.commutator, found.measured) == pytest.approx((0, 0, 0), abs=1e-12)
    assert found.residual == pytest.approx(1)


def test_either_premise_of_proposition_5_is_needed_but_both_can_fail_and_cancel() -> None:
    W, eye = diag(2, 1), torch.eye(2, dtype=torch.float64)
    space = subspace(*truncated(W, 1))
    coupled = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    leaking = propositions_5_and_6(Quadratic(W + diag(1, 0), eye, eye), space, W)
    assert (leaking.commutator, leaking.measured) == pytest.approx((0, 1), abs=1e-12)
    assert leaking.bound == pytest.approx(1)
    bent = Quadratic(W, coupled, coupled)
    turned = propositions_5_and_6(bent, space, W)
    assert turned.leakage == pytest.approx(0)
    assert turned.measured == pytest.approx(0.0625)  # a = c = 2 at the direction kept, 1/2 beside it: 0.25 / 4
    cancelling = Quadratic(W + diag(-0.0625, 0), coupled, coupled)  # 4 dx = -0.25
    both = propositions_5_and_6(cancelling, space, W)
    assert min(both.leakage, both.commutator) > 0.2
    assert both.measured == pytest.approx(0, abs=1e-12)


def test_proposition_6_is_reached_by_curvature_that_couples_the_two_directions() -> None:
    """One row, kept direction first: the residual lies where the commutator is greatest."""
    W = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    C = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    W_hat = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    loss = Quadratic(W_hat, torch.eye(1, dtype=torch.float64), C)
    found = propositions_5_and_6(loss, subspace(*truncated(W, 1)), W_hat)
    assert found.measured == pytest.approx(found.bound) == pytest.approx(1.5)
    compressed = proposition_7(loss, *truncated(W, 1), W_hat)
    assert (compressed.heterogeneity, compressed.compression) == pytest.approx((0, 3))
    assert compressed.measured <= compressed.bound
    assert compressed.bound == pytest.approx(3 * math.sqrt(1.5))


def test_the_third_derivative_in_proposition_6_is_reached_too() -> None:
    """L(x, y) = x^2 + 2 x (y - 3)^2 at (0, 3), x kept: neither leakage nor commutator, mu = 2, rho = 4 on the way."""
    at_projection = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    loss = at_projection[0] ** 2 + 2 * at_projection[0] * (at_projection[1] - 3) ** 2
    (gradient,) = torch.autograd.grad(loss, at_projection)
    best = -float(gradient[0]) / 2  # the loss is x^2 + 18 x at y = 0
    assert abs(best) == pytest.approx(9)
    assert misalignment_bound(0, 0, 3, 2, rho=4) == pytest.approx(9)


def test_proposition_6_asks_for_curvature_on_the_subspace() -> None:
    W, eye = diag(2, 1), torch.eye(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="c1"):
        propositions_5_and_6(Quadratic(W, eye, diag(0, 1)), subspace(*truncated(W, 1)), W)
    with pytest.raises(ValueError, match="c1"):
        misalignment_bound(1, 1, 1, 0.0)


@bounded
@given(st.integers(0, 10_000), st.integers(1, 2), st.sampled_from([0.5, 5.0, 50.0]))
def test_proposition_6_holds_without_its_remainder_for_a_loss_that_is_not_quadratic(
    seed: int, rank: int, tau: float
) -> None:
    """L(W) = |W - Wloc|^2 / 2 + tau sum log cosh W: its Hessian varies by at most rho = tau 4 / 3^1.5 per unit of W.

    The larger tau breaks the stability condition of the paper by far.
    """
    W = normal(seed, 3, 2)
    Wloc, W_hat = W + normal(seed + 1, 3, 2), W + 0.1 * normal(seed + 2, 3, 2)
    space = subspace(*truncated(W, rank))

    def gradient(M: Tensor) -> Tensor:
        return M - Wloc + tau * torch.tanh(M)

    def weights(M: Tensor) -> Tensor:
        return 1 + tau / torch.cosh(M).square()

    X, to_weights = space.coordinates(W_hat), dense.core_map(space.U0, space.V0)
    for _ in range(60):  # Newton on the core, damped: the loss is convex
        inner = space.U0 @ X @ space.V0
        hessian = to_weights.T @ (weights(inner).flatten()[:, None] * to_weights)
        step = torch.linalg.solve(hessian, space.coordinates(gradient(inner)).flatten()).reshape(X.shape)
        X = X - step / (1 + float(step.norm()))
    assert float(space.coordinates(gradient(space.U0 @ X @ space.V0)).norm()) < 1e-7
    Pi = torch.kron(space.U0 @ space.U0.T, space.V0.T @ space.V0)
    H = torch.diag(weights(W_hat).flatten())
    bound = misalignment_bound(
        leakage=float(space.coordinates(gradient(W_hat)).norm()),
        commutator=float(torch.linalg.matrix_norm(H @ Pi - Pi @ H, 2)),
        residual=float(space.leave(W_hat).norm()),
        mu=1.0,
        rho=tau * 4 / 3**1.5,
    )
    assert float((X - space.coordinates(W_hat)).norm()) <= bound + 1e-7


def test_power_steps_find_the_commutator_from_below() -> None:
    W = normal(9, 6, 5)
    loss, space = toy(9, W), subspace(*truncated(W, 3))
    exact = commutator(loss, space)
    few, many = (commutator_from_below(loss.curvature, space, Key(1), steps) for steps in (2, 200))
    assert few <= many <= exact * ROOM
    assert many >= 0.999 * exact
    aligned = Quadratic(diag(3, 2), diag(1, 5), diag(2, 1))
    assert commutator_from_below(aligned.curvature, subspace(*truncated(diag(3, 2), 1)), Key(1)) == 0


@bounded
@given(layers(), st.booleans())
def test_proposition_7_holds_in_both_forms(layer: tuple[int, Tensor, int], singular: bool) -> None:
    seed, W, rank = layer
    found = proposition_7(toy(seed, W, singular=singular), *truncated(W, rank), W + 0.2 * normal(seed + 12, *W.shape))
    assert found.gap <= found.gap_sharp * ROOM
    assert found.gap_sharp <= found.gap_bound * ROOM
    assert found.measured <= found.bound * ROOM


def test_proposition_7_is_reached_where_only_one_of_its_causes_is_there() -> None:
    W, eye = diag(2, 1), torch.eye(2, dtype=torch.float64)
    apart = proposition_7(Quadratic(W + diag(1, 0), eye, eye), *truncated(W, 2), W)
    assert apart.compression == pytest.approx(0, abs=1e-12)
    assert apart.gap == pytest.approx(apart.gap_bound) == pytest.approx(0.5)
    flat = diag(2, 2)
    same = proposition_7(Quadratic(flat + diag(1, 0), eye, eye), *truncated(flat, 2), flat)
    assert same.measured == pytest.approx(same.bound) == pytest.approx(1)


def test_the_mean_of_distances_is_least_at_the_median_not_at_the_barycentre() -> None:
    """Reading (i) after Proposition 7 has the barycentre, which is least in squares."""
    one = torch.ones(1, 1, dtype=torch.float64)
    optima = [0 * one, 0 * one, one]

    def mean_heterogeneity(W_hat: Tensor) -> float:
        return sum(proposition_7(Quadratic(each, one, one), one, one, W_hat).heterogeneity / 3 for each in optima)

    middle = barycentre([Group(1 / 3, each) for each in optima])
    assert mean_heterogeneity(0 * one) == pytest.approx(1 / 3)
    assert mean_heterogeneity(middle) == pytest.approx(4 / 9)


# Theorems 2 and 3


def test_fedslm_barycentre_diag_4_1_rank_1_and_full() -> None:
    """N26: groups of rank 1 and of full models, equal mass, no training."""
    W = diag(4, 1)
    groups = [compressed_group(0.5, *truncated(W, 1)), Group(0.5, W)]
    torch.testing.assert_close(barycentre(groups), diag(4, 0.5))
    found = theorem_2(W, groups)
    assert (found.measured, found.bound, found.residual) == pytest.approx((0.5, 0.5, 0.5))
    assert found.moved == pytest.approx((0, 0), abs=1e-12)
    assert found.residuals == pytest.approx((1, 0), abs=1e-12)
    ahead = theorem_3(torch.tensor([16.0, 1.0, 0.0]), [1, 3], [0.5, 0.5])
    assert (ahead.exact, ahead.bound, ahead.worst) == pytest.approx((0.5, 0.5, 1))


def test_identity_cores_leave_the_compressed_layer() -> None:
    W = normal(1, 4, 3)
    U, V = truncated(W, 2)
    torch.testing.assert_close(compressed_group(1.0, U, V).W, U @ V)
    torch.testing.assert_close(compressed_group(1.0, U, V, torch.eye(2)).W, U @ V)


def test_zero_training_at_one_rank_loses_the_tail_of_the_spectrum() -> None:
    W = normal(2, 5, 4)
    spectrum = torch.linalg.svdvals(W)
    found = theorem_2(W, [compressed_group(share, *truncated(W, 2)) for share in (0.2, 0.3, 0.5)])
    tail = float(spectrum[2:].norm())
    assert found.measured == pytest.approx(found.bound) == pytest.approx(tail)
    ahead = theorem_3(shells(subspace(*truncated(W, 4)), W), [2, 2, 2], [0.2, 0.3, 0.5])
    assert (ahead.exact, ahead.bound, ahead.worst) == pytest.approx((tail, tail, tail))


def test_averages_of_cores_in_a_group_are_averages_of_its_products() -> None:
    U, V = truncated(normal(3, 5, 6), 3)
    cores, shares = [normal(seed, 3, 3) for seed in (4, 5, 6)], [0.2, 0.3, 0.5]
    mean = torch.stack([p * core for p, core in zip(shares, cores, strict=True)]).sum(0)
    products = [compressed_group(p, U, V, core) for p, core in zip(shares, cores, strict=True)]
    torch.testing.assert_close(U @ mean @ V, barycentre(products), atol=1e-12, rtol=0)


@st.composite
def federations(draw: st.DrawFn) -> tuple[int, Tensor, list[int], list[float]]:
    """A seed, a layer, ranks of its groups up to q + 1 (full models), and shares."""
    seed, W, _ = draw(layers())
    ranks = draw(st.lists(st.integers(1, min(W.shape) + 1), min_size=1, max_size=4))
    masses = [draw(st.integers(1, 5)) for _ in ranks]
    return seed, W, ranks, [mass / sum(masses) for mass in masses]


def trained(seed: int, W: Tensor, ranks: list[int], shares: list[float]) -> list[Group]:
    groups = []
    for index, (rank, share) in enumerate(zip(ranks, shares, strict=True)):
        if rank > min(W.shape):
            groups.append(Group(share, W + 0.2 * normal(seed + index, *W.shape)))
        else:
            core = torch.eye(rank, dtype=torch.float64) + 0.2 * normal(seed + index, rank, rank)
            groups.append(compressed_group(share, *truncated(W, rank), core))
    return groups


@bounded
@given(federations(), st.booleans())
def test_theorem_2_holds_and_orthogonality_is_closer(
    world: tuple[int, Tensor, list[int], list[float]], elsewhere: bool
) -> None:
    seed, W, ranks, shares = world
    W_hat = W + normal(seed + 20, *W.shape) if elsewhere else W
    found = theorem_2(W_hat, trained(seed, W, ranks, shares))
    assert found.measured <= found.orthogonal * ROOM
    assert found.orthogonal <= found.bound * ROOM
    assert found.residual <= found.bound * ROOM


@bounded
@given(federations())
def test_what_a_run_shows_of_theorem_2_is_below_its_two_parts(
    world: tuple[int, Tensor, list[int], list[float]],
) -> None:
    """moved <= ||eps_opt|| + ||eps_mis||, by way of the best cores of a toy."""
    seed, W, ranks, shares = world
    found = theorem_2(W, trained(seed, W, ranks, shares))
    for index, rank in enumerate(ranks):
        if rank <= min(W.shape):
            U, V = truncated(W, rank)
            core = torch.eye(rank, dtype=torch.float64) + 0.2 * normal(seed + index, rank, rank)
            loss = toy(seed + index, W)
            parts = proposition_2a(loss, U, V, core).measured + proposition_2b(loss, U, V, W).measured
            assert found.moved[index] <= parts * ROOM


@bounded
@given(federations(), st.booleans())
def test_theorem_3_holds_and_the_exact_error_is_that_of_the_fused_layer(
    world: tuple[int, Tensor, list[int], list[float]], elsewhere: bool
) -> None:
    seed, W, ranks, shares = world
    W_hat = W + normal(seed + 20, *W.shape) if elsewhere else W
    whole = subspace(*truncated(W, min(W.shape)))
    groups = [
        Group(share, W_hat) if rank > whole.rank else Group(share, whole.cut(rank).project(W_hat), whole.cut(rank))
        for rank, share in zip(ranks, shares, strict=True)
    ]
    ahead, after = theorem_3(shells(whole, W_hat), ranks, shares), theorem_2(W_hat, groups)
    assert ahead.exact == pytest.approx(after.measured, abs=1e-9)
    assert ahead.bound == pytest.approx(after.residual, abs=1e-9)
    assert ahead.exact <= ahead.bound * ROOM + 1e-12
    assert ahead.bound <= ahead.worst * ROOM + 1e-12


def test_theorem_3_is_strict_for_two_ranks() -> None:
    found = theorem_3(torch.tensor([9.0, 4.0, 1.0, 0.0]), [1, 2], [0.5, 0.5])
    assert found.exact == pytest.approx(math.sqrt(2))
    assert found.bound == pytest.approx((math.sqrt(5) + 1) / 2)
    assert found.worst == pytest.approx(math.sqrt(5))


def test_groups_that_trained_towards_another_target_break_theorem_3() -> None:
    """Its premise is a common target; Theorem 2 still holds."""
    W = diag(4, 1)
    groups = [compressed_group(0.5, *truncated(W, 1), torch.tensor([[2.0]])), Group(0.5, W)]
    found = theorem_2(W, groups)
    assert found.residual == pytest.approx(0.5)
    assert found.measured > 2
    assert found.measured <= found.orthogonal <= found.bound


def test_more_data_in_groups_of_higher_rank_lowers_the_bound_but_not_the_worst_case() -> None:
    energies = torch.tensor([9.0, 4.0, 1.0, 0.0])
    even, high = theorem_3(energies, [1, 3], [0.5, 0.5]), theorem_3(energies, [1, 3], [0.2, 0.8])
    assert high.bound < even.bound
    assert high.worst == even.worst


def test_shares_and_ranks_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        barycentre([Group(0.5, diag(1))])
    with pytest.raises(ValueError, match=r"0 \.\.\. 2"):
        theorem_3(torch.tensor([1.0, 0.0]), [3], [1.0])
