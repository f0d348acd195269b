"""RoLoRA: turns, exactness in both, what a client that missed rounds is sent, its reduction to FFA-LoRA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.harness import LAYERS, Outcome, cards, deployed, gap, ideal, play, random_training
from engines.world import play as play_run
from engines.world import world

from coterie.algorithms import FedIT, FFALoRA, RoLoRA
from coterie.algorithms.rolora import Half
from coterie.engines.setting import Fault
from coterie.engines.sites import Volatile, load_record
from coterie.errors import ModelError
from coterie.protocol import Layer

MEMBERS = cards({"a": 2, "b": 2, "c": 2})
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def following(before: Outcome, number: int, members: list[Any] = MEMBERS) -> Outcome:
    weights = {card.id: WEIGHTS[card.id] for card in members}
    return play(
        RoLoRA(),
        members,
        random_training(number),
        weights=weights,
        state=before.state,
        memories=before.memories,
        number=number,
    )


def rounds(count: int) -> list[Outcome]:
    found = [play(RoLoRA(), MEMBERS, random_training(1), weights=WEIGHTS)]
    for number in range(2, count + 1):
        found.append(following(found[-1], number))
    return found


def test_what_is_deployed_is_the_mean_of_products_in_odd_and_in_even_rounds() -> None:
    for outcome in rounds(4):
        made = deployed(RoLoRA(), outcome)
        assert made is not None and gap(made, ideal(outcome, WEIGHTS)) < 1e-6


def test_b_and_a_take_turns_and_the_other_one_keeps_every_bit() -> None:
    for number, outcome in enumerate(rounds(4), start=1):
        before, after = outcome.before.lora, outcome.state.lora
        still, moved = ("A", "B") if number % 2 == 1 else ("B", "A")
        for name in LAYERS:
            assert torch.equal(after[name].parameters[still], before[name].parameters[still])
            assert not torch.equal(after[name].parameters[moved], before[name].parameters[moved])


def test_only_the_trained_factor_goes_up_and_the_one_that_changed_comes_down() -> None:
    outcomes = rounds(4)
    assert [{half.factor for half in o.payloads.values()} for o in outcomes] == [{"B"}, {"A"}, {"B"}, {"A"}]
    assert [set(o.downloads["a"].factors) for o in outcomes] == [set(), {"B"}, {"A"}, {"B"}]


def test_everybody_trains_on_the_servers_pair() -> None:
    for outcome in rounds(4):
        for name, model in outcome.fitted.items():
            still = "A" if outcome.payloads[name].factor == "B" else "B"
            for layer, term in model["lora"].items():
                assert torch.equal(term.parameters[still], outcome.before.lora[layer].parameters[still])


def test_who_missed_a_round_is_sent_both_factors_and_trains_on_the_servers_pair() -> None:
    first, second = rounds(2)
    third = following(second, 3, MEMBERS[:2])
    fourth = following(replace(third, memories=second.memories | third.memories), 4)
    assert set(fourth.downloads["a"].factors) == {"B"} and set(fourth.downloads["c"].factors) == {"A", "B"}
    for layer, term in fourth.fitted["c"]["lora"].items():
        assert torch.equal(term.B, fourth.before.lora[layer].B)
    assert first.state.turns.answered == {"a": 1, "b": 1, "c": 1}
    assert third.state.turns.answered == {"a": 3, "b": 3, "c": 2}


def test_the_ledger_charges_the_missing_half_to_who_missed_rounds() -> None:
    run = world(RoLoRA(), ranks=(4, 4, 4), rounds=4, faults=(Fault("c1", 2, "exception"), Fault("c2", 3, "late")))
    play_run(run)
    layers = run.cards["c0"].layers.values()
    m, n = (4 * 4 * sum(getattr(layer, side) for layer in layers) for side in ("d_out", "d_in"))

    def down(client: str) -> list[int]:
        rows = run.ledger.rows()
        return [
            sum(
                r["payload"]
                for r in rows
                if (r["client"], r["round"], r["direction"], r["kind"]) == (client, number, "down", "message")
            )
            for number in (1, 2, 3, 4)
        ]

    assert down("c0") == [0, m, n, m]
    assert down("c1") == [0, m, n + m, m]  # it raised in round 2: what it was sent then counts as lost
    assert down("c2") == [0, m, n, m + n]  # the server does not know that it had come so far


def test_two_rounds_cost_what_one_of_fedit_costs() -> None:
    layer, card, (main,) = Layer(7, 5), MEMBERS[0], RoLoRA().phases(4)
    for start in (2, 3):
        both = [RoLoRA().bytes_of_round(layer, card, number, main) for number in (start, start + 1)]
        ups, downs = zip(*both, strict=True)
        assert sum(ups) == FedIT().bytes_up(layer, card) and sum(downs) == FedIT().bytes_down(layer, card)
    assert 2 * RoLoRA().bytes_up(layer, card) == FedIT().bytes_up(layer, card)


def test_odd_rounds_alone_are_ffa_lora() -> None:
    states = {}
    for algorithm in (RoLoRA(), FFALoRA()):
        one = play(algorithm, MEMBERS, random_training(1), weights=WEIGHTS)
        two = play(
            algorithm,
            MEMBERS,
            random_training(2),
            weights=WEIGHTS,
            state=one.state,
            memories=one.memories,
            number=3,
        )
        states[type(algorithm)] = two.state.lora
    for name, term in states[RoLoRA].items():
        assert torch.equal(term.B, states[FFALoRA][name].B) and torch.equal(term.A, states[FFALoRA][name].A)


def test_without_a_round_for_b_the_round_for_a_changes_nothing() -> None:
    run = world(RoLoRA(), ranks=(4, 4, 4))
    begun = run.begin()
    after = run.play(replace(begun, round=1)).progress.state
    for name, term in after.lora.items():
        assert torch.equal(term.A, begun.state.lora[name].A) and float(term.B.abs().max()) == 0.0


def test_aggregation_loses_nothing_in_a_real_run_with_absent_clients() -> None:
    store = Volatile()
    run = world(RoLoRA(), ranks=(4,) * 5, rounds=5, sample=2, store=store)
    for played in run.rounds(run.begin()):
        assert played.metrics["mismatch"]["relative"] < 1e-5
        number, state = played.metrics["round"], played.progress.state
        for name in played.metrics["cohort"]:
            pair = load_record(store, name).memory["factors"]
            still = "A" if number % 2 == 1 else "B"
            for layer, term in pair.items():
                assert torch.equal(term.parameters[still], state.lora[layer].parameters[still])


def test_who_sends_the_factor_that_is_not_in_turn_counts_as_absent() -> None:
    outcome = rounds(1)[0]
    odd = Half("A", {name: torch.ones(2, layer.d_in) for name, layer in LAYERS.items()})

    def tamper(name: str, payload: Any) -> Any:
        return odd if name == "b" else payload

    turned = play(RoLoRA(), MEMBERS, random_training(1), weights=WEIGHTS, tamper=tamper)
    absent = play(RoLoRA(), [MEMBERS[0], MEMBERS[2]], random_training(1), weights={"a": 0.5, "c": 0.2})
    for name, term in turned.state.lora.items():
        assert torch.equal(term.B, absent.state.lora[name].B) and torch.equal(term.A, outcome.before.lora[name].A)
    assert turned.state.turns.answered == {"a": 1, "c": 1}
    nobody = play(RoLoRA(), MEMBERS, random_training(1), weights=WEIGHTS, tamper=lambda name, payload: odd)
    assert nobody.state is nobody.before


@pytest.mark.parametrize(
    "payload",
    [
        None,
        {"first": torch.zeros(7, 2), "second": torch.zeros(6, 2)},
        Half("B", {"first": torch.zeros(7, 2)}),
        Half("A", {"first": torch.zeros(7, 2), "second": torch.zeros(6, 2)}),
        Half("C", {}),
        Half("B", 3),  # type: ignore[arg-type]
    ],
)
def test_an_upload_that_is_no_half_is_refused(payload: Any) -> None:
    with pytest.raises(ModelError, match="client a: an upload must be one"):
        RoLoRA().check(payload, MEMBERS[0])
