"""Server optimisers: the mean of the clients' updates, taken as a gradient (with its sign turned) by an optimiser.

Reddi et al., Adaptive Federated Optimization, arXiv 2003.00295, Algorithm 2 (FedAdagrad, FedAdam, FedYogi); sgd with
momentum is FedAvgM (Hsu et al., arXiv 1909.06335). Element by element, with Delta_t the mean update and eta the rate:

    sgd        m_t = beta_1 m_{t-1} + Delta_t                           x_{t+1} = x_t + eta m_t
    the rest   m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t              x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau)
    adagrad    v_t = v_{t-1} + Delta_t^2
    adam       v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2
    yogi       v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2)

m_{-1} = 0 and v_{-1} = tau^2, the smallest that the paper admits; no bias is corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from coterie.errors import ConfigError


@dataclass(frozen=True)
class ServerOptimizer:
    """A server optimiser and its settings.

    lr: eta. momentum: beta_1; None is 0.9, but for adagrad 0. beta2, tau: of the adaptive three; the smaller tau, the
    more adaptive. The defaults are the paper's.

    Raises:
        ConfigError: a setting outside its range.
    """

    name: Literal["sgd", "adagrad", "adam", "yogi"]
    lr: float
    momentum: float | None = None
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        if self.name not in ("sgd", *_SECOND):
            raise ConfigError(f"server optimiser: {self.name!r} is none of sgd, {', '.join(_SECOND)}")
        for what, value, fits in (
            ("lr", self.lr, self.lr > 0),
            ("tau", self.tau, self.tau > 0),
            ("momentum", self.beta1, 0 <= self.beta1 < 1),
            ("beta2", self.beta2, 0 <= self.beta2 < 1),
        ):
            if not fits:
                wanted = "above 0" if what in ("lr", "tau") else "at least 0 and below 1"
                raise ConfigError(f"server optimiser: {what} must be {wanted}, not {value:g}")

    @property
    def beta1(self) -> float:
        """The momentum in force."""
        if self.momentum is not None:
            return self.momentum
        return 0.0 if self.name == "adagrad" else 0.9


@dataclass(frozen=True)
class Moments:
    """m and v by the names of the tensors; a name that is missing is as at the start."""

    m: Mapping[str, Tensor] = field(default_factory=dict)
    v: Mapping[str, Tensor] = field(default_factory=dict)


def step(moments: Moments, delta: Mapping[str, Tensor], settings: ServerOptimizer) -> tuple[dict[str, Tensor], Moments]:
    """x_{t+1} - x_t for each tensor of `delta` (any shape; computed in its dtype), and the moments afterwards.

    Moments of other names stay as they are. With sgd, rate 1 and no momentum, the result is `delta` to the bit.
    """
    made: dict[str, Tensor] = {}
    m, v = dict(moments.m), dict(moments.v)
    beta1 = settings.beta1
    for name, change in delta.items():
        fresh = change if settings.name == "sgd" else (1 - beta1) * change
        first = fresh
        if beta1 > 0:
            first = beta1 * m[name] + fresh if name in m else fresh
            m[name] = first
        if settings.name == "sgd":
            made[name] = settings.lr * first
            continue
        before = v[name] if name in v else torch.full_like(change, settings.tau**2)
        v[name] = _SECOND[settings.name](before, change.square(), settings.beta2)
        made[name] = settings.lr * first / (v[name].sqrt() + settings.tau)
    return made, Moments(m, v)


def _adagrad(v: Tensor, square: Tensor, beta2: float) -> Tensor:
    return v + square


def _adam(v: Tensor, square: Tensor, beta2: float) -> Tensor:
    return beta2 * v + (1 - beta2) * square


def _yogi(v: Tensor, square: Tensor, beta2: float) -> Tensor:
    return v - (1 - beta2) * square * torch.sign(v - square)


_SECOND: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "adagrad": _adagrad,
    "adam": _adam,
    "yogi": _yogi,
}
"""v_t of v_{t-1}, Delta_t^2 and beta_2."""
