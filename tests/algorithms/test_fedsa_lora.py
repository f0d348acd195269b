"""FedSA-LoRA: fixture N7, what travels and what stays, and that unequal ranks are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.harness import LAYERS, cards, play, random_training
from engines.world import base, world
from engines.world import play as play_run

from algorithms.fixtures import T1_WEIGHTS, card, t1
from coterie.algorithms import FedIT, FedSALoRA, Proximal, ServerOptimised
from coterie.algorithms.factors import initial_factors
from coterie.algorithms.fedsa_lora import State
from coterie.engines.evaluation import site_models
from coterie.engines.scoring import Evaluation
from coterie.engines.sites import Volatile, load_record
from coterie.engines.traffic import Traffic
from coterie.errors import ConfigError, ModelError
from coterie.maths.keys import Key, root_key
from coterie.maths.server_optim import ServerOptimizer
from coterie.protocol import Client, Memory, Server, Uploads, copied
from coterie.protocol.messages import Uploaded, leaves
from coterie.wire.ledger import Ledger

EQUAL = (4, 4, 4)


def at(name: str, memory: dict[str, Any]) -> Client:
    return Client(card(name, 1), Memory(memory, copied), ("train",), root_key(0).fold, 2, "main")


def test_t1_gives_each_client_its_own_b_times_the_mean_of_a() -> None:
    """N7: Abar = (.75, .25); the products are [[.75, .25], [0, 0]] and [[0, 0], [.75, .25]]."""
    state = State(initial_factors(card("1", 1), Key(0)))
    sent = Uploads([Uploaded(card(name, 1), {"w": one.A}, T1_WEIGHTS[name]) for name, one in t1().items()])
    made = FedSALoRA().aggregate(state, sent, Server((), lambda purpose: Key(0), 1, "main"))
    expected = {"1": [[0.75, 0.25], [0.0, 0.0]], "2": [[0.0, 0.0], [0.75, 0.25]]}
    for name, product in expected.items():
        memory = {"B": {"w": t1()[name].B}}
        model = FedSALoRA().site_model(at(name, memory), FedSALoRA().send(made, card(name, 1)))
        assert torch.equal(model["lora"]["w"].product(), torch.tensor(product).double())


def test_neither_b_nor_head_is_ever_on_the_wire() -> None:
    outcome = play(FedSALoRA(), cards({"a": 2, "b": 2}), random_training())
    for message in (*outcome.payloads.values(), *outcome.bodies.values()):
        assert {name: tuple(A.shape) for name, A in message.items()} == {n: (2, s.d_in) for n, s in LAYERS.items()}
        assert not any("head" in path or "B" in path.split(".") for path, _ in leaves(message))
    run = world(FedSALoRA(), ranks=EQUAL, head="averaged")
    play_run(run)
    assert {row["kind"] for row in run.ledger.rows()} == {"message", "evaluation"}


def test_after_aggregation_all_have_one_a_and_their_own_b_to_the_bit() -> None:
    members = cards({"a": 2, "b": 2})
    outcome = play(FedSALoRA(), members, random_training())
    for member in members:
        sent = FedSALoRA().send(outcome.state, member)
        for layer, A in sent.items():
            assert torch.equal(A, outcome.state.lora[layer].A)
            kept = outcome.memories[member.id]["B"][layer]
            assert torch.equal(kept, outcome.fitted[member.id]["lora"][layer].B)


def test_who_is_never_sampled_uses_the_backbone_alone_and_its_untouched_head() -> None:
    store = Volatile()
    run = world(FedSALoRA(), ranks=EQUAL, sample=1, rounds=1, store=store)
    (played,) = play_run(run)
    view = Evaluation(run.setting, run.executor, store, 1, "main", Traffic(Ledger(), 1, "main", False))
    used = {name: (model, head) for name, model, head in site_models(view, played.progress.state, {}, {})}
    for name in run.cards:
        model, head = used[name]
        asleep = name not in played.metrics["cohort"]
        assert all((float(term.B.norm()) == 0) == asleep for term in model["lora"].values())
        assert head is not None
        assert all(torch.equal(head[part], value) for part, value in base().head.items()) == asleep
        assert (load_record(store, name).memory == {}) == asleep


def test_the_clients_start_from_one_a_and_frozen_heads_stay_frozen() -> None:
    run = world(FedSALoRA(), ranks=EQUAL, head="frozen", rounds=1)
    play_run(run)
    assert run.setting.head == "frozen"
    assert all(load_record(run.store, name).head is None for name in run.cards)
    assert world(FedSALoRA(), ranks=EQUAL, head="averaged").setting.head == "local"


def test_weights_are_the_examples_that_were_processed_and_so_equal_after_equal_steps() -> None:
    played = play_run(world(FedSALoRA(), ranks=EQUAL, rounds=1))[0]
    same = play_run(world(FedSALoRA(), ranks=EQUAL, rounds=1, weights="uniform"))[0]
    other = play_run(world(FedSALoRA(), ranks=EQUAL, rounds=1, weights="examples"))[0]
    for name, term in played.progress.state.lora.items():
        assert torch.allclose(term.A, same.progress.state.lora[name].A, atol=1e-7)
        assert not torch.allclose(term.A, other.progress.state.lora[name].A, atol=1e-7)


def test_half_of_fedit_travels_in_each_direction() -> None:
    member = cards({"a": 3})[0]
    for one, both in (
        (FedSALoRA().bytes_up, FedIT().bytes_up),
        (FedSALoRA().bytes_down, FedIT().bytes_down),
    ):
        square = LAYERS["second"]
        assert 2 * one(square, member) == both(square, member) == 3 * 12 * 4


def test_a_server_optimiser_or_a_proximal_term_may_stand_around_it() -> None:
    """The server's pair has the averaged A beside a B that stays zero, so that only A takes the optimiser's step."""
    optimised = ServerOptimised(FedSALoRA(), ServerOptimizer("adam", lr=0.1))
    last = play_run(world(optimised, ranks=EQUAL))[-1]
    assert set(last.progress.state.m) == {f"lora.{layer}.A" for layer in last.progress.state.inner.lora}
    assert all(float(term.B.norm()) == 0 for term in last.progress.state.inner.lora.values())
    held = play_run(world(Proximal(FedSALoRA(), 1.0), ranks=EQUAL))[-1]
    free = play_run(world(FedSALoRA(), ranks=EQUAL))[-1]
    assert all(not torch.equal(t.A, free.progress.state.lora[n].A) for n, t in held.progress.state.lora.items())


def test_a_layer_that_the_first_client_lacks_is_averaged_over_the_others() -> None:
    members = cards({"a": 2, "b": 2, "c": 2})
    members[0] = replace(members[0], layers={"first": LAYERS["first"]})
    outcome = play(FedSALoRA(), members, random_training(), weights={"a": 0.5, "b": 0.3, "c": 0.2})
    sent = outcome.payloads
    expected = 0.6 * sent["b"]["second"].double() + 0.4 * sent["c"]["second"].double()
    assert torch.allclose(outcome.state.lora["second"].A.double(), expected, atol=1e-6)
    assert set(FedSALoRA().send(outcome.state, members[0])) == {"first"}


def test_unequal_ranks_and_wrong_factors_are_refused() -> None:
    with pytest.raises(ConfigError, match="FedSA-LoRA needs one rank for all clients"):
        play(FedSALoRA(), cards({"a": 2, "b": 3}), random_training())
    with pytest.raises(ModelError, match=r"client 1: an upload must be one A \(1, n\) for each adapted layer"):
        FedSALoRA().check({"w": torch.zeros(2, 1)}, card("1", 1))
