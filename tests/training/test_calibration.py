"""Penalties on mean routing: the value and gradient against a loop over tokens, in parts, in stacks, recomputed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engines.world import FAST, base, text
from reference.dense_extraction import routing_divergence
from reference.routed_loop import token_weights

from coterie.data.text import TextSet
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.models import loading
from coterie.models.loading import Base
from coterie.protocol import Fit, Fitted, LowRank, Model, Routed, UsageDivergence
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.evaluation import alone, training_batches
from coterie.training.executor import Executor
from coterie.training.objectives import row_losses
from coterie.wire.codec import encode

M = 3
SGD = TrainSettings(optimizer="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, clip=None, batch_size=8, steps=1)
TARGET = [0.6, 0.3, 0.1]


def model(seed: int = 0, allowed: tuple[bool, ...] = (True, True, True), dtype: torch.dtype = torch.float64) -> Model:
    key, frozen = root_key(seed), base()
    experts = {
        name: Routed(
            tuple(key.fold("B", name, e).normal((layer.d_out, 2), 0.3, dtype) for e in range(M)),
            (key.fold("A", name).normal((2, layer.d_in), 0.3, dtype),),
            key.fold("router", name).normal((M, layer.d_in), 0.3, dtype),
            2.0,
            key.fold("bias", name).normal((M,), 0.3, dtype),
            allowed=torch.tensor(allowed),
        )
        for name, layer in frozen.layers.items()
    }
    shared = {
        name: LowRank(
            key.fold("sB", name).normal((32, 2), 0.3, dtype), key.fold("sA", name).normal((2, 32), 0.3, dtype)
        )
        for name in frozen.layers
    }
    return Model(experts=experts, shared=shared)


def asked(
    index: int = 0, target: list[float] | None = None, weight: float = 0.5, made: Model | None = None, count: int = 21
) -> Ask:
    penalties = [] if target is None else [UsageDivergence(torch.tensor(target, dtype=torch.float64), weight)]
    fit = Fit(
        made or model(index),
        train=("experts.*.B.1", "experts.*.router", "experts.*.bias", "shared.*"),
        penalties=penalties,
    )
    head = {name: value.double() for name, value in base().head.items()}
    return Ask(f"c{index}", fit, "base", head, text(count, seed=index), root_key(index))


def trained(asks: list[Ask], settings: TrainSettings = SGD, together: int = 1, dtype: Any = "float64") -> list[Done]:
    plan = Plan(dtype=dtype, clients_per_step=together, padding_rank=4)
    answers = Executor({"base": base()}, settings, plan).answer(asks)
    for answer in answers:
        assert isinstance(answer, Done) and isinstance(answer.answer, Fitted), answer
    return answers  # type: ignore[return-value]


def moved(done: Done) -> dict[str, torch.Tensor]:
    assert isinstance(done.answer, Fitted)
    return done.answer.model.parameters


def all_positions_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where usage is noted padding is computed; so that bits can be compared, let it be so without, too."""
    monkeypatch.setattr(loading, "pack", lambda *_: False)


def objective(frozen: Base, ask: Ask, made: Model, weight: float) -> float:
    """Task loss of the coming mini-batch and the KL term, one text at a time, without padding, token by token."""
    assert isinstance(ask.data, TextSet) and ask.head is not None
    (batch,) = training_batches(ask.data, SGD, ask.key)
    stacked, head = alone(frozen, made, ask.head)
    losses: list[float] = []
    seen: dict[str, list[torch.Tensor]] = {}
    hooks = [
        slot.register_forward_pre_hook(lambda _, x, name=name: seen.setdefault(name, []).append(x[0][0]))
        for name, slot in frozen.slots.layers.items()
    ]
    with torch.no_grad(), frozen.slots.bound(1, stacked, head), frozen.slots.everywhere():
        for i in batch.indices:
            one = ask.data.batch(np.array([i]), int(ask.data.lengths[i]))
            losses.append(float(row_losses(frozen, one)))
    for hook in hooks:
        hook.remove()
    divergences = []
    for name, term in made["experts"].items():
        rows = []
        for x in torch.cat(seen[name]):
            logits = (term.router @ x + term.bias).tolist()
            found = token_weights(logits, list(range(M)), term.allowed.tolist(), M)
            rows.append([found.get(e, 0.0) for e in range(M)])
        divergences.append(routing_divergence(TARGET, torch.tensor(rows, dtype=torch.float64), [True] * len(rows)))
    return float(np.mean(losses)) + weight * float(np.mean(divergences))


def test_the_gradient_is_the_numerical_one_of_task_loss_and_divergence_without_padding() -> None:
    weight = 0.5
    ask = asked(target=TARGET, weight=weight)
    after, (frozen, before) = moved(trained([ask])[0]), (base(), model())
    frozen.prepare("float64", "eager")
    for part in ("experts", "shared"):
        for layer in (*list(before[part])[:1], *list(before[part])[-1:]):
            for name in ("B.1", "router", "bias") if part == "experts" else ("B", "A"):
                full = f"{part}.{layer}.{name}"
                value = before.parameters[full]
                gradient = value - after[full]  # one step of SGD at rate 1
                place = int(gradient.abs().argmax())
                step = torch.zeros_like(value).view(-1)
                step[place] = 1e-5
                up, down = (
                    objective(frozen, ask, before.with_parameters({full: value + sign * step.view_as(value)}), weight)
                    for sign in (1, -1)
                )
                assert (up - down) / 2e-5 == pytest.approx(float(gradient.view(-1)[place]), rel=1e-5, abs=1e-8), full


def test_the_divergence_matters_for_routers_and_below_and_its_weight_scales_it(monkeypatch: pytest.MonkeyPatch) -> None:
    all_positions_always(monkeypatch)
    none, once, twice = (
        moved(trained([asked(target=t, weight=w)])[0]) for t, w in ((None, 0), (TARGET, 1), (TARGET, 2))
    )
    for name, value in none.items():
        if name.endswith(("router", "bias")):
            assert float((once[name] - value).abs().max()) > 1e-6
            assert torch.allclose(twice[name] - value, 2 * (once[name] - value), atol=1e-12)
    zero = moved(trained([asked(target=TARGET, weight=0.0)])[0])
    assert all(torch.equal(zero[name], value) for name, value in none.items())


def test_a_mini_batch_in_parts_has_the_divergence_of_the_whole() -> None:
    whole = moved(trained([asked(target=TARGET)])[0])
    for parts in (2, 3, 8):
        apart = moved(trained([asked(target=TARGET)], replace(SGD, accumulation=parts))[0])
        for name, value in whole.items():
            assert torch.allclose(apart[name], value, atol=1e-12), (parts, name)


def test_the_pass_before_the_parts_draws_no_other_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    all_positions_always(monkeypatch)
    settings = replace(SGD, accumulation=2, dropout=0.3, steps=3)
    none = moved(trained([asked()], settings)[0])
    zero = moved(trained([asked(target=TARGET, weight=0.0)], settings)[0])
    assert all(torch.equal(zero[name], value) for name, value in none.items())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_recomputing_layers_changes_no_bit(accumulation: int) -> None:
    settings = replace(SGD, lr=0.1, dropout=0.2, steps=3, accumulation=accumulation)
    kept, again = (trained([asked(target=TARGET)], replace(settings, checkpointing=c))[0] for c in (False, True))
    assert encode(kept.answer.model) == encode(again.answer.model)  # type: ignore[union-attr]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_company_changes_no_bit(accumulation: int) -> None:
    """Clients of other targets, masks and numbers of steps, in fp32 with dropout."""
    settings = replace(FAST, optimizer="adamw", lr=1e-2, batch_size=8, steps=None, epochs=2, dropout=0.1)
    settings = replace(settings, accumulation=accumulation)
    masks = [(True, True, True), (True, True, False), (False, True, True)]
    targets = [TARGET, [0.5, 0.5, 0.0], [0.0, 0.9, 0.1]]
    asks = [
        asked(i, target, made=model(i, allowed, torch.float32), count=(32, 16, 24)[i])
        for i, (target, allowed) in enumerate(zip(targets, masks, strict=True))
    ]
    one_by_one, together = trained(asks, settings, 1, "float32"), trained(asks, settings, 3, "float32")
    for one, other in zip(one_by_one, together, strict=True):
        assert encode(one.answer.model) == encode(other.answer.model)  # type: ignore[union-attr]


def test_what_a_client_may_not_use_is_no_part_of_its_divergence() -> None:
    usage = {"w": torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)}
    stacked = UsageDivergence.stack([UsageDivergence(torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64), 1.0)], 0)
    expected = 0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.75 / 0.5)
    assert float(stacked.value(usage)) == pytest.approx(expected, rel=1e-12)
    unused = {"w": torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)}
    clamped = 0.25 * np.log(0.25 / 1e-8) + 0.75 * np.log(0.75)
    assert float(stacked.value(unused)) == pytest.approx(clamped, rel=1e-12)


def test_the_mean_is_over_layers() -> None:
    usage = {name: torch.tensor([[0.5, 0.5]]) for name in "uvw"}
    stacked = UsageDivergence.stack([UsageDivergence(torch.tensor([1.0, 0.0]), 3.0)], 0)
    assert float(stacked.value(usage)) == pytest.approx(3 * np.log(2), rel=1e-6)


def test_a_penalty_where_nothing_is_routed_is_refused() -> None:
    ask = asked(target=TARGET)
    assert isinstance(ask.request, Fit)
    plain = Model(shared=ask.request.initial["shared"])
    (answer,) = Executor({"base": base()}, SGD, Plan()).answer(
        [replace(ask, request=replace(ask.request, initial=plain, train=("shared.*",)))]
    )
    assert isinstance(answer, ModelError) and "routing of 'experts'" in str(answer)
