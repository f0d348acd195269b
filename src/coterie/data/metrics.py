"""How well predicted classes agree with the true ones: pure functions on (predictions, labels), each (n,) integers.

A task names those that it is judged by (`Task.metrics`). Each equals the function of scikit-learn that its docstring
names, with 0 where that one is undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from coterie.errors import ConfigError, DataError, nearest


def accuracy(predictions: ArrayLike, labels: ArrayLike) -> float:
    """The share of right answers (accuracy_score)."""
    given, true = _checked(predictions, labels)
    return float(np.mean(given == true))


def f1(predictions: ArrayLike, labels: ArrayLike) -> float:
    """The harmonic mean of precision and recall of class 1 (f1_score); whatever is not 1 counts as negative."""
    given, true = _checked(predictions, labels)
    return _f1_of(given == 1, true == 1)


def macro_f1(predictions: ArrayLike, labels: ArrayLike) -> float:
    """The plain mean of the F1 of every class that is predicted or true somewhere (f1_score, average="macro")."""
    given, true = _checked(predictions, labels)
    return float(np.mean([_f1_of(given == kind, true == kind) for kind in np.union1d(given, true)]))


def matthews(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Matthews correlation, from -1 to 1 (matthews_corrcoef); of more than two classes Gorodkin's R_K (2004)."""
    given, true = _checked(predictions, labels)
    kinds = np.union1d(given, true)
    # Covariances of the one-hot rows, times n²; whole numbers, so exact.
    table = np.zeros((len(kinds), len(kinds)), dtype=np.int64)
    np.add.at(table, (np.searchsorted(kinds, given), np.searchsorted(kinds, true)), 1)
    predicted, actual, count = table.sum(axis=1), table.sum(axis=0), len(given)
    between = int(np.trace(table)) * count - int(predicted @ actual)
    within = (count**2 - int(predicted @ predicted)) * (count**2 - int(actual @ actual))
    return float(between / within**0.5) if within else 0.0


METRICS: Mapping[str, Callable[[ArrayLike, ArrayLike], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
}


def scores(names: Iterable[str], predictions: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """The named metrics, such as a task's, in the order given.

    Raises:
        ConfigError: an unknown metric.
        DataError: no predictions, or not one for each label.
    """
    wanted = list(names)
    for name in wanted:
        if name not in METRICS:
            raise ConfigError(f"there is no metric {name!r}{nearest(name, METRICS)}")
    return {name: METRICS[name](predictions, labels) for name in wanted}


def _f1_of(given: np.ndarray, true: np.ndarray) -> float:
    """2 TP / (2 TP + FP + FN) of boolean (n,) arrays."""
    either = int(given.sum()) + int(true.sum())
    return 2 * int((given & true).sum()) / either if either else 0.0


def _checked(predictions: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    given, true = (np.asarray(values, dtype=np.int64).reshape(-1) for values in (predictions, labels))
    if len(given) != len(true) or not len(given):
        raise DataError(f"{len(given)} predictions for {len(true)} labels: each needs one, and there must be some")
    return given, true
