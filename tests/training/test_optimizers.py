"""The fused step is torch.optim's, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st
from reference.training_loop import scheduled, torch_optimizer

from coterie.maths.keys import Key
from coterie.training.asks import TrainSettings
from coterie.training.optimizers import OptimizerState, clip_gradients, gradient_norms, learning_rate, step

KINDS = [
    TrainSettings(optimizer="sgd", weight_decay=0.0),
    TrainSettings(optimizer="sgd", momentum=0.9, weight_decay=0.05),
    TrainSettings(optimizer="adam", weight_decay=0.05),
    TrainSettings(optimizer="adamw", weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6),
]
NAMES = ["sgd", "momentum", "adam", "adamw"]


def normal(name: str, *shape: int) -> torch.Tensor:
    return Key(5).fold(name).normal(shape, dtype=torch.float64)


@pytest.mark.parametrize("settings", KINDS, ids=NAMES)
@settings_of(max_examples=15)
@given(seed=st.integers(0, 1000), clip=st.sampled_from([None, 0.01, 1.0, 100.0]))
def test_fifty_steps_equal_torch_optim_for_each_client(settings: TrainSettings, seed: int, clip: float | None) -> None:
    start = normal(f"start{seed}", 3, 7)
    values = start.clone()
    state = OptimizerState.fresh(values, settings)
    rates = [0.1, 0.01, 0.003]
    own = [start[i].clone().requires_grad_() for i in range(3)]
    stock = [torch_optimizer([p], settings) for p in own]
    for number in range(50):
        grads = normal(f"grad{seed}-{number}", 3, 7)
        for i, (p, optimizer) in enumerate(zip(own, stock, strict=True)):
            p.grad = grads[i].clone()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_([p], clip)
            optimizer.param_groups[0]["lr"] = rates[i]
            optimizer.step()
        if clip is not None:
            clip_gradients(grads, gradient_norms(grads), clip)
        step(values, grads, state, rates, settings)
    assert torch.allclose(values, torch.stack(own), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", KINDS, ids=NAMES)
def test_a_row_that_does_not_step_is_untouched_and_keeps_its_own_count(settings: TrainSettings) -> None:
    values, alone = normal("start", 3, 64), normal("start", 3, 64)[1:2].clone()
    state, own = OptimizerState.fresh(values, settings), OptimizerState.fresh(alone, settings)
    for number, rows in enumerate([[0, 1, 2], [0, 2], [1], [0, 1]]):
        before = values.clone()
        moments = [m.clone() for m in (state.first, state.second) if m is not None]
        grads = normal(f"grad{number}", 3, 64)
        grads[[i for i in range(3) if i not in rows]] = float("nan")
        step(values, grads, state, [0.1] * 3, settings, rows=rows)
        if 1 in rows:
            step(alone, grads[1:2], own, [0.1], settings)
        still = [i for i in range(3) if i not in rows]
        assert torch.equal(values[still], before[still])
        now = [m for m in (state.first, state.second) if m is not None]
        assert all(torch.equal(a[still], b[still]) for a, b in zip(now, moments, strict=True))
    assert state.steps == [3, 3, 2]
    assert torch.equal(values[1:2], alone)


@pytest.mark.parametrize("settings", KINDS, ids=NAMES)
def test_a_masked_entry_never_moves_though_its_rate_scale_and_decay_would_move_it(settings: TrainSettings) -> None:
    values = normal("start", 2, 64)
    before, trained = values.clone(), torch.rand(2, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    state = OptimizerState.fresh(values, settings)
    for number in range(3):
        grads = torch.where(trained, normal(f"grad{number}", 2, 64), 0.0)
        step(values, grads, state, [0.1, 0.2], settings, trained=trained, rate_scale=torch.full_like(values, 3.0))
    assert torch.equal(values == before, ~trained)


@pytest.mark.parametrize("settings", KINDS, ids=NAMES)
def test_a_rate_scale_is_another_learning_rate(settings: TrainSettings) -> None:
    scaled, faster = normal("start", 2, 64), normal("start", 2, 64)
    a, b = OptimizerState.fresh(scaled, settings), OptimizerState.fresh(faster, settings)
    for number in range(4):
        grads = normal(f"grad{number}", 2, 64)
        step(scaled, grads.clone(), a, [0.1, 0.1], settings, rate_scale=torch.full_like(scaled, 0.5))
        step(faster, grads.clone(), b, [0.05, 0.05], settings)
    assert torch.equal(scaled, faster)


@given(
    warmup=st.integers(0, 5),
    extra=st.integers(1, 9),
    schedule=st.sampled_from(["constant", "linear"]),
)
def test_the_rate_rises_to_lr_and_stays_or_falls_towards_zero(warmup: int, extra: int, schedule) -> None:
    settings = TrainSettings(lr=0.5, warmup_steps=warmup, schedule=schedule)
    total = warmup + extra
    rates = [learning_rate(settings, number, total) for number in range(total)]
    assert rates == pytest.approx([scheduled(settings, number, total) for number in range(total)])
    assert rates[warmup] == 0.5 == max(rates) and min(rates) > 0
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_steps_of_a_warm_up_longer_than_the_run_stay_below_lr() -> None:
    settings = TrainSettings(lr=1.0, warmup_steps=10, schedule="linear")
    assert [learning_rate(settings, number, 3) for number in range(3)] == pytest.approx([0.1, 0.2, 0.3])
