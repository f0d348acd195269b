"""The proximal term: nothing at mu 0, its gradient by hand, a large mu, stacks, and what it is refused for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from engines.world import FAST, base, play, world

from coterie.algorithms import FedIT, FedPALoRA, FFALoRA, FlexLoRA, LocalOnly
from coterie.algorithms.proximal import Proximal, held
from coterie.algorithms.server_optimised import ServerOptimised
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError, ModelError, RunError
from coterie.maths.keys import root_key
from coterie.maths.server_optim import ServerOptimizer
from coterie.protocol import Adapter, Client, Dense, Evaluate, FactorDistance, Fit, LowRank, Model, Upload
from coterie.training.asks import Plan, TrainSettings
from coterie.wire.codec import encode


def ranks_of(method: Any) -> tuple[int, ...]:
    return (4, 4, 4) if method.traits.ranks == "equal" else (2, 4, 16)


def last(method: Any, **options: Any) -> Any:
    return play(world(method, ranks_of(method), **options))[-1]


def term(seed: int, rank: int = 2) -> LowRank:
    key = root_key(seed)
    return LowRank(key.fold("B").normal((5, rank)), key.fold("A").normal((rank, 4)), 2.0)


@pytest.mark.parametrize("method", [FedIT(), FFALoRA()], ids=lambda method: method.traits.title)
def test_mu_0_is_the_inner_method_to_the_bit(method: Any) -> None:
    plain, wrapped = last(method), last(Proximal(method, 0.0))
    assert encode(plain.progress) == encode(wrapped.progress) and plain.metrics == wrapped.metrics
    assert encode(last(Proximal(method, 0.1)).progress.state) != encode(plain.progress.state)


def test_the_penalty_is_half_mu_times_the_squared_distance_of_the_trained_factors() -> None:
    start, now = {"x": term(0), "y": term(1)}, {"x": term(2), "y": term(3)}
    made = held(Fit(Model(lora=start), penalties=["given"]), 0.5, "a")  # type: ignore[list-item]
    assert made.penalties[0] == "given" and len(made.penalties) == 2
    stacked = Model.stack([Model(lora=now)])
    value = FactorDistance.stack([made.penalties[1]], 2).value(stacked)
    wanted = sum(
        (getattr(now[layer], part) - getattr(start[layer], part)).square().sum()
        for layer in start
        for part in ("B", "A")
    )
    assert value.shape == (1,) and torch.allclose(value[0], 0.25 * wanted, rtol=1e-6)


def test_only_what_is_trained_is_held() -> None:
    start = Model(lora={"x": term(0), "y": term(1)}, shared={"x": term(2)})
    made = held(Fit(start, train=("lora.*.B", "lora.y.A", "shared.x.A")), 1.0, "a").penalties
    parts = {(one.term, one.parts): sorted(one.reference) for one in made}
    assert parts == {("lora", ("B",)): ["x"], ("lora", ("B", "A")): ["y"], ("shared", ("A",)): ["x"]}
    assert held(Fit(start, train=()), 1.0, "a").penalties == []
    evaluation = Evaluate(start, "train")
    assert held(evaluation, 1.0, "a") is evaluation


@dataclass(frozen=True)
class Doubled(Proximal):
    """Proximal training of factors in fp64."""

    def start(self, federation: Any, server: Any) -> Any:
        made = super().start(federation, server)
        wide = {name: replace(one, B=one.B.double(), A=one.A.double()) for name, one in made.lora.items()}
        return replace(made, lora=wide)


def test_the_second_step_is_drawn_back_by_lr_mu_times_the_first() -> None:
    """With SGD, w_2 = w_1 - lr (g(w_1) + mu (w_1 - w_0)), and the first step is the same whatever mu is."""
    lr, mu = 0.1, 0.7
    course: dict[tuple[int, float], Any] = {}
    for steps in (0, 1, 2):
        for weight in (0.0, mu):
            train = replace(FAST, steps=max(steps, 1), lr=lr)
            run = world(
                Doubled(FedIT(), weight), (4, 4), plan=Plan(dtype="float64"), train=train, rounds=1, head="frozen"
            )
            begun = run.begin()
            course[steps, weight] = (next(run.rounds(begun)).progress if steps else begun).state.lora
    for layer in course[0, mu]:
        for part in ("B", "A"):
            w_0, w_1, w_2, free = (getattr(course[at][layer], part) for at in ((0, mu), (1, mu), (2, mu), (2, 0.0)))
            assert torch.equal(w_1, getattr(course[1, 0.0][layer], part))
            assert torch.allclose(w_2 - free, -lr * mu * (w_1 - w_0), rtol=0, atol=1e-12)
        assert float((course[2, mu][layer].B - course[2, 0.0][layer].B).abs().max()) > 1e-6


def test_a_large_mu_keeps_the_factors_at_the_download() -> None:
    train = TrainSettings(
        optimizer="adam", lr=1e-2, schedule="linear", batch_size=4, steps=120, weight_decay=0.0, clip=None
    )
    network, moved = base(), {}
    for mu in (0.0, 1e4):
        run = world(Proximal(FedIT(), mu), (4, 4), rounds=1, head="frozen", train=train, network=network)
        begun = run.begin()
        (played,) = run.rounds(begun)
        for layer, one in played.progress.state.lora.items():
            for part in ("B", "A"):
                apart = getattr(one, part) - getattr(begun.state.lora[layer], part)
                moved[mu, layer, part] = float(apart.norm())
    for mu, layer, part in moved:
        if mu:
            assert moved[mu, layer, part] < 0.05 * moved[0.0, layer, part], (layer, part)


@pytest.mark.parametrize("method", [FedIT(), FFALoRA()], ids=lambda method: method.traits.title)
def test_stacked_equals_sequential(method: Any) -> None:
    train = TrainSettings(optimizer="adamw", lr=1e-3, batch_size=4, steps=3, dropout=0.1)
    states = []
    for clients in (1, 3):
        plan = Plan(clients_per_step=clients, padding_rank=16)
        states.append(last(Proximal(method, 0.3), plan=plan, train=train).progress.state)
    for layer, one in states[0].lora.items():
        other = states[1].lora[layer]
        assert torch.allclose(one.B, other.B, rtol=0, atol=1e-5) and torch.allclose(one.A, other.A, rtol=0, atol=1e-5)
        assert float(one.B.abs().max()) > 1e-4


def test_the_penalty_vanishes_at_the_start_and_is_told_apart_from_the_loss() -> None:
    run = world(Proximal(FedIT(), 1.0), rounds=1)
    fits = watched(run)
    play(run)
    assert len(fits) == 3
    assert all(fitted.penalty_before == 0.0 < fitted.penalty_after for fitted in fits)


def watched(run: InProcess) -> list[Any]:
    """The answers to all Fits, as they come."""
    seen: list[Any] = []
    answer = run.executor.answer

    def answering(asks: Any) -> Any:
        done = answer(asks)
        seen.extend(one.answer for ask, one in zip(asks, done, strict=True) if isinstance(ask.request, Fit))
        return done

    run.executor.answer = answering  # type: ignore[method-assign]
    return seen


def test_requests_of_a_list_are_held_one_by_one() -> None:
    class Twice(FedIT):
        def local(self, client: Client, download: Adapter) -> Any:
            both = [Fit(Model(lora=download)), Fit(Model(lora=download), head=False)]
            first, _ = yield both
            return Upload(first.model["lora"])

    run = world(Proximal(Twice(), 1.0), rounds=1)
    fits = watched(run)
    play(run)
    assert len(fits) == 6 and all(fitted.penalty_after > 0 for fitted in fits)


def test_it_stands_beside_a_server_optimiser() -> None:
    method = ServerOptimised(Proximal(FedIT(), 0.1), ServerOptimizer("adam", lr=0.01))
    assert method.traits.title == "FedIT + FedProx + FedAdam"
    assert encode(last(method).progress.state) != encode(
        last(ServerOptimised(FedIT(), ServerOptimizer("adam", lr=0.01))).progress.state
    )


@pytest.mark.parametrize("method", [FlexLoRA(), FedPALoRA(), LocalOnly()], ids=lambda method: method.traits.title)
def test_a_method_that_does_not_average_is_refused(method: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{method.traits.title} does not average factors; choose"):
        Proximal(method, 0.1)


@pytest.mark.parametrize("mu", [-1.0, float("nan"), float("inf")])
def test_a_mu_that_is_no_weight_is_refused(mu: float) -> None:
    with pytest.raises(ConfigError, match="mu must be a finite number, at least 0"):
        Proximal(FedIT(), mu)


def test_a_trained_parameter_that_is_no_factor_is_named() -> None:
    diagonal = replace(term(0), diagonal=torch.ones(2))
    with pytest.raises(ModelError, match=r"client a, layer x: lora trains B, A, diagonal of a LowRank"):
        held(Fit(Model(lora={"x": diagonal})), 1.0, "a")
    assert held(Fit(Model(lora={"x": diagonal}), train=("lora.*.B",)), 1.0, "a").penalties[0].parts == ("B",)
    with pytest.raises(ModelError, match="delta trains W of a Dense"):
        held(Fit(Model(delta={"x": Dense(torch.ones(5, 4))}), train=("delta.*",)), 1.0, "a")


def test_the_fault_of_one_clients_request_is_its_own() -> None:
    class Odd(FedIT):
        def local(self, client: Client, download: Adapter) -> Any:
            first = next(iter(download.values()))
            extra = {} if client.card.id != "c1" else {"delta": {"x": Dense(first.B)}}
            fitted = yield Fit(Model(lora=download, **extra), train=("lora.*", *(f"{name}.*" for name in extra)))
            return Upload(fitted.model["lora"])

    run = world(Proximal(Odd(), 0.1), rounds=1)
    played = play(run)[0]
    assert played.metrics["answered"] == ["c0", "c2"]
    assert "a proximal term is for the factors B and A" in played.metrics["failed"]["c1"]
    with pytest.raises(RunError, match="2 of 3 clients answered"):
        play(world(Proximal(Odd(), 0.1), rounds=1, min_replies=3))
