"""Metrics equal scikit-learn's, with 0 where one is undefined, and refuse what cannot be compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from coterie.data.metrics import METRICS, accuracy, f1, macro_f1, matthews, scores
from coterie.errors import ConfigError, DataError

PAIRS = st.integers(1, 5).flatmap(
    lambda kinds: st.lists(st.tuples(st.integers(0, kinds - 1), st.integers(0, kinds - 1)), min_size=1, max_size=40)
)
BINARY = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)


def parted(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    given_, true = zip(*pairs, strict=True)
    return np.array(given_), np.array(true)


def quietly(function: Callable[[], float]) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn tells when a metric is undefined
        return float(function())


@given(PAIRS)
def test_accuracy_macro_f1_and_matthews_equal_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    given_, true = parted(pairs)
    theirs = {
        "accuracy": quietly(lambda: sklearn_metrics.accuracy_score(true, given_)),
        "macro_f1": quietly(lambda: sklearn_metrics.f1_score(true, given_, average="macro", zero_division=0)),
        "matthews": quietly(lambda: sklearn_metrics.matthews_corrcoef(true, given_)),
    }
    assert scores(theirs, given_, true) == pytest.approx(theirs, abs=1e-12)


@given(BINARY)
def test_f1_equals_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    given_, true = parted(pairs)
    theirs = quietly(lambda: sklearn_metrics.f1_score(true, given_, pos_label=1, zero_division=0))
    assert f1(given_, true) == pytest.approx(theirs, abs=1e-12)


def test_metrics_of_a_stored_example_are_what_their_definitions_give() -> None:
    # Of class 1: 3 right, 1 missed, 2 false alarms, 4 right rejections.
    true = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    given_ = [1, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    assert accuracy(given_, true) == 0.7
    assert f1(given_, true) == pytest.approx(6 / 9)
    assert macro_f1(given_, true) == pytest.approx((6 / 9 + 8 / 11) / 2)
    assert matthews(given_, true) == pytest.approx((3 * 4 - 2 * 1) / (5 * 4 * 6 * 5) ** 0.5)


@given(PAIRS)
def test_renaming_classes_changes_no_symmetric_metric(pairs: list[tuple[int, int]]) -> None:
    given_, true = parted(pairs)
    for metric in (accuracy, macro_f1, matthews):
        assert metric(7 - 2 * given_, 7 - 2 * true) == pytest.approx(metric(given_, true), abs=1e-12)


def test_tensors_are_taken_and_right_answers_are_one() -> None:
    labels = torch.tensor([0, 1, 2, 1])
    assert {name: metric(labels, labels.numpy()) for name, metric in METRICS.items()} == dict.fromkeys(METRICS, 1.0)


def test_large_counts_stay_exact() -> None:
    true = np.repeat([0, 1], 300_000)
    assert matthews(1 - true, true) == -1.0 and matthews(np.zeros_like(true), true) == 0.0


def test_what_cannot_be_compared_is_refused() -> None:
    for metric in METRICS.values():
        for wrong in (([], []), ([1], [1, 0])):
            with pytest.raises(DataError, match="labels: each needs one"):
                metric(*wrong)
    with pytest.raises(ConfigError, match="no metric 'macrof1'; did you mean 'macro_f1'"):
        scores(["macrof1"], [1], [1])
