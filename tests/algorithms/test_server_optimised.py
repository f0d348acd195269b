"""Server optimisers around methods that average: the mean itself, the formulas, what stays, what is refused."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conformance.harness import LAYERS, cards, play, random_training
from engines.world import play as play_all
from engines.world import text, world
from reference.server_steps import trajectory

from algorithms.fixtures import LAYER, card
from coterie.algorithms import FedIT, FedPALoRA, FFALoRA, FlexLoRA, LocalOnly
from coterie.algorithms.fedit import State as Averaged
from coterie.algorithms.server_optimised import ServerOptimised, State
from coterie.engines.sites import Volatile, load_record
from coterie.errors import ConfigError, RunError
from coterie.maths.keys import root_key
from coterie.maths.server_optim import ServerOptimizer
from coterie.protocol import Adapter, Client, Evaluate, Fit, LowRank, Model, Server, Upload, Uploads, message
from coterie.protocol.messages import Uploaded
from coterie.wire.codec import decode, encode

PLAIN = ServerOptimizer("sgd", lr=1.0, momentum=0.0)
ADAM = ServerOptimizer("adam", lr=0.1)
SERVER = Server((), root_key(0).fold, round=1, phase="main")


def ranks_of(method: Any) -> tuple[int, ...]:
    return (4, 4, 4) if method.traits.ranks == "equal" else (2, 4, 16)


@pytest.mark.parametrize("method", [FedIT(), FFALoRA()], ids=lambda method: method.traits.title)
def test_sgd_at_rate_one_without_momentum_is_the_inner_method_to_the_bit(method: Any) -> None:
    options: dict[str, Any] = {"ranks": ranks_of(method), "sample": 2, "rounds": 4}
    plain = play_all(world(method, **options))
    wrapped = play_all(world(ServerOptimised(method, PLAIN), **options))
    assert [p.metrics for p in wrapped] == [p.metrics for p in plain]
    for one, other in zip(wrapped, plain, strict=True):
        assert encode(one.progress.state.inner) == encode(other.progress.state)
        assert one.progress.state.m == {} and one.progress.state.v == {}
    assert encode(wrapped[-1].progress.heads) == encode(plain[-1].progress.heads)


def test_any_other_setting_changes_the_course() -> None:
    plain = play_all(world(FedIT()))
    for optimizer in (ADAM, replace(PLAIN, lr=0.5), replace(PLAIN, momentum=0.9)):
        played = play_all(world(ServerOptimised(FedIT(), optimizer)))
        assert encode(played[-1].progress.state.inner) != encode(plain[-1].progress.state)


def uploaded(B: list[list[float]], A: list[list[float]]) -> Uploads:
    term = LowRank(torch.tensor(B, dtype=torch.float64), torch.tensor(A, dtype=torch.float64))
    return Uploads([Uploaded(card("1", 1), {"w": term}, 1.0)])


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "yogi"])
def test_every_number_takes_the_papers_course_with_the_difference_of_averages_as_update(name: Any) -> None:
    optimizer = ServerOptimizer(name, lr=0.5, momentum=0.6, beta2=0.7, tau=0.1)
    method = ServerOptimised(FedIT(), optimizer)
    state = State(Averaged({"w": term_of([[0.0], [0.0]], [[1.0, 2.0]])}), {}, {})
    course = [state.inner.lora["w"]]
    deltas: dict[str, list[float]] = {"B": [], "A": []}
    for B, A in (([[1.0], [2.0]], [[0.0, 0.0]]), ([[3.0], [0.5]], [[1.0, 1.0]]), ([[0.0], [0.0]], [[2.0, -4.0]])):
        deltas["B"].append(B[0][0] - float(course[-1].B[0, 0]))
        deltas["A"].append(A[0][1] - float(course[-1].A[0, 1]))
        state = method.aggregate(state, uploaded(B, A), SERVER)
        course.append(state.inner.lora["w"])
    settings = {"eta": 0.5, "beta1": 0.6, "beta2": 0.7, "tau": 0.1}
    assert [float(term.B[0, 0]) for term in course[1:]] == pytest.approx(
        trajectory(name, 0.0, deltas["B"], **settings), rel=1e-12
    )
    assert [float(term.A[0, 1]) for term in course[1:]] == pytest.approx(
        trajectory(name, 2.0, deltas["A"], **settings), rel=1e-12
    )
    assert method.global_model(state)["lora"]["w"] is state.inner.lora["w"]
    assert torch.equal(method.send(state, card("1", 1))["w"].B, state.inner.lora["w"].B)


def term_of(B: list[list[float]], A: list[list[float]], scale: float = 1.0) -> LowRank:
    return LowRank(torch.tensor(B, dtype=torch.float64), torch.tensor(A, dtype=torch.float64), scale)


def test_a_mean_written_in_another_scale_is_the_same_update() -> None:
    """Last round's average has scale 2; this round only a client of scale 4 answers, with the same product."""
    method = ServerOptimised(FedIT(), replace(PLAIN, lr=0.5))
    before = State(Averaged({"w": term_of([[2.0], [4.0]], [[1.0, 1.0]], scale=2.0)}), {}, {})
    same = Uploads([Uploaded(card("1", 1, scale=4.0), {"w": term_of([[1.0], [2.0]], [[1.0, 1.0]], 4.0)}, 1.0)])
    after = method.aggregate(before, same, SERVER).inner.lora["w"]
    assert float(after.scale) == 2.0 and torch.equal(after.product(), before.inner.lora["w"].product())


def test_going_on_from_any_round_changes_no_bit() -> None:
    """The moments are part of the state; also with partial participation, in strict mode."""
    method = ServerOptimised(FedIT(), replace(ADAM, name="yogi"))
    options: dict[str, Any] = {"ranks": (2, 4, 4), "sample": 2, "rounds": 4, "strict": True}
    store = Volatile()
    run = world(method, store=store, **options)
    kept, metrics = [], []
    for played in run.rounds(run.begin()):
        metrics.append(played.metrics)
        kept.append((encode(played.progress), copy.deepcopy(store)))
    assert len(decode(kept[1][0]).state.v) > 0
    for number, (progress, then) in enumerate(kept[:-1], start=1):
        again = world(method, store=then, **options)
        rest = list(again.rounds(decode(progress)))
        assert [p.metrics for p in rest] == metrics[number:]
        assert encode(rest[-1].progress) == kept[-1][0]
        assert encode(load_record(then, "c0")) == encode(load_record(store, "c0"))


def test_a_frozen_factor_stays_what_it_is() -> None:
    run = world(ServerOptimised(FFALoRA(), ADAM), ranks=(4, 4, 4))
    begun = run.begin()
    state = list(run.rounds(begun))[-1].progress.state
    for layer, term in begun.state.inner.lora.items():
        assert torch.equal(state.inner.lora[layer].A, term.A)
        assert not torch.equal(state.inner.lora[layer].B, term.B)
    assert {name.rpartition(".")[2] for name in state.m} == {"B"}


@dataclass(frozen=True)
class Alternating(FedIT):
    """Trains B in odd rounds and A in even ones."""

    def local(self, client: Client, download: Adapter) -> Any:
        part = "B" if client.round % 2 else "A"
        fitted = yield Fit(Model(lora=download), train=(f"lora.*.{part}",))
        return Upload(fitted.model["lora"])


def test_what_alternates_moves_and_has_momentum_in_its_own_rounds_only() -> None:
    run = world(ServerOptimised(Alternating(), ADAM), ranks=(4, 4), rounds=4)
    begun = run.begin()
    states = [begun.state, *(played.progress.state for played in run.rounds(begun))]
    for number, (before, after) in enumerate(itertools.pairwise(states), start=1):
        moving, resting = ("B", "A") if number % 2 else ("A", "B")
        for layer, term in after.inner.lora.items():
            was = before.inner.lora[layer]
            assert torch.equal(getattr(term, resting), getattr(was, resting))
            assert not torch.equal(getattr(term, moving), getattr(was, moving))
            name = f"lora.{layer}.{resting}"
            assert (name in after.m) == (name in before.m)
            assert name not in after.m or torch.equal(after.m[name], before.m[name])


def test_a_layer_that_nobody_trained_stays_what_it_is() -> None:
    method = ServerOptimised(FedIT(), ADAM)
    first = play(method, cards({"a": 2, "b": 2}), random_training()).state
    only = [replace(one, layers={"first": LAYERS["first"]}) for one in cards({"a": 2})]
    then = play(method, only, random_training(1), state=first, number=2).state
    assert encode(then.inner.lora["second"]) == encode(first.inner.lora["second"])
    assert encode(then.inner.lora["first"]) != encode(first.inner.lora["first"])
    assert torch.equal(then.v["lora.second.B"], first.v["lora.second.B"])


def test_a_large_step_overshoots_and_a_small_one_hardly_moves() -> None:
    members = cards({"a": 2})
    mean = play(FedIT(), members, random_training()).state.lora["first"].A
    moved = {}
    for lr in (1e-4, 2.0):
        outcome = play(ServerOptimised(FedIT(), replace(PLAIN, lr=lr)), members, random_training())
        start = outcome.before.inner.lora["first"].A
        moved[lr] = float((outcome.state.inner.lora["first"].A - start).norm() / (mean - start).norm())
    assert moved == pytest.approx({1e-4: 1e-4, 2.0: 2.0}, rel=1e-3)


@message
class Counted:
    """An average, and how often the server has asked."""

    lora: Adapter
    asked: int


@dataclass(frozen=True)
class Asking(FedIT):
    """A method whose server asks before it starts, aggregates and finishes."""

    def start(self, federation: Any, server: Server) -> Any:
        made = super().start(federation, server).lora
        yield Evaluate(Model(lora=made), "public/toy")
        return Counted(made, 1)

    def aggregate(self, state: Any, uploads: Uploads, server: Server) -> Any:
        made = super().aggregate(state, uploads, server)
        yield Evaluate(Model(lora=made.lora), "public/toy")
        return replace(made, asked=state.asked + 1)

    def finish(self, state: Any, server: Server) -> Any:
        yield Evaluate(Model(lora=state.lora), "public/toy")
        return replace(state, asked=state.asked + 10)


def test_a_server_that_asks_is_answered_through_the_optimiser() -> None:
    options: dict[str, Any] = {"server_data": {"public/toy": text(8, seed=3)}, "rounds": 2}
    state = play_all(world(ServerOptimised(Asking(), ADAM), **options))[-1].progress.state
    assert state.inner.asked == 13 and len(state.v) > 0
    silent = play_all(world(ServerOptimised(FedIT(), ADAM), rounds=2))[-1].progress.state
    assert encode(state.inner.lora) == encode(silent.inner.lora)


def test_traits_say_what_a_step_leaves_true() -> None:
    facts = ServerOptimised(FedIT(), ADAM).traits
    assert facts.title == "FedIT + FedAdam" and "2003.00295" in facts.paper
    assert (facts.one_client, facts.equal_clients, facts.zero_weight, facts.linear_upload) == (False, False, True, True)
    exact = ServerOptimised(FFALoRA(), replace(ADAM, name="yogi")).traits
    assert not exact.exact and not exact.best_rank and exact.weights == "uniform" and exact.averages
    same = ServerOptimised(FFALoRA(), PLAIN).traits
    assert replace(same, title="", paper="") == replace(FFALoRA.traits, title="", paper="")


@pytest.mark.parametrize("method", [FlexLoRA(), FedPALoRA(), LocalOnly()], ids=lambda method: method.traits.title)
def test_a_method_that_does_not_average_is_refused(method: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{method.traits.title} does not average factors; choose"):
        ServerOptimised(method, ADAM)


def test_a_method_that_corrects_the_base_for_its_average_is_refused() -> None:
    class Correcting(FedIT):
        traits = replace(FedIT.traits, title="Correcting", changes_base=True)

    with pytest.raises(ConfigError, match="Correcting corrects the base for its average"):
        ServerOptimised(Correcting(), ADAM)


@message
class Elsewhere:
    """A state without `lora`."""

    mean: Adapter


def test_a_state_without_the_declared_average_is_named() -> None:
    class Hiding(FedIT):
        traits = replace(FedIT.traits, title="Hiding")

        def start(self, federation: Any, server: Server) -> Any:
            return Elsewhere(super().start(federation, server).lora)

    with pytest.raises(RunError, match=r"Hiding declares that it averages, but its state \(Elsewhere\) has no"):
        play_all(world(ServerOptimised(Hiding(), ADAM)))


def test_factors_that_change_their_shape_are_named() -> None:
    method = ServerOptimised(FedIT(), ADAM)
    state = State(Averaged({"w": term_of([[0.0], [0.0]], [[1.0, 2.0]])}), {}, {})
    wide = LowRank(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(RunError, match=r"lora\.w\.B was \(2, 1\) and is \(2, 2\)"):
        method.aggregate(state, Uploads([Uploaded(replace(card("1", 2), layers=LAYER), {"w": wide}, 1.0)]), SERVER)
