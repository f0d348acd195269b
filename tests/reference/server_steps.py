"""Server optimisers one number at a time, written down from Algorithm 2 of arXiv 2003.00295 in Python floats."""

from __future__ import annotations

import math
from collections.abc import Sequence


def trajectory(
    name: str, start: float, deltas: Sequence[float], *, eta: float, beta1: float, beta2: float, tau: float
) -> list[float]:
    """x_1, x_2, ... of one coordinate that starts at x_0 and sees these mean updates."""
    x, m, v, seen = start, 0.0, tau * tau, []
    for delta in deltas:
        if name == "sgd":
            m = beta1 * m + delta
            x = x + eta * m
        else:
            m = beta1 * m + (1 - beta1) * delta
            if name == "adagrad":
                v = v + delta * delta
            elif name == "yogi":
                apart = v - delta * delta
                v = v - (1 - beta2) * delta * delta * (apart > 0) + (1 - beta2) * delta * delta * (apart < 0)
            elif name == "adam":
                v = beta2 * v + (1 - beta2) * delta * delta
            else:
                raise ValueError(name)
            x = x + eta * m / (math.sqrt(v) + tau)
        seen.append(x)
    return seen
