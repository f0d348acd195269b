"""Weak-to-strong losses: the specification's fixture, gradients by hand and by differences, thresholds and ties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.dense_weak_to_strong import chosen_by, loss_of
from torch import Tensor

from coterie.maths.keys import root_key
from coterie.maths.weak_to_strong import confidence_losses, entropy_losses, hardened
from coterie.theory.fedslm.weak_to_strong import confidence_loss, entropy_loss, proposition_4
from coterie.theory.fedslm.weak_to_strong import hardened as hardened_in_theory

KEY = root_key(3)
RULES = ["quantile", "median", "argmax"]
cases = st.tuples(st.integers(0, 200), st.integers(1, 7), st.integers(2, 5), st.booleans())


def batch(case: tuple[int, int, int, bool]) -> tuple[Tensor, Tensor, list[int]]:
    """z and f_w (b, C) in float64, and how many options each example has: all C, or from two to C."""
    seed, b, C, ragged = case
    key = KEY.fold(seed)
    counts = [2 + (seed + i) % (C - 1) if ragged else C for i in range(b)]
    exists = torch.arange(C) < torch.tensor(counts)[:, None]
    z = key.fold("z").normal((b, C), 2.0, torch.float64).masked_fill(~exists, -torch.inf)
    weak = key.fold("w").normal((b, C), 2.0, torch.float64).masked_fill(~exists, -torch.inf).softmax(dim=1)
    return z, weak, counts


def test_burns_fixture() -> None:
    p = torch.tensor([[0.8, 0.2], [0.4, 0.6]], dtype=torch.float64)
    weak = torch.tensor([[0.6, 0.4]] * 2, dtype=torch.float64)
    f_hat = hardened(p.log(), weak, "quantile")
    assert f_hat.tolist() == [[1, 0], [0, 1]]
    assert float(confidence_losses(p.log(), weak, f_hat, 0.5).mean()) == pytest.approx(0.566434, abs=5e-7)


@given(case=cases, alpha=st.floats(0, 1), rule=st.sampled_from(RULES))
def test_losses_and_hardening_are_those_of_one_example_after_another(case, alpha: float, rule: str) -> None:
    z, weak, counts = batch(case)
    p = [row[:n].softmax(dim=0).tolist() for row, n in zip(z, counts, strict=True)]
    w = [row[:n].tolist() for row, n in zip(weak, counts, strict=True)]
    f_hat = hardened(z, weak, rule)
    assert f_hat.argmax(dim=1).tolist() == chosen_by(rule, p, w) and f_hat.sum(dim=1).tolist() == [1.0] * len(counts)
    hard = f_hat.argmax(dim=1).tolist()
    for form, found in (
        ("confidence", confidence_losses(z, weak, f_hat, alpha)),
        ("entropy", entropy_losses(z, weak, alpha)),
    ):
        expected = [loss_of(*row, alpha, form) for row in zip(p, w, hard, strict=True)]
        assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-10)


@given(case=cases, alpha=st.floats(0, 1))
def test_the_gradient_is_the_pull_of_the_weak_model_and_of_the_own_choice(case, alpha: float) -> None:
    z, weak, _ = batch(case)
    z = z.requires_grad_()
    f_hat = hardened(z, weak, "argmax")
    (grad,) = torch.autograd.grad(confidence_losses(z, weak, f_hat, alpha).sum(), z)
    p = z.detach().softmax(dim=1)
    assert torch.allclose(grad, (1 - alpha) * (p - weak) + alpha * (p - f_hat), atol=1e-12)
    assert not f_hat.requires_grad


def test_no_gradient_passes_through_what_the_own_choice_was_made_of() -> None:
    z = torch.tensor([[0.3, -0.2]], dtype=torch.float64, requires_grad=True)
    soft = z.softmax(dim=1)
    (grad,) = torch.autograd.grad(confidence_losses(z, torch.full((1, 2), 0.5), soft, 1.0).sum(), z)
    assert float(grad.abs().max()) < 1e-15


@pytest.mark.parametrize("form", ["confidence", "entropy"])
def test_gradients_agree_with_differences(form: str) -> None:
    z, weak, _ = batch((5, 4, 4, False))
    f_hat = hardened(z, weak, "argmax")

    def loss(scores: Tensor) -> Tensor:
        return (
            confidence_losses(scores, weak, f_hat, 0.4) if form == "confidence" else entropy_losses(scores, weak, 0.4)
        )

    assert torch.autograd.gradcheck(loss, [z.requires_grad_()])


@pytest.mark.parametrize("form", ["confidence", "entropy"])
def test_an_option_that_is_not_there_gets_no_gradient_and_spoils_none(form: str) -> None:
    z, weak, counts = batch((9, 6, 5, True))
    z = z.requires_grad_()
    f_hat = hardened(z, weak, "median")
    losses = confidence_losses(z, weak, f_hat, 0.5) if form == "confidence" else entropy_losses(z, weak, 0.5)
    (grad,) = torch.autograd.grad(losses.sum(), z)
    assert torch.isfinite(losses).all() and torch.isfinite(grad).all()
    assert all(
        float(row[n:].abs().sum()) == 0 < float(row[:n].abs().sum()) for row, n in zip(grad, counts, strict=True)
    )


@given(case=cases)
def test_without_alpha_both_forms_are_cross_entropy_with_soft_targets(case) -> None:
    z, weak, _ = batch((*case[:3], False))
    plain = torch.nn.functional.cross_entropy(z, weak, reduction="none")
    for found in (confidence_losses(z, weak, hardened(z, weak, "median"), 0.0), entropy_losses(z, weak, 0.0)):
        assert torch.allclose(found, plain, atol=1e-12)


def test_confidence_alone_is_content_with_what_is_sure_whatever_the_weak_model_says() -> None:
    z = torch.tensor([[30.0, -30.0], [-30.0, 30.0]], dtype=torch.float64)
    wrong = torch.tensor([[0.01, 0.99], [0.99, 0.01]], dtype=torch.float64)
    for rule in RULES:
        assert float(confidence_losses(z, wrong, hardened(z, wrong, rule), 1.0).max()) < 1e-20


def test_a_single_example_and_more_than_two_options_take_the_likeliest() -> None:
    weak = torch.tensor([[0.1, 0.9]])
    for rule in RULES:
        assert hardened(torch.tensor([[0.2, 0.1]]), weak, rule).tolist() == [[1, 0]]
        three = torch.tensor([[0.2, 0.1, 0.0], [0.0, 0.1, 3.0], [5.0, 0.1, 3.0]])
        assert hardened(three, three.softmax(dim=1), rule).argmax(dim=1).tolist() == [0, 2, 0]


def test_of_equals_the_earlier_are_the_upper_half_and_of_an_odd_number_fewer() -> None:
    tied = torch.zeros(5, 2)
    assert hardened(tied, tied.softmax(dim=1), "median").argmax(dim=1).tolist() == [1, 1, 0, 0, 0]
    # At the threshold itself the class is 0.
    assert hardened(tied, tied.softmax(dim=1), "quantile").argmax(dim=1).tolist() == [0] * 5


def test_pairs_among_longer_questions_are_halved_among_themselves() -> None:
    inf = torch.inf
    z = torch.tensor([[3.0, 2.0, -inf], [0.0, 1.0, 2.0], [3.0, 1.0, -inf], [9.0, 1.0, 2.0]])
    assert hardened(z, z.softmax(dim=1), "median").argmax(dim=1).tolist() == [1, 2, 0, 0]


@given(seed=st.integers(0, 50), b=st.integers(2, 9), C=st.integers(2, 4), alpha=st.floats(0, 1))
def test_the_theory_speaks_of_the_same_losses(seed: int, b: int, C: int, alpha: float) -> None:
    z, weak, _ = batch((seed, b, C, False))
    f_s, f_hat = z.softmax(dim=1), hardened(z, weak, "median")
    assert torch.equal(f_hat, hardened_in_theory(f_s))
    assert float(confidence_losses(z, weak, f_hat, alpha).mean()) == pytest.approx(
        float(confidence_loss(f_s, weak, f_hat, alpha)), abs=1e-9
    )
    assert float(entropy_losses(z, weak, alpha).mean()) == pytest.approx(
        float(entropy_loss(f_s, weak, alpha)), abs=1e-9
    )


def test_the_best_alpha_of_questions_with_unequal_options_can_be_measured_against_labels() -> None:
    z, weak, counts = batch((4, 6, 4, True))
    labels = torch.tensor([i % n for i, n in enumerate(counts)])
    reference = torch.nn.functional.one_hot(labels, z.shape[1]).double()
    found = proposition_4(z.softmax(dim=1), weak, hardened(z, weak, "median"), reference)
    assert 0 < found.alpha < 1
    tried = torch.linspace(0, 1, 101, dtype=torch.float64).tolist()
    assert min(tried, key=found.risk) == pytest.approx(found.alpha, abs=0.01)
    assert min(tried, key=found.error) == pytest.approx(found.best_alpha, abs=0.01)
