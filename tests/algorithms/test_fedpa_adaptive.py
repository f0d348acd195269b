"""FedPA-LoRA's adaptive weights: the three formulas by hand, their bounds, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.harness import cards, server
from engines.world import FAST, play, world
from hypothesis import given
from hypothesis import strategies as st

from algorithms.fixtures import adapter, card, term
from coterie.algorithms import FedPADirection, FedPAGradient, FedPALoRA, FedPALoss
from coterie.algorithms.fedpa_adaptive import alignment_gradient, normalised
from coterie.algorithms.fedpa_lora import Download
from coterie.engines.sites import Volatile, load_record
from coterie.engines.traffic import unwrapped
from coterie.errors import ConfigError
from coterie.experiments.methods import algorithm
from coterie.maths.keys import root_key
from coterie.protocol import (
    Adapter,
    Client,
    Evaluate,
    Federation,
    Fit,
    Gradient,
    LowRank,
    Memory,
    ProductDistance,
    Score,
    copied,
)
from coterie.wire.codec import encode

OWN = adapter(term([[1], [0]], [[3, 4]]))  # ||A|| = 5, ||B|| = 1, ||B A|| = 5
TASK = {"lora.w.B": torch.tensor([[10.0], [0.0]]), "lora.w.A": torch.tensor([[0.0, 1.5]])}


def strength(method: FedPALoRA, answer: Any, reference: Adapter, own: Adapter | None = OWN) -> tuple[Any, float]:
    """What the client asks for before it trains, and the lambda with which it then does."""
    root = root_key(0)
    memory = Memory({} if own is None else {"factors": own}, copied)
    client = Client(card("a", 1), memory, ("train",), root.fold, 2, "main")
    program = method.local(client, Download(reference, root))
    assert isinstance(program, Generator)
    asked = next(program)
    fit = program.send(answer)
    assert isinstance(fit, Fit) and encode(fit.initial["lora"]) == encode(own)
    (penalty,) = fit.penalties
    assert isinstance(penalty, ProductDistance) and penalty.reference is reference
    return asked, 2 * float(penalty.weight)


def by_gradient(reference: Adapter, **options: float) -> float:
    return strength(FedPAGradient(**options), TASK, reference)[1]


@pytest.mark.parametrize(("loss", "expected"), [(0.0, 2.0), (3.0, 2.0 / 2.5), (1e9, 0.0)])
def test_eq_154_lambda_falls_with_the_loss_of_the_first_mini_batch(loss: float, expected: float) -> None:
    asked, lam = strength(FedPALoss(lam=2.0, alpha=0.5), Score(loss, 0.5, 8), OWN)
    assert isinstance(asked, Evaluate) and asked.batch == "first" and asked.data == "train"
    assert lam == pytest.approx(expected, abs=1e-8)


def test_eq_155_and_156_the_pull_of_the_task_over_the_distance_of_the_products() -> None:
    """Pull: sqrt(10^2 / 5^2 + 1.5^2 / 1^2) = 2.5. From the zero product the client is 5 away."""
    asked, lam = strength(FedPAGradient(alpha=3.0), TASK, adapter(term([[0], [0]], [[1, 0]])))
    assert isinstance(asked, Gradient) and asked.batch == "first" and asked.data == "train"
    assert lam == pytest.approx(3.0 * 2.5 / 5.0)


def test_eq_156_pull_and_distance_of_equal_size_give_alpha() -> None:
    half = adapter(term([[0.5], [0]], [[3, 4]]))  # the products are 2.5 apart
    assert by_gradient(half, alpha=1.0) == pytest.approx(1.0)


def test_eq_156_is_clipped_to_its_bounds_also_where_there_is_no_distance() -> None:
    half = adapter(term([[0.5], [0]], [[3, 4]]))
    assert by_gradient(half, alpha=100.0) == 10.0
    assert by_gradient(half, alpha=0.01, lam_min=0.25, lam_max=4.0) == 0.25
    assert by_gradient(OWN, lam_max=7.0) == 7.0
    still = {name: torch.zeros_like(gradient) for name, gradient in TASK.items()}
    assert strength(FedPAGradient(), still, OWN)[1] == 0.0


@pytest.mark.parametrize(("sign", "expected"), [(1.0, 0.0), (-1.0, 4.0)])
def test_eq_157_agreement_frees_and_opposition_doubles(sign: float, expected: float) -> None:
    reference = adapter(term([[0], [2]], [[1, -1]]))
    task = {name: sign * 7 * gradient for name, gradient in alignment_gradient(OWN, reference).items()}
    assert strength(FedPADirection(lam=2.0), task, reference)[1] == pytest.approx(expected, abs=1e-9)


def test_eq_157_by_hand() -> None:
    """B = e1, A = e1', reference 0: the alignment's gradients are e1 and e1'; the task's are (1, 1) and 0."""
    own, nothing = adapter(term([[1], [0]], [[1, 0]])), adapter(term([[0], [0]], [[1, 0]]))
    task = {"lora.w.B": torch.tensor([[1.0], [1.0]]), "lora.w.A": torch.zeros(1, 2)}
    cosine = 1 / (2**0.5 * 2**0.5)
    assert strength(FedPADirection(lam=3.0), task, nothing, own)[1] == pytest.approx(3.0 * (1 - cosine))


def test_in_the_first_round_both_products_are_zero() -> None:
    """The gradient rule then gives its upper bound, the direction rule lambda_0."""
    members = cards({"a": 2, "b": 4})
    for method, expected in ((FedPAGradient(lam_max=6.0), 6.0), (FedPADirection(lam=1.5), 1.5)):
        state = method.start(Federation(tuple(members), 1), server(0))
        download = unwrapped(method.send(state, members[0]))
        root = root_key(0)
        client = Client(members[0], Memory({}, copied), ("train",), root.fold, 1, "main")
        program = method.local(client, download)
        asked = next(program)  # type: ignore[arg-type]
        entering = asked.model.parameters
        task = {n: torch.ones_like(v) if n.endswith("B") else torch.zeros_like(v) for n, v in entering.items()}
        assert 2 * program.send(task).penalties[0].weight == expected  # type: ignore[union-attr]


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 10_000))
def test_the_direction_rule_stays_between_zero_and_twice_lambda_0(rank: int, other: int, seed: int) -> None:
    key = root_key(seed)
    own = {"w": LowRank(key.fold(1).normal((5, rank)), key.fold(2).normal((rank, 4)))}
    reference = {"w": LowRank(key.fold(3).normal((5, other)), key.fold(4).normal((other, 4)))}
    task = {f"lora.w.{part}": key.fold(part).normal(tuple(v.shape)) for part, v in own["w"].parameters.items()}
    assert 0 <= strength(FedPADirection(lam=2.0), task, reference, own)[1] <= 4.0


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 10_000))
def test_the_alignment_gradient_is_autograd_s_on_the_dense_form(rank: int, other: int, seed: int) -> None:
    key = root_key(seed)
    own, reference = {}, {}
    for layer in ("u", "w"):
        draws = [key.fold(layer, i).normal(shape).double() for i, shape in enumerate([(5, rank), (rank, 4)])]
        own[layer] = LowRank(draws[0].requires_grad_(), draws[1].requires_grad_())
        reference[layer] = LowRank(
            key.fold(layer, "B").normal((5, other)).double(), key.fold(layer, "A").normal((other, 4)).double()
        )
    apart = sum((own[layer].product() - reference[layer].product()).square().sum() / 2 for layer in own)
    assert isinstance(apart, torch.Tensor)
    apart.backward()
    with torch.no_grad():
        made = alignment_gradient(own, reference)
    for layer, one in own.items():
        assert torch.allclose(made[f"lora.{layer}.B"], one.B.grad, atol=1e-10)  # type: ignore[arg-type]
        assert torch.allclose(made[f"lora.{layer}.A"], one.A.grad, atol=1e-10)  # type: ignore[arg-type]


def test_the_surrogate_runs_over_all_layers_together() -> None:
    both = {"u": OWN["w"], "w": OWN["w"]}
    task = {f"lora.{layer}.{part}": TASK[f"lora.w.{part}"] for layer in both for part in ("B", "A")}
    assert float(normalised(task, both).norm()) == pytest.approx(2**0.5 * 2.5)


def test_the_loss_is_that_of_the_first_training_step_and_lambda_is_reported() -> None:
    """With one step and no dropout, a client's training loss is its loss on the first mini-batch."""
    run = world(FedPALoss(lam=2.0, alpha=0.5), train=replace(FAST, steps=1))
    for played in play(run):
        losses = played.metrics["train"]["losses"].values()
        expected = sum(2.0 / (1 + 0.5 * loss) for loss in losses) / len(losses)
        assert played.metrics["measures"]["lam"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("method", "top"), [(FedPALoss(), 1), (FedPAGradient(alpha=0.01), 10), (FedPADirection(), 2)])
def test_what_is_reported_lies_within_the_rule_s_bounds_and_moves(method: FedPALoRA, top: float) -> None:
    played = play(world(method, strict=True))
    for one in played:
        assert 0 < one.metrics["measures"]["lam"] <= top
        assert one.metrics["measures"]["regulariser"] > 0
    assert len({one.metrics["measures"]["lam"] for one in played}) > 1


def test_without_lambda_0_no_bit_differs_from_fedpa_lora_without_lambda() -> None:
    """So asking for the first mini-batch moves no batch, and nothing more travels."""
    stores, states, rows = [], [], []
    for method in (FedPALoRA(lam=0.0), FedPALoss(lam=0.0), FedPADirection(lam=0.0)):
        stores.append(Volatile())
        run = world(method, store=stores[-1])
        states.append(encode(play(run)[-1].progress.state))
        rows.append(run.ledger.rows())
        assert encode(load_record(stores[-1], "c0")) == encode(load_record(stores[0], "c0"))
    assert states[0] == states[1] == states[2]
    assert rows[0] == rows[1] == rows[2]


def test_options_are_the_papers_and_bad_ones_are_told() -> None:
    assert algorithm("fedpa-lora-gradient", {}) == FedPAGradient(alpha=1.0, lam_min=0.0, lam_max=10.0)
    assert algorithm("fedpa-lora-loss", {"lam": 5, "alpha": 0.1}) == FedPALoss(lam=5.0, alpha=0.1)
    for name, options, said in (
        ("fedpa-lora-gradient", {"lam": 1.0}, "no option 'lam'"),
        ("fedpa-lora-gradient", {"lam_min": 2.0, "lam_max": 1.0}, r"lam_min \(2\) must be .* below lam_max \(1\)"),
        ("fedpa-lora-gradient", {"alpha": 0.0}, "alpha must be above 0"),
        ("fedpa-lora-loss", {"alpha": -1.0}, "alpha must be above 0, not -1"),
        ("fedpa-lora-direction", {"lam": -1.0}, r"lam \(-1\)"),
    ):
        with pytest.raises(ConfigError, match=said):
            algorithm(name, options)
