"""FFA-LoRA: fixture N9, exactness, A untouched for ever."""

from __future__ import annotations

import torch
from conformance.harness import LAYERS, cards, play, random_training
from engines.world import play as play_run
from engines.world import world

from algorithms.fixtures import card
from coterie.algorithms import FFALoRA
from coterie.algorithms.factors import initial_adapter
from coterie.algorithms.ffa_lora import State
from coterie.maths.keys import Key
from coterie.protocol import LowRank, Server, Uploads
from coterie.protocol.messages import Uploaded


def test_the_means_of_b_beside_one_a_are_the_mean_of_products() -> None:
    """A = (1, 1), B_1 = e1, B_2 = e2, p = (3/4, 1/4)."""
    A, start = torch.ones(1, 2, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    state = State({"w": LowRank(start, A)}, Key(0))
    e1, e2 = torch.tensor([[1.0], [0.0]]).double(), torch.tensor([[0.0], [1.0]]).double()
    uploads = Uploads([Uploaded(card("1", 1), {"w": e1}, 0.75), Uploaded(card("2", 1), {"w": e2}, 0.25)])
    made = FFALoRA().aggregate(state, uploads, Server((), lambda purpose: Key(0), 1, "main"))
    assert torch.equal(made.lora["w"].product(), torch.tensor([[0.75, 0.75], [0.25, 0.25]]).double())


def test_a_is_bitwise_the_same_after_many_rounds_of_real_training() -> None:
    run = world(FFALoRA(), ranks=(4, 4, 4), rounds=3)
    begun = run.begin()
    *_, last = run.rounds(begun)
    for name, term in last.progress.state.lora.items():
        assert torch.equal(term.A, begun.state.lora[name].A)
        assert not torch.equal(term.B, begun.state.lora[name].B)


def test_only_b_is_uploaded() -> None:
    outcome = play(FFALoRA(), cards({"a": 2, "b": 2}), random_training())
    for payload in outcome.payloads.values():
        assert {name: tuple(B.shape) for name, B in payload.items()} == {n: (s.d_out, 2) for n, s in LAYERS.items()}


def test_aggregation_loses_nothing_in_a_real_run() -> None:
    for played in play_run(world(FFALoRA(), ranks=(4, 4, 4))):
        assert played.metrics["mismatch"]["relative"] < 1e-6


def test_the_common_a_is_the_standard_initialisation() -> None:
    members = cards({"a": 2, "b": 2})
    state = play(FFALoRA(), members, random_training()).state
    drawn = initial_adapter(members[0].layers, 2, 2.0, state.init_key)
    assert all(torch.equal(state.lora[name].A, drawn[name].A) for name in drawn)
