"""Directions of a global pair: which a client trains, and where rows and pairs move that some trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance.harness import cards, server
from hypothesis import given
from hypothesis import strategies as st
from reference.random_factors import bounded, normal

from algorithms.fixtures import card, term
from coterie.algorithms import FSLoRA
from coterie.algorithms.directions import State, moved_pair, moved_rows
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import Federation, LowRank


def test_every_direction_is_drawn_as_often_as_any_other() -> None:
    wide = {"w": LowRank(torch.zeros(2, 8), torch.zeros(8, 2))}
    counts = torch.zeros(8)
    for number in range(2000):
        counts[State(wide, root_key(1), number).selected(card("1", 3))] += 1
    assert float((counts / 2000 - 3 / 8).abs().max()) < 0.04


def test_the_selection_is_the_same_when_asked_again_and_another_one_in_another_round_or_for_another_client() -> None:
    wide = {"w": LowRank(torch.zeros(2, 64), torch.zeros(64, 2))}
    one, found = State(wide, root_key(1), 3), card("1", 20)
    assert one.selected(found) == one.selected(found) == sorted(set(one.selected(found)))
    assert one.selected(found) != replace(one, round=4).selected(found)
    assert one.selected(found) != one.selected(card("2", 20))
    assert one.selected(card("1", 99)) == list(range(64))


def test_rows_move_to_the_mean_of_their_trainers_or_by_everybody_s_share() -> None:
    whole = torch.tensor([[1.0], [1.0], [1.0]])
    trained = [(0.25, [0], torch.tensor([[5.0]])), (0.25, [0, 2], torch.tensor([[9.0], [3.0]])), (0.5, [], whole[:0])]
    assert torch.equal(moved_rows(whole, trained, among_trainers=True), torch.tensor([[7.0], [1.0], [3.0]]))
    assert torch.equal(moved_rows(whole, trained, among_trainers=False), torch.tensor([[4.0], [1.0], [1.5]]))
    idle = [(0.0, [1], torch.tensor([[5.0]]))]
    assert torch.equal(moved_rows(whole, idle, among_trainers=True), whole)


def slow_rows(
    whole: torch.Tensor, trained: list[tuple[float, list[int], torch.Tensor]], among_trainers: bool
) -> torch.Tensor:
    """Row by row and client by client."""
    made = whole.clone()
    for j in range(len(whole)):
        moves = [(weight, values[rows.index(j)] - whole[j]) for weight, rows, values in trained if j in rows]
        total = sum(weight for weight, _ in moves) if among_trainers else 1.0
        for weight, move in moves:
            made[j] += weight / total * move if total > 0 else 0.0
    return made


@bounded
@given(
    sets=st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=4),
    seed=st.integers(0, 500),
    among=st.booleans(),
    idle=st.booleans(),
)
def test_rows_equal_the_slow_twin_in_either_dimension(sets: list[set[int]], seed: int, among: bool, idle: bool) -> None:
    whole = normal(seed, 5, 3)
    weights = [0.0 if idle and i == 0 else (i + 1.0) / 10 for i in range(len(sets))]
    trained = [
        (weight, sorted(rows), normal(seed + 1 + i, len(rows), 3))
        for i, (weight, rows) in enumerate(zip(weights, sets, strict=True))
    ]
    found = moved_rows(whole, trained, among_trainers=among)
    torch.testing.assert_close(found, slow_rows(whole, trained, among), rtol=0, atol=1e-12)
    columns = [(weight, rows, values.mT) for weight, rows, values in trained]
    turned = moved_rows(whole.mT.contiguous(), columns, among_trainers=among, dim=1)
    torch.testing.assert_close(turned, found.mT, rtol=0, atol=1e-12)
    for j in set(range(5)) - set().union(*sets):
        assert torch.equal(found[j], whole[j])


def test_a_pair_moves_in_its_own_scale_whatever_the_clients() -> None:
    """B = 4 e1 at scale 1/2 is B = 1 e1 at scale 2; A is as it is."""
    start = term([[9, 9], [9, 9]], [[9, 9], [9, 9]], scale=2.0)
    sent = term([[4], [0]], [[1, 0]], scale=0.5)
    made = moved_pair(start, [(1.0, [1], sent)], among_trainers=True)
    assert made.B.tolist() == [[9.0, 1.0], [9.0, 0.0]] and made.A.tolist() == [[9.0, 9.0], [1.0, 0.0]]
    assert made.scale == 2.0


def test_the_global_rank_bounds_what_a_client_sends_and_is_the_largest_unless_given() -> None:
    small, large = cards({"a": 2, "b": 6})
    federation, layer = Federation((small, large), 1), small.layers["first"]
    for rank, wide in ((None, 6), (4, 4), (9, 9)):
        method = FSLoRA(rank=rank)
        state = method.start(federation, server(0))
        assert {one.rank for one in state.lora.values()} == {wide} == {method.global_model(state)["lora"]["first"].rank}
        assert [method.width(one) for one in (small, large)] == [2, min(6, wide)]
        assert method.bytes_up(layer, large) == min(6, wide) * (layer.d_out + layer.d_in) * 4
    sent = {
        name: LowRank(torch.zeros(one.d_out, 6), torch.zeros(6, one.d_in), 2.0) for name, one in large.layers.items()
    }
    FSLoRA().check(sent, large)
    with pytest.raises(ModelError, match="client b, layer first: rank 6 where 4 is expected"):
        FSLoRA(rank=4).check(sent, large)
    with pytest.raises(ValueError, match="rank must be 1 at least, not 0"):
        FSLoRA(rank=0)
