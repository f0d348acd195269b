"""Server optimisers: formulas by hand and against a twin in plain floats, and what they leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.server_steps import trajectory

from coterie.errors import ConfigError
from coterie.maths.server_optim import Moments, ServerOptimizer, step

NAMES = ("sgd", "adagrad", "adam", "yogi")
DELTAS = ((1.0, -2.0), (0.5, 0.0), (-1.0, 2.0))
"""Three rounds of mean updates of a 2-vector."""


def played(settings: ServerOptimizer, deltas: Any = DELTAS) -> list[list[float]]:
    """The 2-vector after each round, from zero, in fp64."""
    x, moments, seen = torch.zeros(2, dtype=torch.float64), Moments(), []
    for delta in deltas:
        made, moments = step(moments, {"x": torch.tensor(delta, dtype=torch.float64)}, settings)
        x = x + made["x"]
        seen.append(x.tolist())
    return seen


def test_fedavgm_by_hand() -> None:
    # m: (1, -2), (1, -1), (-0.5, 1.5); x adds half of each.
    made = played(ServerOptimizer("sgd", lr=0.5, momentum=0.5))
    assert made == [[0.5, -1.0], [1.0, -1.5], [0.75, -0.75]]


def test_fedadagrad_by_hand() -> None:
    # tau 1: v starts at 1 and grows by Delta^2: (2, 5), (2.25, 5), (3.25, 9); no momentum.
    first = [1 / (2**0.5 + 1), -2 / (5**0.5 + 1)]
    second = [first[0] + 0.5 / 2.5, first[1]]
    third = [second[0] - 1 / (3.25**0.5 + 1), second[1] + 2 / 4]
    made = played(ServerOptimizer("adagrad", lr=1.0, tau=1.0))
    assert made == [pytest.approx(x, rel=1e-14) for x in (first, second, third)]


def test_fedadam_by_hand() -> None:
    # beta_1 = beta_2 = 1/2, tau 1; m: (.5, -1), (.5, -.5), (-.25, .75); v: (1, 2.5), (.625, 1.25), (.8125, 2.625).
    first = [0.5 / 2, -1 / (2.5**0.5 + 1)]
    second = [first[0] + 0.5 / (0.625**0.5 + 1), first[1] - 0.5 / (1.25**0.5 + 1)]
    third = [second[0] - 0.25 / (0.8125**0.5 + 1), second[1] + 0.75 / (2.625**0.5 + 1)]
    made = played(ServerOptimizer("adam", lr=1.0, momentum=0.5, beta2=0.5, tau=1.0))
    assert made == [pytest.approx(x, rel=1e-14) for x in (first, second, third)]


def test_fedyogi_by_hand() -> None:
    # v moves by half of Delta^2 towards it, and stays where it equals it: (1, 3), (.875, 3), (1.375, 5).
    first = [0.5 / 2, -1 / (3**0.5 + 1)]
    second = [first[0] + 0.5 / (0.875**0.5 + 1), first[1] - 0.5 / (3**0.5 + 1)]
    third = [second[0] - 0.25 / (1.375**0.5 + 1), second[1] + 0.75 / (5**0.5 + 1)]
    made = played(ServerOptimizer("yogi", lr=1.0, momentum=0.5, beta2=0.5, tau=1.0))
    assert made == [pytest.approx(x, rel=1e-14) for x in (first, second, third)]


@given(
    st.sampled_from(NAMES),
    st.lists(st.floats(-100, 100), min_size=1, max_size=6),
    st.floats(1e-3, 10),
    st.floats(0, 0.99),
    st.floats(0, 0.999),
    st.floats(1e-6, 1),
)
def test_any_course_is_that_of_the_twin(
    name: str, deltas: list[float], eta: float, beta1: float, beta2: float, tau: float
) -> None:
    settings = ServerOptimizer(name, eta, beta1, beta2, tau)  # type: ignore[arg-type]
    made = [row[0] for row in played(settings, [(delta, 0.0) for delta in deltas])]
    wanted = trajectory(name, 0.0, deltas, eta=eta, beta1=beta1, beta2=beta2, tau=tau)
    scale = max(1.0, max(abs(x) for x in wanted))
    assert made == pytest.approx(wanted, abs=1e-9 * scale)


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=8))
def test_plain_sgd_at_rate_one_is_the_update_to_the_bit_and_keeps_nothing(values: list[float]) -> None:
    delta = torch.tensor(values)
    made, moments = step(Moments(), {"x": delta}, ServerOptimizer("sgd", lr=1.0, momentum=0.0))
    assert made["x"].numpy().tobytes() == delta.numpy().tobytes()
    assert not moments.m and not moments.v


@pytest.mark.parametrize(("name", "share"), [("adagrad", 1.0), ("adam", 0.25), ("yogi", 1.0)])
def test_tau_bounds_the_adaptivity(name: Any, share: float) -> None:
    """v_{-1} = tau^2, of which Adam keeps the share beta_2: a tau far above Delta divides by tau (1 + sqrt share); one
    far below makes all coordinates step alike."""
    delta = {"x": torch.tensor([1e-3, -1.0], dtype=torch.float64)}
    wide, _ = step(Moments(), delta, ServerOptimizer(name, lr=1.0, momentum=0.0, beta2=0.25, tau=1e6))
    assert torch.allclose(wide["x"], delta["x"] / (1e6 * (1 + share**0.5)), rtol=1e-6, atol=0)
    narrow, _ = step(Moments(), delta, ServerOptimizer(name, lr=1.0, momentum=0.0, beta2=0.25, tau=1e-12))
    assert float((narrow["x"][0] / narrow["x"][1]).abs()) == pytest.approx(1.0, rel=1e-6)


def test_yogi_forgets_large_updates_more_slowly_than_adam() -> None:
    """After one large update, v falls by (1 - beta_2) Delta^2 with Yogi, by (1 - beta_2) v with Adam."""
    deltas = [(10.0, 0.0)] + [(0.1, 0.0)] * 5
    seen = {}
    for name in ("adam", "yogi"):
        moments = Moments()
        for delta in deltas:
            _, moments = step(moments, {"x": torch.tensor(delta)}, ServerOptimizer(name, lr=1.0, beta2=0.5))  # type: ignore[arg-type]
        seen[name] = float(moments.v["x"][0])
    assert seen["adam"] < 2 < 49 < seen["yogi"]


def test_moments_of_tensors_that_take_no_step_wait_and_nothing_given_is_changed() -> None:
    settings = ServerOptimizer("adam", lr=1.0)
    one, other = torch.tensor([1.0]), torch.tensor([2.0])
    _, first = step(Moments(), {"a": one, "b": other}, settings)
    kept = {name: value.clone() for name, value in (*first.m.items(), *((f"v{n}", t) for n, t in first.v.items()))}
    _, second = step(first, {"a": one}, settings)
    assert second.m["b"] is first.m["b"] and second.v["b"] is first.v["b"]
    assert not torch.equal(second.m["a"], first.m["a"])
    assert all(torch.equal(kept[name], value) for name, value in first.m.items())
    assert all(torch.equal(kept[f"v{name}"], value) for name, value in first.v.items())
    assert float(one) == 1.0


def test_everything_is_in_the_tensors_own_type() -> None:
    for dtype in (torch.float32, torch.float64):
        made, moments = step(Moments(), {"x": torch.ones(2, 3, dtype=dtype)}, ServerOptimizer("yogi", lr=0.1))
        assert {made["x"].dtype, moments.m["x"].dtype, moments.v["x"].dtype} == {dtype}
        assert made["x"].shape == moments.v["x"].shape == (2, 3)


def test_momentum_is_the_papers_unless_given() -> None:
    assert [ServerOptimizer(name, 1.0).beta1 for name in NAMES] == [0.9, 0.0, 0.9, 0.9]  # type: ignore[arg-type]
    assert ServerOptimizer("adagrad", 1.0, momentum=0.5).beta1 == 0.5


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"name": "lion"}, "'lion' is none of sgd, adagrad, adam, yogi"),
        ({"lr": 0.0}, "lr must be above 0, not 0"),
        ({"lr": float("nan")}, "lr must be above 0"),
        ({"tau": 0.0}, "tau must be above 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1"),
        ({"beta2": -0.1}, "beta2 must be at least 0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ServerOptimizer(**{"name": "adam", "lr": 1.0, **settings})
