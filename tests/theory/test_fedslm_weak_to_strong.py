"""FedSLM's weak-to-strong statements: artifacts, the gradient's parts, and the weight of the student's own view."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.random_factors import bounded, normal
from torch import Tensor

from coterie.theory.fedslm.aggregation import Group, barycentre, compressed_group, theorem_2, theorem_3
from coterie.theory.fedslm.subspaces import shells, subspace, truncated
from coterie.theory.fedslm.weak_to_strong import (
    confidence_forces,
    confidence_loss,
    cross_entropy,
    entropy_forces,
    entropy_loss,
    hardened,
    lemma_1,
    observed_lipschitz,
    proposition_3,
    proposition_4,
    softmax_lipschitz,
)

ROOM = 1 + 1e-9


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def predictions(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a student, distributions of a supervisor and of a reference, (B, C) each."""
    seed, B, C = draw(st.integers(0, 10_000)), draw(st.integers(1, 8)), draw(st.integers(2, 5))
    logits, weak, reference = (2 * normal(seed + i, B, C) for i in range(3))
    return logits, weak.softmax(-1), reference.softmax(-1)


# Section 9 of the specification: the loss


def test_fixture_n21_the_confidence_loss_is_566434() -> None:
    f_s, f_w = rows([0.8, 0.2], [0.4, 0.6]), rows([0.6, 0.4], [0.6, 0.4])
    assert hardened(f_s).tolist() == [[1, 0], [0, 1]]
    assert float(confidence_loss(f_s, f_w, hardened(f_s), 0.5)) == pytest.approx(0.566434, abs=5e-7)


def test_alpha_0_is_plain_distillation_and_alpha_1_of_a_confident_student_is_near_0() -> None:
    f_s, f_w = rows([0.999, 0.001], [0.001, 0.999]), rows([0.3, 0.7], [0.6, 0.4])
    plain = confidence_loss(f_s, f_w, hardened(f_s), 0.0)
    assert float(plain) == pytest.approx(float(cross_entropy(f_w, f_s).mean()))
    assert float(confidence_loss(f_s, f_w, hardened(f_s), 1.0)) == pytest.approx(0.001, rel=1e-3)


def test_exactly_half_of_a_binary_batch_is_hardened_to_class_1_whatever_its_level_and_ties() -> None:
    """L8."""
    sure = rows([0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4])
    assert hardened(sure)[:, 1].tolist() == [0, 0, 1, 1]
    assert hardened(torch.full((6, 2), 0.5))[:, 1].sum() == 3
    assert hardened(sure[:3])[:, 1].tolist() == [0, 0, 1]


def test_one_example_or_more_classes_are_hardened_to_the_largest() -> None:
    assert hardened(rows([0.2, 0.8])).tolist() == [[0, 1]]
    assert hardened(rows([0.2, 0.5, 0.3], [0.1, 0.6, 0.3])).tolist() == [[0, 1, 0], [0, 1, 0]]


# Lemma 1


@bounded
@given(st.integers(0, 10_000), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from([0.1, 1.0, 5.0]))
def test_lemma_1_holds_for_a_softmax_layer_with_its_known_constant(seed: int, ranks: list[int], size: float) -> None:
    W, x = size * normal(seed, 3, 4), normal(seed + 1, 6, 4)
    whole = subspace(*truncated(W, 3))
    shares = [1 / len(ranks)] * len(ranks)
    fused = sum(p * (whole.cut(rank).project(W) if rank < 4 else W) for p, rank in zip(shares, ranks, strict=True))
    weak, reference = ((x @ M.T).softmax(-1) for M in (torch.as_tensor(fused), W))
    found = lemma_1(weak, reference, softmax_lipschitz(x), theorem_3(shells(whole, W), ranks, shares))
    assert found.measured <= found.exact * ROOM + 1e-9  # a full-rank cut is W up to rounding
    assert found.exact <= found.bound * ROOM + 1e-12
    assert found.bound <= found.worst * ROOM + 1e-12
    distance = float((fused - W).norm())
    if distance > 1e-6:
        assert observed_lipschitz(weak, reference, distance) <= softmax_lipschitz(x) * ROOM


def test_the_constant_of_a_softmax_layer_is_reached_by_small_changes_of_two_even_classes() -> None:
    W, x = torch.zeros(2, 3, dtype=torch.float64), rows([3.0, 0.0, 4.0])
    step = 1e-6 * torch.outer(rows([1.0, -1.0])[0], x[0])
    weak, reference = (x @ (W + step).T).softmax(-1), (x @ W.T).softmax(-1)
    assert softmax_lipschitz(x) == pytest.approx(5 / math.sqrt(2))
    assert observed_lipschitz(weak, reference, float(step.norm())) == pytest.approx(5 / math.sqrt(2), rel=1e-6)


def test_groups_that_trained_break_lemma_1_but_not_the_constant_times_the_error_they_have() -> None:
    """Its premise is Theorem 3's: every group at the projection of the reference."""
    W, x = torch.diag(rows([0.5, 0.1])[0]), rows([1.0, 0.0], [0.0, 1.0])
    groups = [compressed_group(0.5, *truncated(W, 1), torch.tensor([[3.0]])), Group(0.5, W)]
    weak, reference = ((x @ M.T).softmax(-1) for M in (barycentre(groups), W))
    ahead = theorem_3(shells(subspace(*truncated(W, 2)), W), [1, 3], [0.5, 0.5])
    found = lemma_1(weak, reference, softmax_lipschitz(x), ahead)
    assert found.measured > found.bound
    assert found.measured <= softmax_lipschitz(x) * theorem_2(W, groups).measured


def test_an_observed_constant_is_no_bound_and_needs_a_change() -> None:
    """It comes from below: other inputs of the same layer exceed it."""
    W, other = torch.zeros(2, 2, dtype=torch.float64), rows([1.0, 0.0], [0.0, 0.0])
    small, large = rows([0.1, 0.0]), rows([1.0, 0.0])
    seen = [observed_lipschitz((x @ other.T).softmax(-1), (x @ W.T).softmax(-1), 1.0) for x in (small, large)]
    assert seen[0] < seen[1]
    with pytest.raises(ValueError, match="must differ"):
        observed_lipschitz(small, small, 0.0)


# Proposition 3


@bounded
@given(predictions(), st.floats(0, 1))
def test_the_three_parts_of_eq_35_are_the_gradient_of_the_confidence_loss(
    world: tuple[Tensor, Tensor, Tensor], alpha: float
) -> None:
    logits, f_w, reference = world
    z = logits.requires_grad_()
    f_s = z.softmax(-1)
    f_hat = hardened(f_s.detach())
    (gradient,) = torch.autograd.grad(confidence_loss(f_s, f_w, f_hat, alpha) * len(z), z)
    parts = confidence_forces(f_s.detach(), f_w, f_hat, reference, alpha)
    torch.testing.assert_close(parts.gradient, gradient)
    torch.testing.assert_close(parts.artifact, (1 - alpha) * (reference - f_w))


@bounded
@given(predictions(), st.floats(0, 1))
def test_the_loss_of_appendix_b_has_parts_too_but_attenuates_no_artifact(
    world: tuple[Tensor, Tensor, Tensor], alpha: float
) -> None:
    """L8: the losses of text and appendix differ, and Proposition 3 speaks of the first."""
    logits, f_w, reference = world
    z = logits.requires_grad_()
    f_s = z.softmax(-1)
    (gradient,) = torch.autograd.grad(entropy_loss(f_s, f_w, alpha) * len(z), z)
    parts = entropy_forces(f_s.detach(), f_w, reference, alpha)
    torch.testing.assert_close(parts.gradient, gradient)
    torch.testing.assert_close(parts.artifact, reference - f_w)


@bounded
@given(predictions(), st.floats(0, 1))
def test_proposition_3_holds_and_is_closer_since_artifacts_sum_to_0(
    world: tuple[Tensor, Tensor, Tensor], alpha: float
) -> None:
    _, f_w, reference = world
    B_xi = float((f_w - reference).abs().sum(-1).max())
    found = proposition_3(f_w, reference, alpha, B_xi)
    assert found.measured <= found.sharp * ROOM
    assert found.sharp <= found.bound
    if f_w.shape[1] == 2:
        assert found.measured == pytest.approx(found.sharp)


# Proposition 4


@bounded
@given(predictions())
def test_proposition_4_gives_the_minimisers_of_its_risk_and_of_the_error_itself(
    world: tuple[Tensor, Tensor, Tensor],
) -> None:
    logits, f_w, reference = world
    f_s = logits.softmax(-1)
    f_hat = hardened(f_s)
    found = proposition_4(f_s, f_w, f_hat, reference)
    B_xi = float((f_w - reference).abs().sum(-1).max())
    assert found.alpha <= found.ceiling(B_xi) * ROOM
    for alpha in torch.linspace(0, 1, 21).tolist():
        assert found.risk(found.alpha) <= found.risk(alpha) * ROOM + 1e-12
        assert found.error(found.best_alpha) <= found.error(alpha) * ROOM + 1e-12
        gradient = confidence_forces(f_s, f_w, f_hat, reference, alpha).gradient
        against_clean = float((gradient - (f_s - reference)).square().sum(-1).mean())
        assert found.error(alpha) == pytest.approx(against_clean, abs=1e-12)
        moving = float((gradient - (1 - alpha) * (f_s - reference)).square().sum(-1).mean())
        crossed = 2 * alpha * (1 - alpha) * found.correlation
        assert found.risk(alpha) - crossed == pytest.approx(moving, abs=1e-12)


@bounded
@given(st.floats(0, 2), st.floats(0, 2), st.integers(0, 1000))
def test_the_ceiling_of_alpha_grows_with_the_artifact_s_bound(small: float, large: float, seed: int) -> None:
    f_s, f_w, reference = (normal(seed + i, 4, 3).softmax(-1) for i in range(3))
    found = proposition_4(f_s, f_w, hardened(f_s), reference)
    small, large = sorted((small, large))
    assert found.ceiling(small) <= found.ceiling(large)


def test_correlated_errors_make_the_alpha_of_proposition_4_a_wrong_choice() -> None:
    """Its premise fails where the student is unsure in the direction in which the supervisor errs, as here."""
    f_s, f_w, reference = (rows(row, row[::-1]) for row in ([0.6, 0.4], [0.3, 0.7], [0.9, 0.1]))
    found = proposition_4(f_s, f_w, hardened(f_s), reference)
    assert found.correlation == pytest.approx(2 * 0.6 * 0.4)
    assert found.alpha == pytest.approx(0.72 / (0.72 + 0.32))
    assert found.best_alpha == pytest.approx(6 / 7)  # 0.3 (1 - alpha) + alpha = 0.9
    assert found.error(found.best_alpha) == pytest.approx(0, abs=1e-12)
    assert found.error(found.alpha) > 0.01


def test_a_student_that_is_sure_and_wrong_has_no_variance_in_eq_37_but_an_error() -> None:
    """V_self measures how sure the student is, not how right: Eq. 37 would trust it alone."""
    f_s, f_w, reference = (rows(row, row[::-1]) for row in ([0.0, 1.0], [0.8, 0.2], [1.0, 0.0]))
    found = proposition_4(f_s, f_w, hardened(f_s), reference)
    assert (found.alpha, found.best_alpha) == (1, 0)
    assert found.error(1) == pytest.approx(2)
    assert found.risk(1) == 0


def test_the_reference_decides() -> None:
    """The same predictions against the ideal supervisor and against labels."""
    f_s, f_w = rows([0.6, 0.4], [0.4, 0.6]), rows([0.7, 0.3], [0.3, 0.7])
    labels = rows([1, 0], [0, 1])
    assert proposition_4(f_s, f_w, hardened(f_s), f_w).best_alpha == 0
    assert proposition_4(f_s, f_w, hardened(f_s), labels).best_alpha == 1


def test_without_any_error_the_supervisor_is_kept() -> None:
    labels = rows([1, 0], [0, 1])
    found = proposition_4(labels, labels, labels, labels)
    assert (found.alpha, found.best_alpha, found.ceiling(0)) == (0, 0, 0)
