"""FedRot-LoRA: products kept, sides by turns, sign flips and rotations undone, its reductions to FedIT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.harness import LAYERS, Outcome, Trained, cards, dense, deployed, gap, play, random_training
from engines.world import world

from coterie.algorithms import FedIT, FedRotLoRA, FedRotSoft
from coterie.maths.keys import root_key
from coterie.maths.rotation import procrustes
from coterie.protocol import Adapter, LowRank, Model

MEMBERS = cards({"a": 2, "b": 2, "c": 2})
HARD, SOFT = FedRotLoRA(), FedRotSoft(lam=0.5)


def rounds(algorithm: Any, count: int, trained: Trained | None = None) -> list[Outcome]:
    found: list[Outcome] = []
    for number in range(1, count + 1):
        state, memories = (found[-1].state, found[-1].memories) if found else (None, None)
        how = trained if trained is not None and number > 1 else random_training(number)
        found.append(play(algorithm, MEMBERS, how, state=state, memories=memories, number=number))
    return found


@pytest.mark.parametrize("algorithm", [HARD, SOFT, FedRotSoft(lam=1.0)])
def test_what_is_uploaded_has_the_product_that_was_trained(algorithm: FedRotLoRA) -> None:
    for outcome in rounds(algorithm, 4):
        for name, sent in outcome.payloads.items():
            for layer, term in sent.items():
                own = dense(outcome.fitted[name]["lora"][layer])
                assert float((dense(term) - own).norm() / own.norm()) < 1e-6


@pytest.mark.parametrize("first", ["A", "B"])
def test_round_one_turns_nothing_and_then_the_sides_take_turns(first: Any) -> None:
    """The side that is aligned ends nearer to the reference, or as near; nothing else is promised of the other one."""
    other = "B" if first == "A" else "A"
    algorithm = FedRotLoRA(first)
    assert [algorithm.side(number) for number in range(1, 6)] == [None, first, other, first, other]
    for number, outcome in enumerate(rounds(algorithm, 4), start=1):
        side = algorithm.side(number)
        for name, sent in outcome.payloads.items():
            for layer, term in sent.items():
                own, reference = outcome.fitted[name]["lora"][layer], outcome.downloads[name][layer]
                if side is None:
                    assert torch.equal(term.B, own.B) and torch.equal(term.A, own.A)
                    continue
                target = reference.parameters[side]
                before, after = own.parameters[side] - target, term.parameters[side] - target
                assert float(after.norm()) < float(before.norm())


def turned(reference: Adapter, shared: int) -> Trained:
    """Everybody ends at one product near the reference's side A, each in an orthogonal basis of its own."""

    def trained(name: str, model: Model) -> Model:
        lora: Adapter = {}
        for layer, term in model["lora"].items():
            noise = root_key(shared).fold(layer)
            A = reference[layer].A + 0.1 * noise.fold("A").normal(tuple(term.A.shape))
            B = noise.fold("B").normal(tuple(term.B.shape))
            Q = torch.linalg.qr(root_key(9).fold(name, layer).normal((term.rank, term.rank))).Q
            lora[layer] = replace(term, B=B @ Q, A=Q.mT @ A)
        return Model(lora=lora)

    return trained


def test_clients_that_agree_up_to_a_basis_lose_nothing_where_fedit_loses_much() -> None:
    for algorithm, lost in ((HARD, False), (FedIT(), True)):
        start = play(algorithm, MEMBERS, random_training(1))
        trained = turned(start.state.lora, 3)
        outcome = play(algorithm, MEMBERS, trained, state=start.state, memories=start.memories, number=2)
        made = deployed(algorithm, outcome)
        wanted = {layer: dense(term) for layer, term in outcome.fitted["a"]["lora"].items()}
        assert made is not None and (gap(made, wanted) > 0.1 if lost else gap(made, wanted) < 1e-5)


def test_two_clients_of_opposite_signs_average_to_themselves_and_by_fedit_to_nothing() -> None:
    """(B, A) and (-B, -A) at rank one, beside a common reference A."""
    members = cards({"a": 1, "b": 1})

    def trained(name: str, model: Model) -> Model:
        sign = 1.0 if name == "a" else -1.0
        key = root_key(2)
        return Model(
            lora={
                layer: replace(t, B=sign * key.fold(layer).normal(tuple(t.B.shape)), A=sign * t.A)
                for layer, t in model["lora"].items()
            }
        )

    sent = {}
    for algorithm in (HARD, FedRotSoft(lam=1.0), FedIT()):
        outcome = play(algorithm, members, trained, number=2)
        made = deployed(algorithm, outcome)
        assert made is not None
        sent[type(algorithm)] = made
    whole = {layer: dense(term) for layer, term in outcome.fitted["a"]["lora"].items()}
    assert gap(sent[FedRotLoRA], whole) < 1e-6
    for other in (FedRotSoft, FedIT):  # at rank one a proper rotation cannot mend a sign
        assert max(float(product.norm()) for product in sent[other].values()) < 1e-6


def test_soft_with_lam_zero_is_fedit() -> None:
    for soft, fedit in zip(rounds(FedRotSoft(lam=0.0), 3), rounds(FedIT(), 3), strict=True):
        for layer, term in soft.state.lora.items():
            assert torch.allclose(term.B, fedit.state.lora[layer].B, atol=1e-6)
            assert torch.allclose(term.A, fedit.state.lora[layer].A, atol=1e-6)


def test_a_reflected_client_is_mended_by_hard_and_left_by_soft_alignment() -> None:
    term = LowRank(torch.eye(2), torch.diag(torch.tensor([2.0, -1.0])))
    reference = LowRank(torch.zeros(2, 2), torch.eye(2))
    assert torch.allclose(HARD.aligned(term, reference, "A").A, torch.diag(torch.tensor([2.0, 1.0])))
    assert torch.allclose(FedRotSoft(lam=1.0).aligned(term, reference, "A").A, term.A)


def test_n10_the_quarter_turn_is_taken_up_by_b() -> None:
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    made = HARD.aligned(LowRank(torch.eye(2), turn), LowRank(torch.zeros(2, 2), torch.eye(2)), "A")
    assert torch.allclose(made.A, torch.eye(2)) and torch.allclose(made.B, turn)
    assert torch.allclose(procrustes(turn.mT, torch.eye(2)).float(), turn)


def test_up_and_down_are_fedits() -> None:
    for layer in LAYERS.values():
        assert HARD.bytes_up(layer, MEMBERS[0]) == FedIT().bytes_up(layer, MEMBERS[0])
        assert HARD.bytes_down(layer, MEMBERS[0]) == FedIT().bytes_down(layer, MEMBERS[0])


@pytest.mark.parametrize("lam", [-0.1, 1.5, float("nan")])
def test_a_strength_outside_zero_and_one_is_refused(lam: float) -> None:
    with pytest.raises(ValueError, match="lam must lie between 0 and 1"):
        FedRotSoft(lam=lam)


def test_the_start_mismatch_counts_what_the_rotation_does_to_the_trained_factors() -> None:
    """FedPA-LoRA, Eq. 2: from the locally optimised factors, not from the turned ones that are uploaded."""
    trained: dict[str, Adapter] = {}
    local = FedRotLoRA.local

    class Watched(FedRotLoRA):
        def local(self, client: Any, download: Any) -> Any:
            program, answer = local(self, client, download), None
            while True:
                try:
                    request = program.send(answer)
                except StopIteration as stop:
                    return stop.value
                answer = yield request
                trained[client.card.id] = answer.model["lora"]

    run = world(Watched(), ranks=(4, 4), rounds=3, head="frozen")
    expected: float | None = None
    for played in run.rounds(run.begin()):
        if expected is not None:
            assert played.metrics["init_mismatch"]["A"] == pytest.approx(expected, rel=1e-6)
        apart = [
            float((played.progress.state.lora[layer].A - term.A).norm() / played.progress.state.lora[layer].A.norm())
            for own in trained.values()
            for layer, term in own.items()
        ]
        expected = sum(apart) / len(apart)
