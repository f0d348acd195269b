"""FedSLM's students: what teaches them, from where they start, which is deployed, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from algorithms.fedslm_worlds import W, begun, card, factors, taught
from coterie.algorithms import FedSLM
from coterie.algorithms.fedslm_students import Form
from coterie.protocol import (
    Dense,
    Federation,
    Predict,
    WeakToStrong,
)


def test_the_fused_model_teaches_students_that_all_start_alike_and_the_first_is_deployed() -> None:
    others: tuple[tuple[Form, float], ...] = (("entropy", 0.5), ("confidence", 0.25))
    method = FedSLM(form="confidence", alpha=0.25, beside=others, epochs=3, student_lr=0.5)
    logits = torch.tensor([[0.0, 1.0, -torch.inf], [2.0, 0.0, 1.0]])
    state, asked = taught(method, logits)
    teacher, *fits = asked
    assert isinstance(teacher, Predict) and teacher.data == "unlabeled"
    expected = 0.5 * torch.mm(*factors(3)) + 0.5 * W - W
    assert torch.allclose(teacher.model["delta"]["up_proj"].W.double(), expected, atol=1e-6)
    assert [(fit.loss.form, fit.loss.alpha) for fit in fits] == [("confidence", 0.25), ("entropy", 0.5)]
    for fit in fits:
        assert isinstance(fit.loss, WeakToStrong) and torch.allclose(fit.loss.targets, logits.softmax(dim=-1))
        assert (fit.data, fit.epochs, fit.head, fit.lr_scale) == ("unlabeled", 3, False, {"lora.*": 0.5})
        assert all(torch.equal(fit.initial.parameters[n], v) for n, v in fits[0].initial.parameters.items())
        assert fit.initial["lora"]["up_proj"].rank == 16 and fit.initial["lora"]["up_proj"].scale == 2.0
    deployed = method.global_model(state)
    assert deployed is not None and deployed is state.students["confidence-0.25"]
    further = method.further_global_models(state)
    assert list(further) == ["weak", "entropy-0.5"]
    assert torch.equal(further["entropy-0.5"]["lora"]["up_proj"].A, fits[1].initial["lora"]["up_proj"].A + 3)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 1.5},
        {"alpha": math.nan},
        {"beside": (("entropy", -0.1),)},
        {"beside": (("entropy", 0.5 + 1e-9),)},
        {"epochs": 0},
        {"student_lr": 0},
        {"student_lr": math.inf},
        {"student_alpha": math.nan},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        FedSLM(**options)


def test_the_loss_of_every_student_s_training_is_recorded_by_its_name() -> None:
    method = FedSLM(beside=(("confidence", 0.25), ("confidence", 0.5)))
    before, after = begun(method, card("a", 3)), taught(method, torch.zeros(2, 2))[0]
    federation = Federation((card("a", 3),), 3, ("unlabeled",))
    assert method.measures(before, federation, {}) == {}
    told = {"entropy-0.5": 0.2, "confidence-0.25": 0.3, "confidence-0.5": 0.4}
    assert method.measures(after, federation, {}) == {"students": told}


def test_a_student_of_all_weights_starts_at_those_of_the_full_model_and_trains_every_one() -> None:
    method = FedSLM(student="full", beside=(("confidence", 0.25),), student_lr=0.5)
    state, (_, *fits) = taught(method, torch.zeros(2, 2))
    for fit in fits:
        (term,) = fit.initial["delta"].values()
        assert list(fit.initial["delta"]) == ["up_proj"] and torch.equal(term.W, torch.zeros(6, 8))
        assert fit.train == ("delta.*",) and fit.lr_scale == {"delta.*": 0.5}
    deployed = method.global_model(state)
    assert deployed is not None and list(deployed.terms) == ["delta"]
    assert list(method.further_global_models(state)) == ["weak", "confidence-0.25"]


def test_the_state_of_a_run_holds_what_is_deployed_and_the_teacher_but_no_factors_of_bases() -> None:
    state, _ = taught(FedSLM(), torch.zeros(2, 2))
    assert isinstance(state.weak["up_proj"], Dense) and list(state.students) == ["entropy-0.5"]
    assert set(state.groups.cores["ratio-3"]["up_proj"].shape) == {3}
