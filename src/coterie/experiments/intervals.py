"""Spread over seeds: sample standard deviations, and t intervals of paired differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.95
"""The probability with which an interval covers the true mean, where differences are normal and independent."""


@dataclass(frozen=True)
class Paired:
    """Differences by seed. std is the sample standard deviation, low and high the ends of the t interval of the mean;
    all three are None with fewer than two seeds, which show no spread."""

    by_seed: dict[str, float]
    mean: float
    std: float | None
    low: float | None
    high: float | None


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one value."""
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float | None:
    """The sample standard deviation; None with fewer than two values."""
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1))


def paired(ours: Mapping[str, float | None], theirs: Mapping[str, float | None], level: float = LEVEL) -> Paired | None:
    """ours - theirs over the seeds that have both figures; None where no seed has both."""
    by_seed = {
        seed: value - other
        for seed, value in ours.items()
        if value is not None and (other := theirs.get(seed)) is not None
    }
    if not by_seed:
        return None
    values = list(by_seed.values())
    middle, std = mean(values), deviation(values)
    if std is None:
        return Paired(by_seed, middle, None, None, None)
    half = t_quantile((1 + level) / 2, len(values) - 1) * std / math.sqrt(len(values))
    return Paired(by_seed, middle, std, middle - half, middle + half)


def t_quantile(probability: float, freedom: int) -> float:
    """The value t >= 0 that Student's variable of `freedom` degrees stays below with this probability, in (0.5, 1).

    By bisection of the finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4) in the
    angle theta with t = sqrt(freedom) tan(theta); exact to about 1e-12 relative for the usual levels.

    Raises:
        ValueError: a probability or degrees of freedom outside these ranges.
    """
    if not 0.5 < probability < 1 or freedom < 1:
        raise ValueError(f"probability must be in (0.5, 1) and freedom at least 1, not {probability} and {freedom}")
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        if _within(middle, freedom) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _within(theta: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) tan(theta))."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    total, term = 0.0, cosine if odd else 1.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    if odd:
        return 2 / math.pi * (theta + sine * total)
    return sine * total
