"""Metrics of an evaluation are those of its own predictions; texts without classes can be predicted, not scored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from training.small import (
    EXACT,
    answers,
    ask,
    base_of,
    choices,
    gpt2_lm,
    language_base_of,
    lora,
    sequences,
    texts,
)

from coterie.errors import ConfigError, DataError
from coterie.protocol import Calibrate, Evaluate, Fit, Gradient, Predict, Score
from coterie.training.evaluation import choice_score

DATA = texts(30, "evaluation")
UNKNOWN = replace(DATA, stored_labels=torch.full_like(DATA.stored_labels, -1))
METRICS = ("macro_f1", "matthews", "f1", "accuracy")


def test_metrics_are_scikit_learns_on_what_predict_says_whatever_the_batches() -> None:
    base = base_of()
    model = lora(base, 4)
    (said,) = answers(base, [ask(base, Predict(model, "test"), data=DATA)])
    given, true = said.answer.logits.argmax(dim=1).numpy(), DATA.labels.numpy()
    expected = {
        "macro_f1": f1_score(true, given, average="macro", zero_division=0),
        "matthews": matthews_corrcoef(true, given),
        "f1": f1_score(true == 1, given == 1, zero_division=0),
        "accuracy": accuracy_score(true, given),
    }
    for size in (4, 64):
        request = Evaluate(model, "test", judged_by=METRICS)
        (done,) = answers(base, [ask(base, request, data=DATA)], plan=replace(EXACT, eval_batch_size=size))
        assert done.answer.metrics == pytest.approx(expected, abs=1e-12) and tuple(done.answer.metrics) == METRICS
        assert done.answer.score == done.answer.metrics["macro_f1"]
        assert done.answer.accuracy == done.answer.metrics["accuracy"]


def test_by_default_the_score_is_the_accuracy() -> None:
    base = base_of()
    (done,) = answers(base, [ask(base, Evaluate(lora(base, 2), "test"), data=DATA)])
    assert done.answer.metrics == {"accuracy": done.answer.accuracy} and done.answer.score == done.answer.accuracy
    assert Score(1.0, 0.25, 8).score == 0.25


def test_of_options_a_place_is_a_class() -> None:
    data = choices(6)
    scores = torch.tensor([[1.0, 0.0, -torch.inf]] * 3 + [[0.0, 1.0, -torch.inf]] * 3, dtype=torch.float64)
    found = choice_score(scores, data, ("f1", "accuracy"))
    given = scores.argmax(dim=1)
    assert found.metrics["f1"] == pytest.approx(f1_score(data.labels == 1, given == 1))
    assert found.accuracy == found.metrics["accuracy"] == accuracy_score(data.labels, given)


def test_answers_tokens_have_no_metric_of_classes() -> None:
    base = language_base_of(gpt2_lm())
    request = Evaluate(lora(base, 2), "test", judged_by=("accuracy", "f1"))
    (done,) = answers(base, [ask(base, request, data=sequences(5), head=False)])
    assert isinstance(done, DataError) and "'f1' is a metric of classes" in str(done)


def test_an_unknown_metric_is_named() -> None:
    base = base_of()
    (done,) = answers(base, [ask(base, Evaluate(lora(base, 2), "test", judged_by=("mathews",)), data=DATA)])
    assert isinstance(done, ConfigError) and "did you mean 'matthews'?" in str(done)


def test_texts_whose_classes_nobody_knows_are_predicted_but_neither_scored_nor_learnt() -> None:
    base = base_of()
    model = lora(base, 4)
    requests = [Evaluate(model, "test"), Gradient(model, "test"), Fit(model, data="test")]
    for request in requests:
        (done,) = answers(base, [ask(base, request, data=UNKNOWN)])
        assert isinstance(done, DataError) and "these examples have no labels" in str(done)
    for request in (Predict(model, "test"), Calibrate(model, "test")):
        blind, known = answers(base, [ask(base, request, data=UNKNOWN), ask(base, request, data=DATA)])
        if isinstance(request, Predict):
            assert torch.equal(blind.answer.logits, known.answer.logits)
            assert set(blind.answer.labels.tolist()) == {-1}
        else:
            assert all(torch.equal(blind.answer[name], known.answer[name]) for name in known.answer)
