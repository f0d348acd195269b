"""The battery on methods within a server optimiser or a proximal term, and what `averages` declares."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance import test_traits as battery
from conformance.harness import cards, play, random_training
from coterie.algorithms import METHODS, Algorithm, FedIT, FFALoRA, RoLoRA
from coterie.algorithms.proximal import Proximal
from coterie.algorithms.server_optimised import ServerOptimised
from coterie.maths.server_optim import ServerOptimizer
from coterie.protocol import Model

PLAIN = ServerOptimizer("sgd", lr=1.0, momentum=0.0)
HALF = ServerOptimizer("sgd", lr=0.5)
ADAM = ServerOptimizer("adam", lr=0.5)

WRAPPED = {
    "fedit+plain": ServerOptimised(FedIT(), PLAIN),
    "fedit+half": ServerOptimised(FedIT(), HALF),
    "fedit+adam": ServerOptimised(FedIT(), ADAM),
    "fedit+prox": Proximal(FedIT(), 0.1),
    "fedit+prox+yogi": ServerOptimised(Proximal(FedIT(), 0.1), ServerOptimizer("yogi", lr=0.5)),
    "ffa-lora+plain": ServerOptimised(FFALoRA(), PLAIN),
    "ffa-lora+adagrad": ServerOptimised(FFALoRA(), ServerOptimizer("adagrad", lr=0.5)),
    "ffa-lora+prox": Proximal(FFALoRA(), 0.1),
    "rolora+adam": ServerOptimised(RoLoRA(), ADAM),
    "rolora+prox": Proximal(RoLoRA(), 0.1),
}
CHECKS = {
    name.removeprefix("test_"): check
    for name, check in vars(battery).items()
    if name.startswith("test_") and list(inspect.signature(check).parameters) == ["algorithm"]
}


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in CHECKS.items()])
@pytest.mark.parametrize("algorithm", [pytest.param(made, id=name) for name, made in WRAPPED.items()])
def test_the_battery_holds_for_wrapped_methods(algorithm: Algorithm, check: Callable[[Algorithm], None]) -> None:
    check(algorithm)


def test_the_battery_was_found() -> None:
    assert len(CHECKS) >= 15


@pytest.mark.parametrize("name", sorted(name for name, kind in METHODS.items() if kind.traits.averages))
def test_averages_means_that_the_state_holds_the_mean_of_what_clients_trained(name: str) -> None:
    weights: dict[str, Any] = battery.WEIGHTS
    outcome = play(METHODS[name](), cards(battery.RANKS), random_training(), weights=weights)
    before, after = Model(lora=outcome.before.lora).parameters, Model(lora=outcome.state.lora).parameters
    trained = {client: outcome.fitted[client].parameters for client in weights}
    moved = [part for part, value in after.items() if not torch.equal(value, before[part])]
    assert moved
    for part in moved:
        mean = sum(weight * trained[client][part].double() for client, weight in weights.items())
        assert torch.allclose(after[part].double(), mean, atol=1e-6)
