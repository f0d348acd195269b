"""Shares of a whole: drawn at random from a Dirichlet distribution, and made whole numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from coterie.maths.keys import Key


def largest_remainder(quotas: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers of sum `total` nearest to `quotas` (k,), whose sum is `total` up to rounding; int64.

    Every number is its quota rounded down, plus one for the largest fractions (the first among equals).
    """
    whole: np.ndarray = np.floor(quotas).astype(np.int64)
    missing = total - int(whole.sum())
    whole[np.argsort(-(quotas - whole), kind="stable")[:missing]] += 1
    return whole


def dirichlet_shares(count: int, beta: float, key: Key) -> np.ndarray:
    """One draw from the symmetric Dirichlet(beta), (count,) float64 of sum one.

    Normalised gamma variates, kept as logarithms: at small beta all of them underflow, their ratios do not.
    """
    logs = log_gamma_variates(count, beta, key)
    shares = np.exp(logs - logs.max())
    return np.asarray(shares / shares.sum())


def log_gamma_variates(count: int, shape: float, key: Key) -> np.ndarray:
    """Logarithms of `count` independent Gamma(shape, 1) variates (Marsaglia & Tsang 2000), float64.

    A shape below one is drawn as Gamma(shape + 1) U^(1 / shape), in logarithms.
    """
    d = (shape + 1 if shape < 1 else shape) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    logs = np.full(count, np.nan)
    for attempt in itertools.count():  # nineteen in twenty are accepted each time
        open_ = np.flatnonzero(np.isnan(logs))
        if not len(open_):
            break
        stream = key.fold("gamma", attempt)
        x = stream.fold("normal").normal((len(open_),), dtype=torch.float64).numpy()
        log_u = np.log1p(-stream.fold("accept").unit(len(open_)))
        root = np.maximum(1 + c * x, 1e-300)
        log_v = 3 * np.log(root)
        accepted = (1 + c * x > 0) & (log_u < 0.5 * x**2 + d - d * root**3 + d * log_v)
        logs[open_[accepted]] = (math.log(d) + log_v)[accepted]
    return logs + np.log1p(-key.fold("power").unit(count)) / shape if shape < 1 else logs
