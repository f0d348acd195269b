"""FedDPA-T: which adapter each part of a round trains and which it leaves, and what it sees of the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.harness import cards, dense, play, play_phases, random_training
from engines.world import FAST, base, text, world
from engines.world import play as play_run

from coterie.algorithms import FedDPAT, FedIT
from coterie.algorithms.factors import initial_factors
from coterie.engines.sites import Volatile, load_record
from coterie.errors import ConfigError
from coterie.experiments.methods import algorithm
from coterie.maths.keys import root_key
from coterie.protocol import Client, Fit, Fitted, Memory, Model, Predict, Predictions, copied
from coterie.training.asks import Ask, Done, Plan
from coterie.training.executor import Executor

MEMBERS = cards({"a": 2, "b": 2, "c": 2})


def fits_of(method: FedDPAT, number: int, memory: dict[str, Any] | None = None) -> list[Fit]:
    """The Fits that a client asks for in this round, each answered by the model that entered."""
    state = play(FedIT(), MEMBERS, random_training()).state
    kept = Memory(memory or {}, copied)
    client = Client(MEMBERS[0], kept, ("train",), root_key(1).fold, number, "main")
    program: Any = method.local(client, method.send(state, MEMBERS[0]))
    found, answer = [], None
    try:
        while True:
            request = program.send(answer)
            if isinstance(request, Fit):
                found.append(request)
                answer = Fitted(request.initial, 1.0, 1, 1)
            else:
                assert isinstance(request, Predict) and set(request.model.terms) == {"local"}
                rows = torch.arange(5)
                answer = Predictions(torch.zeros(5, 2), rows, embeddings=torch.ones(5, 4), examples=rows)
    except StopIteration:
        return found


def test_the_first_round_trains_the_global_adapter_only_and_later_ones_the_local_one_first() -> None:
    (only,) = fits_of(FedDPAT(), 1)
    assert set(only.initial.terms) == {"lora"} and only.train == ("lora.*",) and only.head
    first, second = fits_of(FedDPAT(), 2)
    assert first.train == ("local.*",) and not first.head
    assert set(second.initial.terms) == {"lora"} and second.head


def test_the_local_part_sees_both_in_their_shares_and_the_global_part_the_global_one_alone() -> None:
    """W x + a local(x) + (1 - a) global(x): the shares stand in the scales, the factors are the stored ones."""
    own = random_training(3)("a", Model(local=initial_factors(MEMBERS[0], root_key(0))))["local"]
    plain = fits_of(FedDPAT(), 1)[0].initial["lora"]
    for a in (0.3, 0.5, 1.0):
        first, second = fits_of(FedDPAT(a=a), 2, {"local": own})
        for layer, term in own.items():
            assert torch.allclose(dense(first.initial["local"][layer]), a * dense(term), atol=1e-12)
            assert torch.allclose(dense(first.initial["lora"][layer]), (1 - a) * dense(plain[layer]), atol=1e-12)
            assert torch.equal(dense(second.initial["lora"][layer]), dense(plain[layer]))


def test_what_is_kept_has_the_clients_own_scale_again() -> None:
    store = Volatile()
    run = world(FedDPAT(a=0.3), store=store, rounds=2)
    play_run(run)
    for name, card in run.cards.items():
        kept = load_record(store, name).memory["local"]
        assert {term.scale for term in kept.values()} == {card.scale}
        assert all(float(term.B.norm()) > 0 and term.rank == card.rank for term in kept.values())


def test_each_part_leaves_the_other_adapter_to_the_bit() -> None:
    frozen = base()
    executor = Executor({"base": frozen}, FAST, Plan())
    layers = dict(frozen.layers)
    lora, local = (random_training(seed)("a", Model(lora=fresh(layers)))["lora"] for seed in (1, 2))
    for trained, held in (("local", "lora"), ("lora", "local")):
        request = Fit(Model(lora=lora, local=local), (f"{trained}.*",))
        (done,) = executor.answer([Ask("a", request, "base", frozen.head, text(12), root_key(2))])
        assert isinstance(done, Done) and isinstance(done.answer, Fitted)
        before, after = request.initial.parameters, done.answer.model.parameters
        moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert moved and not any(name.startswith(held) for name in moved)


def fresh(layers: dict[str, Any]) -> Any:
    return initial_factors(cards({"a": 2}, layers=layers)[0], root_key(0))


def test_with_a_at_one_the_local_part_does_not_feel_the_global_adapter() -> None:
    frozen = base()
    executor = Executor({"base": frozen}, FAST, Plan())
    member = cards({"a": 2}, layers=dict(frozen.layers))[0]
    found = []
    for seed in (1, 2):
        download = random_training(seed)("a", Model(lora=fresh(dict(frozen.layers))))["lora"]
        client = Client(member, Memory({}, copied), ("train",), root_key(1).fold, 2, "main")
        request = next(FedDPAT(a=1.0).local(client, download))  # type: ignore[arg-type]
        (done,) = executor.answer([Ask("a", request, "base", frozen.head, text(12), root_key(2))])
        assert isinstance(done, Done) and isinstance(done.answer, Fitted)
        found.append(done.answer.model["local"])
    assert all(torch.equal(found[0][n].B, t.B) and torch.equal(found[0][n].A, t.A) for n, t in found[1].items())


def test_the_global_adapter_is_fedits_whatever_the_local_ones_do() -> None:
    """The local part has streams of its own, and no head to move."""
    mine = play_phases(FedDPAT(), MEMBERS, random_training)
    theirs = play_phases(FedIT(), MEMBERS, random_training)
    for one, two in zip(mine, theirs, strict=True):
        for layer, term in one.state.lora.items():
            assert torch.equal(term.B, two.state.lora[layer].B) and torch.equal(term.A, two.state.lora[layer].A)


def test_only_the_global_adapter_is_on_the_wire() -> None:
    for outcome in play_phases(FedDPAT(), MEMBERS, random_training):
        for message in (*outcome.payloads.values(), *outcome.bodies.values()):
            assert set(message) == set(MEMBERS[0].layers)
    assert set(outcome.memories["a"]) == {"local", "anchors"}


def test_a_client_that_misses_rounds_uses_the_global_adapter_and_begins_its_own_when_it_comes() -> None:
    store = Volatile()
    run = world(FedDPAT(), ranks=(2, 2, 2, 2), sample=1, rounds=4, store=store)
    been: set[str] = set()
    for played in run.rounds(run.begin()):
        been |= set(played.metrics["cohort"]) if played.metrics["round"] > 1 else set()
        for name in run.cards:
            assert ("local" in load_record(store, name).memory) == (name in been)


def test_the_local_adapter_must_be_able_to_learn() -> None:
    with pytest.raises(ConfigError, match=r"a \(0\) must be above 0"):
        algorithm("feddpa-t", {"a": 0})
