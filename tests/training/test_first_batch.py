"""Loss and gradient on the coming Fit's first mini-batch: which examples, and that asking moves nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines.world import FAST, base, key, text

from coterie.algorithms.factors import initial_adapter
from coterie.data.text import TextSet
from coterie.engines.driver import Party, drive_one
from coterie.protocol import Evaluate, Fit, Gradient, Model
from coterie.training.asks import Ask, Plan, TrainSettings
from coterie.training.evaluation import first_batch, training_batches
from coterie.training.executor import Executor

DATA = text(30, seed=3)


def party(executor: Executor, data: TextSet = DATA) -> Party:
    head = executor.bases["base"].head
    return Party("a", "base", {"train": data}, head, key("request"), trains_head=True)


def executor(settings: TrainSettings = FAST) -> Executor:
    return Executor({"base": base()}, settings, Plan())


def model(one: Executor) -> Model:
    return Model(lora=initial_adapter(one.bases["base"].layers, 4, 2.0, key("init")))


@pytest.mark.parametrize("settings", [replace(FAST, steps=1), replace(FAST, steps=1, accumulation=2)])
def test_the_loss_of_the_first_mini_batch_is_that_of_the_first_step(settings: TrainSettings) -> None:
    one = executor(settings)

    def program() -> Any:
        before = yield Evaluate(model(one), "train")
        score = yield Evaluate(model(one), "train", batch="first")
        fitted = yield Fit(model(one))
        second = yield Evaluate(fitted.model, "train", batch="first")
        again = yield Fit(fitted.model)
        return before, score, fitted, second, again

    before, score, fitted, second, again = drive_one(program(), party(one), one)
    assert score.examples == 4 and before.examples == 30
    assert score.loss == pytest.approx(fitted.mean_loss, rel=1e-6)
    assert second.loss == pytest.approx(again.mean_loss, rel=1e-6)
    assert len({round(value, 4) for value in (before.loss, score.loss, second.loss)}) == 3


def test_asking_for_the_first_mini_batch_moves_no_batch() -> None:
    one = executor()

    def program(asks: bool) -> Any:
        if asks:
            yield [Evaluate(model(one), "train", batch="first"), Gradient(model(one), "train", batch="first")]
        fitted = yield Fit(model(one))
        return fitted.model

    plain, curious = (drive_one(program(asks), party(one), one) for asks in (False, True))
    for name, value in plain.parameters.items():
        assert torch.equal(curious.parameters[name], value)


def test_loss_and_gradient_are_of_the_same_examples() -> None:
    one = executor()
    head = one.bases["base"].head
    chosen = first_batch(DATA, FAST, key("fit"))
    asks = [
        Ask("a", Evaluate(model(one), "train", batch="first"), "base", head, DATA, key("fit")),
        Ask("a", Evaluate(model(one), "train"), "base", head, chosen, key("fit")),
        Ask("a", Gradient(model(one), "train", batch="first"), "base", head, DATA, key("fit")),
        Ask("a", Gradient(model(one), "train"), "base", head, chosen, key("fit")),
        Ask("a", Evaluate(model(one), "train", limit=2, batch="first"), "base", head, DATA, key("fit")),
    ]
    scores = [done.answer for done in one.answer(asks)]  # type: ignore[union-attr]
    assert scores[0] == scores[1] and scores[4].examples == 2  # type: ignore[union-attr]
    for name, value in scores[3].items():  # type: ignore[union-attr]
        assert torch.allclose(scores[2][name], value, atol=1e-6)  # type: ignore[index]


def test_times_multiplies_the_settings_steps_alone() -> None:
    whole = training_batches(DATA, FAST, key("a"), times=4)
    assert len(whole) == 4 * 3
    for early, late in zip(training_batches(DATA, FAST, key("a")), whole, strict=False):
        assert (early.indices == late.indices).all()
    assert len(training_batches(DATA, FAST, key("a"), steps=5, times=4)) == 5
    epochs = replace(FAST, steps=None, epochs=2)
    assert len(training_batches(DATA, epochs, key("a"), times=4)) == len(training_batches(DATA, epochs, key("a")))
