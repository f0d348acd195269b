"""FlexLoRA: fixture N3, nesting, orthonormal rows, scales."""

from __future__ import annotations

import torch
from conformance.harness import cards, play, random_training, server

from algorithms.fixtures import LAYER, T1_WEIGHTS, card, t1, t2, term, uploads
from coterie.algorithms import FlexLoRA
from coterie.algorithms.factors import best_rank, completed, cut_for
from coterie.maths.keys import root_key
from coterie.protocol import Federation


def test_t1_at_rank_one_keeps_the_larger_direction_with_error_one_quarter() -> None:
    made = best_rank(uploads(t1(), T1_WEIGHTS), 1)["w"]
    target = torch.diag(torch.tensor([0.75, 0.25], dtype=torch.float64))
    assert torch.allclose(made.product(), torch.diag(torch.tensor([0.75, 0.0], dtype=torch.float64)), atol=1e-12)
    assert abs(float((made.product() - target).norm()) - 0.25) < 1e-12


def test_at_full_rank_the_average_product_is_exact() -> None:
    made = best_rank(uploads(t1(), T1_WEIGHTS), 2)["w"]
    assert torch.allclose(made.product(), torch.diag(torch.tensor([0.75, 0.25], dtype=torch.float64)), atol=1e-12)


def test_scales_enter_the_average_and_leave_with_the_receiver() -> None:
    terms = {"1": term([[1], [0]], [[1, 0]], scale=4.0), "2": term([[1], [0]], [[1, 0]], scale=2.0)}
    made = best_rank(uploads(terms), 1)
    assert torch.allclose(made["w"].product()[0, 0], torch.tensor(3.0, dtype=torch.float64))
    for receiver in (card("1", 1, scale=4.0), card("2", 1, scale=2.0)):
        sent = cut_for(made, receiver)["w"]
        assert sent.scale == receiver.scale
        assert torch.allclose(sent.product(), made["w"].product(), atol=1e-12)


def test_downloads_nest_across_ranks_and_have_orthonormal_rows() -> None:
    members = cards({"a": 1, "b": 2, "c": 4})
    outcome = play(FlexLoRA(), members, random_training())
    sent = {member.id: FlexLoRA().send(outcome.state, member) for member in members}
    for layer in sent["c"]:
        assert torch.equal(sent["a"][layer].A, sent["c"][layer].A[:1])
        assert torch.equal(sent["b"][layer].B, sent["c"][layer].B[:, :2])
        gram = sent["c"][layer].A.double() @ sent["c"][layer].A.double().mT
        assert torch.allclose(gram, torch.eye(4, dtype=torch.float64), atol=1e-6)


def test_directions_that_nobody_used_stay_able_to_learn() -> None:
    made = best_rank(uploads(t2()), 2)
    filled = completed(made, root_key(0))["w"]
    assert float(made["w"].A[1].norm()) == 0.0
    assert torch.allclose(filled.A @ filled.A.mT, torch.eye(2, dtype=torch.float64), atol=1e-12)
    assert torch.equal(filled.product(), made["w"].product())


def test_in_a_layer_narrower_than_the_rank_as_many_rows_are_completed_as_there_is_room_for() -> None:
    narrow = {"w": term([[2, 0, 0], [0, 0, 0], [1, 0, 0]], [[0.6, 0.8], [0, 0], [0, 0]])}
    filled = completed(narrow, root_key(0))["w"]
    wanted = torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    assert torch.allclose(filled.A @ filled.A.mT, wanted, atol=1e-12)
    assert torch.equal(filled.B, narrow["w"].B) and torch.equal(filled.product(), narrow["w"].product())


def test_before_the_first_round_the_product_is_zero() -> None:
    state = FlexLoRA().start(Federation((card("1", 1), card("2", 2)), 1), server(0))
    assert state.lora["w"].rank == 2 and float(state.lora["w"].product().norm()) == 0.0
    assert set(state.lora) == set(LAYER)
