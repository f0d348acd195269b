"""FedSEE's statements on random instances: every bound holds, is met where it can be, and every fast routine has a
slow twin."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import dense_fedsee_theory as dense
from torch import Tensor

from coterie.maths.extraction import Descent
from coterie.maths.keys import Key
from coterie.theory.fedsee import general_loss, recovery, routing
from coterie.theory.fedsee.extraction import (
    TaskLoss,
    extract,
    extract_balanced,
    mixtures,
    population_losses,
    simplex_least_squares,
    transport_least_squares,
)
from coterie.theory.fedsee.geometry import (
    Statement,
    barycentres,
    client_optima,
    diameter,
    eigenvalues,
    height,
    impurity,
    separation,
    squared_norm,
)
from coterie.theory.fedsee.pool_only import cluster_centres, identity_error, successive_projection, vertex_set_error
from coterie.theory.fedsee.synthetic import (
    Moments,
    anchored,
    complementary,
    dirichlet_halves,
    draw,
    experts_on_eigendirections,
    interior,
    world,
)

F = torch.float64
EPSILONS = (0.0, 0.1, 0.3)
fewer = settings(max_examples=25)
SOLVED = 1e-4
"""What a gap of 1e-13 of a program's largest entry, some hundreds, leaves of an expert where Phi is at least 0.01."""


class Instance(NamedTuple):
    """Experts, inputs whose second moment all tasks share while their distributions differ, and mixtures."""

    key: Key
    Theta: Tensor
    inputs: routing.Inputs
    alpha: Tensor

    @property
    def Phi(self) -> Tensor:
        return self.inputs.Phi()

    def router(self, sharpness: float = 1.0) -> Tensor:
        return (sharpness * self.key.fold("router").normal((len(self.inputs.phi), len(self.Theta)), dtype=F)).softmax(1)


def instance(seed: int, M: int, epsilon: float, more: int = 2) -> Instance:
    """A marker of three values tells tasks apart and is independent of the features."""
    key, l, r, base = Key(seed), 2, 3, 5  # noqa: E741
    markers = dirichlet_halves(key.fold("markers"), M, 3)
    shares = dirichlet_halves(key.fold("shares"), 1, base)[0]
    P = (markers[:, :, None] * shares).reshape(M, 3 * base)
    phi = key.fold("phi").normal((base, r), dtype=F).repeat(3, 1)
    return Instance(
        key,
        key.fold("Theta").normal((M, l, r), dtype=F),
        routing.Inputs(P, phi),
        anchored(key.fold("alpha"), M + more, M, epsilon),
    )


@st.composite
def instances(draw_: st.DrawFn) -> Instance:
    made = instance(draw_(st.integers(0, 2**32)), draw_(st.integers(2, 4)), draw_(st.sampled_from(EPSILONS)))
    least, greatest = extremes(made.Phi)
    assume(least > 1e-2 and greatest / least < 1e4 and height(made.Theta) > 0.05)
    return made


def extremes(Phi: Tensor) -> tuple[float, float]:
    """The least and the greatest eigenvalue, whatever their sign."""
    values = torch.linalg.eigvalsh(Phi)
    return float(values.min()), float(values.max())


def holds(*statements: Statement, slack: float = 1e-8) -> None:
    for one in statements:
        assert math.isfinite(one.lower) or math.isfinite(one.upper)
        assert one.holds(slack), one


def test_a_statement_that_is_broken_does_not_hold() -> None:
    assert not Statement(1.0, upper=0.99).holds() and not Statement(1.0, lower=1.01).holds()
    assert Statement(1.0, upper=1.0, lower=1.0).holds() and Statement(1e6 + 1e-4, upper=1e6).holds()
    assert not Statement(1.0, upper=1 - 1e-6).holds() and not Statement(math.nan, upper=1.0).holds()


# Geometry, programs and estimators beside their slow twins


@given(st.integers(0, 2**32), st.integers(2, 4))
def test_geometry_is_that_of_pairs_and_of_affine_hulls(seed: int, M: int) -> None:
    Theta = Key(seed).normal((M, 2, 3), dtype=F)
    apart = [float((Theta[m] - Theta[k]).norm()) for m in range(M) for k in range(m)]
    assert (diameter(Theta), separation(Theta)) == pytest.approx((max(apart), min(apart)))
    flat = Theta.flatten(1)
    expected = min(dense.affine_distance(flat[m], torch.cat([flat[:m], flat[m + 1 :]])) for m in range(M))
    assert height(Theta) == pytest.approx(expected, rel=1e-9)


def test_collinear_experts_have_no_height_and_one_expert_has_none_to_be_apart_from() -> None:
    line = torch.tensor([[[0.0, 0.0]], [[1.0, 0.0]], [[3.0, 0.0]]], dtype=F)
    assert height(line) == pytest.approx(0, abs=1e-12) and separation(line) == 1 and diameter(line) == 3
    with pytest.raises(ValueError, match="two experts"):
        height(line[:1])
    with pytest.raises(ValueError, match="positive definite"):
        eigenvalues(torch.diag(torch.tensor([1.0, 0.0], dtype=F)))


@fewer
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 4))
def test_fista_on_the_simplex_is_the_best_of_all_faces(seed: int, P: int, rank: int) -> None:
    key = Key(seed)
    root = key.fold("root").normal((P, rank), dtype=F)
    Q, b = root @ root.T, key.fold("b").normal((P,), dtype=F)
    w = simplex_least_squares(Q, b)
    value, _ = dense.on_simplex(Q, b)
    assert float(w.min()) >= 0 and float(w.sum()) == pytest.approx(1, abs=1e-12)
    assert float(0.5 * w @ Q @ w - b @ w) == pytest.approx(value, abs=1e-9)


@fewer
@given(st.integers(0, 2**32), st.integers(2, 3))
def test_the_balanced_program_is_the_best_of_all_faces_of_the_transport_polytope(seed: int, N: int) -> None:
    key = Key(seed)
    roots = key.fold("root").normal((2, N, N), dtype=F)
    Q, b = roots @ roots.mT, key.fold("b").normal((2, N), dtype=F)
    w = transport_least_squares(Q, b)
    value, _ = dense.on_transport(Q, b)
    assert float(w.min()) >= 0
    torch.testing.assert_close(w.sum(dim=1), torch.ones(2, dtype=F), atol=1e-9, rtol=0)
    torch.testing.assert_close(w.sum(dim=0), torch.full((N,), 2 / N, dtype=F), atol=1e-9, rtol=0)
    assert float(0.5 * torch.einsum("mi,mij,mj", w, Q, w) - (b * w).sum()) == pytest.approx(value, abs=1e-7)


def test_stacked_programs_are_those_one_by_one() -> None:
    key = Key(3)
    roots = key.fold("root").normal((4, 6, 6), dtype=F)
    Q, b = roots @ roots.mT, key.fold("b").normal((4, 6), dtype=F)
    one_by_one = torch.stack([simplex_least_squares(Q[m], b[m]) for m in range(4)])
    torch.testing.assert_close(simplex_least_squares(Q, b), one_by_one, atol=1e-6, rtol=0)


def test_fista_agrees_with_slsqp_where_the_optimum_is_no_vertex() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    Theta, Phi, alpha = complementary(256.0)
    pool = barycentres(alpha, Theta)
    ours = extract(pool, population_losses(Theta, Phi)).omega[0]
    assert float(ours.max()) < 0.75

    def objective(w: object) -> float:
        return float(squared_norm(torch.einsum("n,nlr->lr", torch.tensor(w, dtype=F), pool) - Theta[0], Phi))

    theirs = optimize.minimize(
        objective,
        [1 / 3] * 3,
        method="SLSQP",
        bounds=[(0, 1)] * 3,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14},
    )
    torch.testing.assert_close(ours, torch.tensor(theirs.x), atol=5e-5, rtol=0)


@given(st.integers(0, 2**32), st.integers(2, 5))
def test_matchings_are_the_best_of_all_permutations(seed: int, M: int) -> None:
    key = Key(seed)
    found, Theta = key.fold("a").normal((M, 1, 2), dtype=F), key.fold("b").normal((M, 1, 2), dtype=F)
    assert vertex_set_error(found, Theta) == pytest.approx(dense.vertex_set_error(found, Theta), rel=1e-12)
    assert recovery.theorem_3(found, Theta).measured == pytest.approx(dense.worst_name_error(found, Theta), rel=1e-12)


@given(instances())
def test_successive_projection_finds_pure_clients_wherever_they_stand(made: Instance) -> None:
    M = len(made.Theta)
    alpha = torch.cat([torch.eye(M, dtype=F), interior(made.key.fold("more"), 4, M, 0.2)])
    order = made.key.fold("order").permutation(len(alpha)).tolist()
    pool = barycentres(alpha, made.Theta)[order]
    chosen = successive_projection(pool, M)
    assert sorted(order[i] for i in chosen) == list(range(M))
    assert vertex_set_error(pool[chosen], made.Theta) < 1e-9


def test_clusters_of_equal_uploads_are_their_vertices_and_too_few_uploads_are_refused() -> None:
    Theta = Key(0).normal((3, 2, 3), dtype=F)
    assert vertex_set_error(cluster_centres(Theta[[0, 1, 2, 1, 0]], 3), Theta) < 1e-12
    for estimate in (cluster_centres, successive_projection):
        with pytest.raises(ValueError, match="2 uploads"):
            estimate(Theta[:2], 3)


# The synthetic federation


def test_the_world_has_the_sizes_that_are_asked_for() -> None:
    of = world(Key(1), condition=9.0)
    assert of.A.shape == (16, 60) and of.Theta.shape == (6, 12, 16)
    least, greatest = eigenvalues(of.Phi)
    assert (least, greatest) == (pytest.approx(1), pytest.approx(9))
    assert diameter(of.Theta) == pytest.approx(6) and float(of.Theta.mean(dim=0).norm()) < 1e-12
    moved = experts_on_eigendirections(of)
    assert diameter(moved.Theta) == pytest.approx(separation(moved.Theta)) == pytest.approx(6)
    gram = torch.einsum("mlr,klr->mk", moved.Theta @ of.Phi, moved.Theta)
    values = torch.linalg.eigvalsh(gram)[1:]  # the mean is zero
    assert float(values.max() / values.min()) == pytest.approx(9)


def test_anchors_are_as_pure_as_asked_and_interior_clients_inside() -> None:
    alpha = anchored(Key(2), 9, 4, 0.2)
    assert alpha[:4].diagonal().tolist() == pytest.approx([0.8] * 4) and alpha[0, 1] == pytest.approx(0.2 / 3)
    torch.testing.assert_close(alpha.sum(dim=1), torch.ones(9, dtype=F))
    assert impurity(alpha) <= 0.2 + 1e-12
    inside = interior(Key(2), 9, 4, 0.6)
    assert float(inside.min()) >= 0.15 and float(inside.sum(dim=1).max()) == pytest.approx(1)
    with pytest.raises(ValueError, match="3 clients"):
        anchored(Key(2), 3, 4, 0.2)


def test_moments_give_least_squares_of_the_literal_model() -> None:
    """y = W0 x + theta_m A x + zeta, example by example, in 20 dimensions."""
    of = world(Key(4), M=3, l=2, r=4, d=20)
    key, n = Key(5), 60
    x = key.fold("x").normal((n, 20), dtype=F)
    tasks = [i % 3 for i in range(n)]
    W0 = key.fold("W0").normal((2, 20), dtype=F)
    zeta = key.fold("zeta").normal((n, 2), std=of.sigma, dtype=F)
    y = x @ W0.T + torch.stack([of.Theta[m] @ of.A @ x[i] for i, m in enumerate(tasks)]) + zeta
    phi, left = x @ of.A.T, y - x @ W0.T
    moments = Moments(n, phi.T @ phi, left.T @ phi)
    expected = torch.linalg.lstsq(phi, left).solution.T
    torch.testing.assert_close(moments.least_squares(), expected, atol=1e-9, rtol=0)
    halves = [Moments(30, phi[p].T @ phi[p], left[p].T @ phi[p]) for p in (slice(0, 30), slice(30, 60))]
    torch.testing.assert_close((halves[0] + halves[1]).least_squares(), expected, atol=1e-9, rtol=0)


def test_drawn_moments_have_the_law_of_examples() -> None:
    """Means and the noise's covariance over 400 draws of 50 examples, within four standard errors."""
    of = world(Key(6), M=2, l=2, r=3, d=8)
    alpha = torch.tensor([0.3, 0.7], dtype=F)
    drawn = [draw(Key(7).fold(i), alpha, of, 50) for i in range(400)]
    S = torch.stack([each.S for each in drawn]) / 50
    torch.testing.assert_close(S.mean(dim=0), of.Phi, atol=4 * float(S.std(dim=0).max()) / 20, rtol=0)
    mean = torch.einsum("m,mlr->lr", alpha, of.Theta) @ of.Phi
    X = torch.stack([each.X for each in drawn]) / 50
    torch.testing.assert_close(X.mean(dim=0), mean, atol=4 * float(X.std(dim=0).max()) / 20, rtol=0)
    pure = [draw(Key(8).fold(i), torch.tensor([1.0, 0.0], dtype=F), of, 50) for i in range(400)]
    noise = torch.stack([each.X - of.Theta[0] @ each.S for each in pure]).flatten(0, 1) / math.sqrt(50)
    cov = noise.T @ noise / len(noise)
    torch.testing.assert_close(cov, of.sigma**2 * of.Phi, atol=4 * of.sigma**2 * 4 / math.sqrt(800), rtol=0)


def test_too_few_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="3 examples do not determine 16 features"):
        draw(Key(0), torch.tensor([1.0], dtype=F), world(Key(0), M=2), 3).least_squares()


# Theorems 1 to 4, Remark 1 and what belongs to them


@given(instances())
def test_theorem_1_clients_optima_are_barycentres_and_minimise_the_risk(made: Instance) -> None:
    holds(recovery.theorem_1(made.alpha, made.Theta, made.Phi))
    optimum = client_optima(made.alpha[-1:], made.Theta, made.Phi)[0].requires_grad_()
    risk = dense.client_risk(optimum, made.alpha[-1], made.Theta, made.inputs.P, made.inputs.phi)
    (gradient,) = torch.autograd.grad(risk, optimum)
    assert float(gradient.norm()) < 1e-9


@given(instances())
def test_remark_1_bounds_the_bias_of_unequal_second_moments(made: Instance) -> None:
    factors = made.key.fold("roots").normal((len(made.Theta), 3, 3), dtype=F)
    Phis = factors @ factors.mT + 0.1 * torch.eye(3, dtype=F)
    holds(recovery.remark_1(made.alpha, made.Theta, Phis))
    bias = client_optima(made.alpha, made.Theta, Phis) - barycentres(made.alpha, made.Theta)
    torch.testing.assert_close(recovery.covariance_bias(made.alpha, made.Theta, Phis), bias, atol=1e-9, rtol=1e-9)
    assert float(bias[-1].norm()) > 1e-6
    same = recovery.remark_1(made.alpha, made.Theta, Phis[:1].expand_as(Phis))
    assert same.upper == 0 and same.measured < 1e-9


@given(instances())
def test_proposition_2_gives_the_mixing_gap_twice_and_in_its_range(made: Instance) -> None:
    for alpha_i in made.alpha:
        holds(*recovery.proposition_2(alpha_i, made.Theta, made.Phi))
    pure = recovery.proposition_2(torch.eye(len(made.Theta), dtype=F)[0], made.Theta, made.Phi)[1]
    assert pure.measured < 1e-12
    static = made.alpha[-1].expand(len(made.inputs.phi), -1)
    gap = recovery.proposition_2(made.alpha[-1], made.Theta, made.Phi)[1].measured
    assert gap == pytest.approx(
        dense.routed_risk(static, made.alpha[-1], made.Theta, made.Theta, made.inputs.P, made.inputs.phi), rel=1e-8
    )


def test_proposition_2_is_met_on_both_sides_by_equidistant_experts() -> None:
    Theta = experts_on_eigendirections(world(Key(1), condition=1.0)).Theta
    gap = recovery.proposition_2(dirichlet_halves(Key(2), 1, 6)[0], Theta, torch.eye(16, dtype=F))[1]
    assert gap.lower == pytest.approx(gap.measured) == pytest.approx(gap.upper)


@fewer
@given(instances())
def test_theorem_2_bounds_the_error_of_extraction(made: Instance) -> None:
    found = recovery.theorem_2(made.alpha, made.Theta, made.Phi)
    holds(found, slack=SOLVED)
    if impurity(made.alpha) < 1e-12:
        assert found.measured < SOLVED  # Corollary 1


@pytest.mark.parametrize("epsilon", [0.05, 0.2, 0.4])
def test_theorem_2_is_met_by_two_tasks_and_by_complementary_clients_at_condition_one(epsilon: float) -> None:
    Theta = Key(1).normal((2, 2, 3), dtype=F)
    two = recovery.theorem_2(anchored(Key(0), 2, 2, epsilon), Theta, torch.eye(3, dtype=F))
    assert two.measured == pytest.approx(two.upper, rel=1e-9)
    Theta, Phi, alpha = complementary(1.0, epsilon)
    three = recovery.theorem_2(alpha, Theta, Phi)
    assert three.measured == pytest.approx(three.upper, rel=1e-9) == pytest.approx(6 * epsilon)
    worse = [recovery.theorem_2(*_reordered(complementary(kappa, epsilon))).measured for kappa in (1, 16, 256)]
    assert worse == sorted(worse) and (epsilon == 0.4 or worse[2] > worse[0])


def _reordered(made: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return made[2], made[0], made[1]


def test_theorem_2_wants_anchors() -> None:
    of = world(Key(0))
    with pytest.raises(ValueError, match="Assumption 3"):
        recovery.theorem_2(interior(Key(0), 9, 6, 1.0), of.Theta, of.Phi)


@fewer
@given(instances(), st.floats(0.001, 0.5))
def test_proposition_3_bounds_each_step_of_its_ladder(made: Instance, local: float) -> None:
    pool = barycentres(made.alpha, made.Theta)
    noisy = pool + local * made.key.fold("noise").normal(tuple(pool.shape), dtype=F)
    public = [_public(made, m, 400) for m in range(len(made.Theta))]
    ladder = recovery.proposition_3(made.alpha, made.Theta, made.Phi, noisy, public, sigma=0.5, Q=made.inputs.Q, C0=4.0)
    holds(ladder.anchors, ladder.clients, slack=SOLVED)
    assert ladder.public.measured <= ladder.public.upper and ladder.total.measured <= ladder.total.upper


def _public(made: Instance, m: int, n: int) -> Moments:
    """n examples of task m on the finite inputs, with noise 0.5."""
    edges = torch.cumsum(made.inputs.P[m], dim=0)
    places = torch.searchsorted(edges / edges[-1], torch.from_numpy(made.key.fold("x", m).unit(n)), right=True)
    phi = made.inputs.phi[places.clamp(max=len(edges) - 1)]
    y = phi @ made.Theta[m].T + made.key.fold("zeta", m).normal((n, 2), std=0.5, dtype=F)
    return Moments(n, phi.T @ phi, y.T @ phi)


def test_proposition_3_s_terms_are_those_of_theorem_2_and_of_pure_anchors() -> None:
    made = instance(5, 3, 0.0)
    pool = barycentres(made.alpha, made.Theta)
    shifted = pool.clone()
    shifted[0, 0, 0] += 0.1
    public = [_public(made, m, 400) for m in range(3)]
    ladder = recovery.proposition_3(made.alpha, made.Theta, made.Phi, shifted, public, sigma=0.5, Q=made.inputs.Q)
    least, greatest = eigenvalues(made.Phi)
    assert ladder.anchors.upper < 1e-12
    assert ladder.clients.upper == pytest.approx(math.sqrt(greatest / least) * 0.1)


@given(instances())
def test_theorem_3_no_label_blind_estimate_has_less_than_half_the_diameter(made: Instance) -> None:
    guess = made.key.fold("guess").normal(tuple(made.Theta.shape), dtype=F)
    holds(recovery.theorem_3(guess, made.Theta), recovery.theorem_3(made.Theta, made.Theta))
    two = made.Theta[:2]
    midpoint = recovery.theorem_3(two.mean(dim=0).expand(2, -1, -1), two)
    assert midpoint.measured == pytest.approx(midpoint.lower)


@given(instances(), st.sampled_from([0.1, 0.5, 1.0]))
def test_theorem_4_two_instances_have_one_pool_and_no_estimate_is_near_both(made: Instance, gamma: float) -> None:
    alpha = interior(made.key.fold("inside"), 6, len(made.Theta), gamma)
    other = recovery.shrunk_instance(alpha, made.Theta)
    assert float(other.alpha.min()) > -1e-12 and 0 < other.t <= 0.5
    torch.testing.assert_close(other.alpha.sum(dim=1), torch.ones(6, dtype=F))
    pool = barycentres(alpha, made.Theta)
    torch.testing.assert_close(barycentres(other.alpha, other.Theta), pool, atol=1e-10, rtol=1e-10)
    M = len(made.Theta)
    for guess in (made.Theta, other.Theta, (made.Theta + other.Theta) / 2, pool[successive_projection(pool, M)]):
        holds(recovery.theorem_4(guess, alpha, made.Theta))


def test_theorem_4_is_met_between_two_instances_of_two_tasks() -> None:
    Theta = Key(3).normal((2, 2, 3), dtype=F)
    alpha = interior(Key(4), 5, 2, 0.4)
    between = (Theta + recovery.shrunk_instance(alpha, Theta).Theta) / 2
    found = recovery.theorem_4(between, alpha, Theta)
    assert found.measured == pytest.approx(found.lower)
    with pytest.raises(ValueError, match="boundary"):
        recovery.shrunk_instance(torch.eye(2, dtype=F), Theta)


@given(instances(), st.floats(0, 1))
def test_proposition_4_candidates_near_experts_are_told_apart_by_a_margin(made: Instance, share: float) -> None:
    least, greatest = eigenvalues(made.Phi)
    allowed = separation(made.Theta) / (2 * (1 + math.sqrt(greatest / least)))
    off = made.key.fold("off").normal(tuple(made.Theta.shape), dtype=F)
    off = off / off.flatten(1).norm(dim=1)[:, None, None]
    order = made.key.fold("order").permutation(len(made.Theta)).tolist()
    candidates = (made.Theta + 0.999 * share * allowed * off)[order]
    holds(recovery.proposition_4(candidates, made.Theta, made.Phi))
    with pytest.raises(ValueError, match="Proposition 4 needs"):
        recovery.proposition_4(made.Theta + 1.01 * allowed * off, made.Theta, made.Phi)


def test_proposition_4_asks_for_more_samples_where_experts_are_closer() -> None:
    made = instance(1, 3, 0.0)
    ask = lambda Theta: recovery.proposition_4_samples(Theta, made.Phi, sigma=0.5, Q=made.inputs.Q)  # noqa: E731
    nearer = made.Theta.clone()
    nearer[1] = nearer[0] + 0.5 * (nearer[1] - nearer[0])
    assert separation(nearer) < separation(made.Theta) and diameter(nearer) <= diameter(made.Theta)
    assert ask(nearer) > ask(made.Theta) > 0


@fewer
@given(instances(), st.floats(0, 0.3), st.floats(0, 0.3))
def test_proposition_5_and_corollary_2_bound_mixtures_and_what_they_rebuild(
    made: Instance, local: float, recovered: float
) -> None:
    pool = barycentres(made.alpha, made.Theta)
    noisy = pool + local * made.key.fold("local").normal(tuple(pool.shape), dtype=F)
    experts = made.Theta + recovered * made.key.fold("recovered").normal(tuple(made.Theta.shape), dtype=F)
    holds(recovery.proposition_5(made.alpha, made.Theta, made.Phi, noisy, experts), slack=SOLVED)
    estimated = mixtures(noisy, experts, made.Phi)
    holds(recovery.corollary_2(made.alpha, made.Theta, made.Phi, estimated, experts), slack=SOLVED)


def test_mixtures_are_exact_for_exact_uploads_and_experts() -> None:
    of = world(Key(9))
    alpha = dirichlet_halves(Key(10), 8, 6)
    torch.testing.assert_close(mixtures(barycentres(alpha, of.Theta), of.Theta, of.Phi), alpha, atol=1e-5, rtol=0)
    line = torch.tensor([[[0.0]], [[1.0]], [[2.0]]], dtype=F)
    assert recovery.mixture_bound(0.1, 0.1, line, torch.eye(1, dtype=F)) > 1e6


@fewer
@given(instances())
def test_proposition_11_bounds_recovery_under_balancing(made: Instance) -> None:
    for one in recovery.proposition_11(made.alpha, made.Theta, made.Phi):
        holds(one, slack=SOLVED)


def test_transport_compatible_pure_anchors_are_recovered_and_surplus_clients_prevent_it() -> None:
    of = world(Key(2), M=4)
    eye = torch.eye(4, dtype=F)
    found = extract_balanced(barycentres(eye, of.Theta), population_losses(of.Theta, of.Phi))
    torch.testing.assert_close(found.omega, eye, atol=1e-6, rtol=0)
    alpha = torch.cat([eye, torch.full((4, 4), 0.25, dtype=F)])
    losses = population_losses(of.Theta, of.Phi)
    coupled = extract_balanced(barycentres(alpha, of.Theta), losses)
    torch.testing.assert_close(coupled.omega.sum(dim=0), torch.full((8,), 0.5, dtype=F), atol=1e-9, rtol=0)
    alone = extract(barycentres(alpha, of.Theta), losses)
    assert identity_error(alone.experts, of.Theta) < 1e-6 < 1 < identity_error(coupled.experts, of.Theta)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("N", [6, 12])
def test_fedsee_s_descent_goes_towards_the_exact_programs_and_never_below(seed: int, N: int) -> None:
    """Alone it reaches them; balanced, Sinkhorn's projection in divergence stops it near the optimum."""
    of = world(Key(seed))
    pool = barycentres(anchored(Key(seed).fold("alpha"), N, 6, 0.0), of.Theta)
    losses = population_losses(of.Theta, of.Phi)
    for balanced, exact in ((False, extract(pool, losses)), (True, extract_balanced(pool, losses))):
        descent = Descent(steps=2000, regulariser=0.0, balanced=balanced)
        omega = descent.feasible(torch.full((6, N), 1 / N, dtype=F), torch.arange(N), N)
        start = float(squared_norm(torch.einsum("mn,nlr->mlr", omega, pool) - of.Theta, of.Phi).sum())
        for step in range(1, 2001):
            slopes = 2 * (torch.einsum("mn,nlr->mlr", omega, pool) - of.Theta) @ of.Phi
            omega = descent.stepped(step, omega, pool.flatten(1), slopes.flatten(1), torch.arange(N), N)
        reached = float(squared_norm(torch.einsum("mn,nlr->mlr", omega, pool) - of.Theta, of.Phi).sum())
        least = float(squared_norm(exact.experts - of.Theta, of.Phi).sum())
        assert least - 1e-6 <= reached <= (least + 1e-3 if not balanced else least + 0.05 * start)


@given(st.integers(0, 2**32), st.floats(0.05, 0.95))
def test_proposition_12_bounds_the_lag_of_smoothed_contributions(seed: int, lam: float) -> None:
    raw = [Key(seed).fold(t).normal((3, 5), dtype=F) for t in range(8)]
    holds(*recovery.proposition_12(raw, Key(seed).fold("first").normal((3, 5), dtype=F), lam))
    still = recovery.proposition_12([raw[0]] * 6, raw[1], lam)
    for t, one in enumerate(still):
        assert one.measured == pytest.approx((1 - lam) ** t * still[0].measured) == pytest.approx(one.upper)
    with pytest.raises(ValueError, match=r"\(0, 1\)"):
        recovery.proposition_12(raw, raw[0], 1.0)


# Theorem 5 and routing


@fewer
@given(instances(), st.floats(0, 6))
def test_theorem_5_and_its_corollaries_bound_the_routed_risk(made: Instance, sharpness: float) -> None:
    p, Theta, inputs = made.router(sharpness), made.Theta, made.inputs
    for alpha_i in made.alpha[-2:]:
        holds(routing.theorem_5(p, alpha_i, Theta, inputs), routing.corollary_5(p, alpha_i, Theta, inputs))
        holds(routing.corollary_4(p, alpha_i, Theta, inputs, made.alpha[0]))
        matching = made.key.fold("match").permutation(len(Theta)).tolist()
        holds(*routing.proposition_1(p, alpha_i, inputs, matching))
        target, estimated = made.alpha[-1], made.alpha[-2]
        holds(*routing.corollary_7(p, alpha_i, Theta, inputs, target, estimated))
        found = routing.routed_excess(p, alpha_i, Theta, Theta, inputs)
        assert found == pytest.approx(dense.routed_risk(p, alpha_i, Theta, Theta, inputs.P, inputs.phi), rel=1e-9)


@given(instances(), st.floats(0, 0.3), st.floats(0, 6))
def test_corollary_3_bounds_the_risk_of_recovered_experts(made: Instance, recovered: float, sharpness: float) -> None:
    experts = made.Theta + recovered * made.key.fold("recovered").normal(tuple(made.Theta.shape), dtype=F)
    holds(routing.corollary_3(made.router(sharpness), made.alpha[-1], experts, made.Theta, made.inputs))


def _two_tasks() -> tuple[Tensor, routing.Inputs]:
    """Two experts, inputs that tell their task, second moment I."""
    phi = math.sqrt(2) * torch.eye(2, dtype=F).repeat(2, 1)
    P = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]], dtype=F)
    return Key(1).normal((2, 2, 2), dtype=F), routing.Inputs(P, phi)


def test_theorem_5_is_met_on_both_sides_by_constant_routing_between_two_experts() -> None:
    Theta, inputs = _two_tasks()
    alpha = torch.tensor([0.8, 0.2], dtype=F)
    found = routing.theorem_5(torch.full((4, 2), 0.5, dtype=F), alpha, Theta, inputs)
    assert found.lower == pytest.approx(found.measured) == pytest.approx(found.upper) and found.measured > 0
    own = routing.theorem_5(alpha.expand(4, -1), alpha, Theta, inputs)
    assert own.measured == pytest.approx(0, abs=1e-12)


def test_routing_by_task_reaches_the_oracle_and_gains_the_mixing_gap() -> None:
    Theta, inputs = _two_tasks()
    alpha = torch.tensor([0.7, 0.3], dtype=F)
    perfect = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]], dtype=F)
    assert routing.routed_excess(perfect, alpha, Theta, Theta, inputs) < 1e-12
    gap = recovery.proposition_2(alpha, Theta, inputs.Phi())[1].measured
    assert routing.theorem_5(perfect, alpha, Theta, inputs).measured == pytest.approx(-gap)
    assert routing.corollary_3(perfect, alpha, Theta, Theta, inputs).upper == pytest.approx(0, abs=1e-9)


def test_proposition_1_is_met_by_a_pure_client_under_uniform_usage() -> None:
    _, inputs = _two_tasks()
    usage, least = routing.proposition_1(
        torch.full((4, 2), 0.5, dtype=F), torch.tensor([1.0, 0.0], dtype=F), inputs, [0, 1]
    )
    assert usage.measured == pytest.approx(usage.upper) and least.measured == pytest.approx(least.lower) == 0.5


@given(st.integers(0, 2**32), st.integers(2, 5), st.floats(0.1, 3))
def test_proposition_6_bounds_what_mean_routing_tells_of_tasks(seed: int, M: int, size: float) -> None:
    key = Key(seed)
    directions, _ = torch.linalg.qr(key.fold("subspace").normal((4, 4), dtype=F))
    Pi = directions[:, :2] @ directions[:, :2].T
    holds(
        *routing.proposition_6(
            key.fold("W").normal((M, 4), std=size, dtype=F),
            key.fold("bias").normal((M,), dtype=F),
            key.fold("deltas").normal((M, 4), dtype=F),
            key.fold("noise").normal((20, 4), dtype=F),
            Pi,
            dirichlet_halves(key.fold("alphas"), 2, M),
        )
    )


@given(st.integers(0, 2**32), st.integers(2, 6), st.floats(0.001, 2))
def test_corollary_6_and_proposition_7_in_the_small_logit_regime(seed: int, M: int, size: float) -> None:
    key = Key(seed)
    logits = size * key.fold("logits").normal((10, M), dtype=F)
    weights = dirichlet_halves(key.fold("weights"), 1, 10)[0]
    target = interior(key.fold("target"), 1, M, 0.5)[0]
    holds(routing.corollary_6(logits, weights), *routing.proposition_7(logits, weights, target))


def test_proposition_7_shrinks_as_the_square_of_small_logits() -> None:
    logits, weights = Key(0).normal((10, 4), dtype=F), torch.full((10,), 0.1, dtype=F)
    uniform = torch.full((4,), 0.25, dtype=F)
    one, other = (routing.proposition_7(size * logits, weights, uniform)[1] for size in (1e-2, 1e-3))
    assert one.measured / other.measured == pytest.approx(100, rel=0.1)
    assert one.upper / other.upper == pytest.approx(100)


def test_unequal_second_moments_are_refused_where_one_is_needed() -> None:
    inputs = routing.Inputs(torch.eye(2, dtype=F), torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=F))
    with pytest.raises(ValueError, match="second moments differ"):
        inputs.Phi()


# Theorems 6 and 7: beyond squared loss


@fewer
@given(instances())
def test_theorems_6_and_7_for_squared_losses_of_unequal_second_moments(made: Instance) -> None:
    factors = made.key.fold("roots").normal((len(made.Theta), 3, 3), dtype=F)
    Phis = made.Phi + 0.02 * float(eigenvalues(made.Phi)[0]) * (factors @ factors.mT)
    curvature = general_loss.quadratic_curvature(Phis)
    assert curvature.relative(diameter(made.Theta)) == pytest.approx(recovery.relative_dispersion(Phis))
    optima = client_optima(made.alpha, made.Theta, Phis)
    holds(*general_loss.theorem_6(made.alpha, made.Theta, optima, curvature))
    found = extract(optima, TaskLoss(Phis, made.Theta @ Phis)).experts
    holds(general_loss.theorem_7(made.alpha, made.Theta, found, curvature), slack=SOLVED)


def softmax(seed: int, M: int = 2, l: int = 3, r: int = 2, size: float = 0.3) -> tuple[general_loss.Softmax, Tensor]:  # noqa: E741
    """Small logits, realizable labels, tasks of different input distributions; and the tasks' optima."""
    key = Key(seed)
    P = interior(key.fold("P"), M, 6, 0.5)
    inputs = routing.Inputs(P, size * key.fold("phi").normal((6, r), dtype=F))
    f0 = size * key.fold("f0").normal((6, l), dtype=F)
    Theta = size * key.fold("Theta").normal((M, l, r), dtype=F)
    Theta = Theta - Theta.mean(dim=1, keepdim=True)
    y = torch.stack([(f0 + inputs.phi @ theta.T).softmax(dim=1) for theta in Theta])
    return general_loss.Softmax(inputs, f0, y), Theta


@fewer
@given(st.integers(0, 2**32), st.integers(2, 3))
def test_softmax_optima_hessians_and_theorem_6(seed: int, M: int) -> None:
    model, Theta = softmax(seed, M)
    assume(extremes(model.inputs.second_moments())[0] > 1e-3)
    for m in range(M):
        torch.testing.assert_close(model.optimum(torch.eye(M, dtype=F)[m]), Theta[m], atol=1e-7, rtol=0)
    alpha = dirichlet_halves(Key(seed).fold("alpha"), 3, M)
    optima = torch.stack([model.optimum(each) for each in alpha])
    largest = max(float(Theta.flatten(1).norm(dim=1).max()), float(optima.flatten(1).norm(dim=1).max())) + 1e-6
    holds(*general_loss.theorem_6(alpha, Theta, optima, general_loss.proposition_9(model, largest)))
    holds(*general_loss.measured_curvature(model, Theta[0], Theta[1], largest))


def test_the_hessian_is_that_of_the_loss() -> None:
    model, Theta = softmax(3)

    def loss(vector: Tensor) -> Tensor:
        logits = model.f0 + model.inputs.phi @ vector.reshape(2, 3)
        return -(model.inputs.P[1][:, None] * model.y[1] * logits.log_softmax(dim=1)).sum()

    vector = Theta[0].T.flatten()
    expected = torch.autograd.functional.hessian(loss, vector)
    torch.testing.assert_close(model.hessian(1, Theta[0]), expected, atol=1e-10, rtol=1e-8)
    (slope,) = torch.autograd.grad(loss(vector.requires_grad_()), vector)
    torch.testing.assert_close(model.gradient(1, Theta[0]).T.flatten(), slope, atol=1e-10, rtol=1e-8)


def test_certain_classes_have_no_optimum_and_equal_parameters_no_change() -> None:
    model, Theta = softmax(1)
    certain = model._replace(
        inputs=routing.Inputs(model.inputs.P, model.inputs.phi.abs()),
        y=torch.nn.functional.one_hot(torch.zeros(2, 6, dtype=torch.long), 3).to(F),
    )
    with pytest.raises(ArithmeticError, match="did not converge"):
        certain.optimum(torch.tensor([0.5, 0.5], dtype=F))
    with pytest.raises(ValueError, match="two different parameters"):
        general_loss.measured_curvature(model, Theta[0], Theta[0], 10.0)


@fewer
@given(st.integers(0, 2**32), st.floats(0.001, 0.5), st.floats(0.5, 30))
def test_corollary_8_bounds_optima_of_risks_near_quadratic_ones(seed: int, tau: float, pace: float) -> None:
    """Deep risks (v - v_m)^2 + tau cos(pace v + shift_m) of one parameter, minimised on a fine grid."""
    key = Key(seed)
    centres, shifts = key.fold("v").normal((3,), dtype=F), key.fold("shift").normal((3,), dtype=F)
    alpha = dirichlet_halves(key.fold("alpha"), 2, 3)
    grid = torch.linspace(-6, 6, 240_001, dtype=F)
    risks = (grid - centres[:, None]).square() + tau * (pace * grid + shifts[:, None]).cos()
    best = grid[risks.argmin(dim=1)][:, None, None]
    clients = grid[(alpha @ risks).argmin(dim=1)][:, None, None]
    holds(general_loss.corollary_8(alpha, best, clients, tau, mu=2.0), slack=1e-4)
