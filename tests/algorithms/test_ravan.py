"""Ravan: orthogonal heads, exact per head, folding, which heads train, FedPA-LoRA's setting, an export."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance.harness import Outcome, cards, deployed, gap, ideal, play, random_training
from engines.world import dense, world
from engines.world import play as run_all

from algorithms.fixtures import card
from coterie.algorithms import Ravan
from coterie.algorithms.ravan import Heads
from coterie.errors import ConfigError, ModelError
from coterie.experiments.adapters import flattened
from coterie.maths.keys import root_key
from coterie.protocol import BaseLog, Federation, Layer, Model
from coterie.protocol.messages import leaves

WIDE = {"first": Layer(14, 12), "second": Layer(16, 16)}
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def chosen(outcome: Outcome) -> dict[str, list[int]]:
    return {name: payload.chosen for name, payload in outcome.payloads.items()}


def test_bases_of_different_heads_are_orthogonal() -> None:
    method = Ravan()
    state = play(method, cards({"a": 2}, layers=WIDE), random_training()).state
    for term in method.global_model(state)["core"].values():
        eye = torch.eye(term.rank)
        assert torch.allclose(term.U.T @ term.U, eye, atol=1e-6) and torch.allclose(term.V @ term.V.T, eye, atol=1e-6)


def test_gaussian_bases_may_be_wider_than_the_layer_and_lose_orthogonality() -> None:
    method = Ravan(heads=4, head_rank=4, bases="gaussian")
    term = method.global_model(play(method, cards({"a": 2}, layers=WIDE), random_training()).state)["core"]["first"]
    assert term.rank == 16 > 12
    assert float((term.U.T @ term.U - torch.eye(16)).abs().max()) > 0.1


def test_it_starts_at_the_base_and_trains_h_r_squared_and_h_parameters_a_layer() -> None:
    method, entered = Ravan(), {}

    def seen(name: str, model: Model) -> Model:
        entered[name] = model
        return model

    outcome = play(method, cards({"a": 8, "b": 4}, layers=WIDE), seen)
    assert all(not product.any() for product in deployed(method, outcome).values())
    term = entered["a"]["core"]["first"]
    assert sum(value.numel() for value in term.parameters.values()) == 4 * 3**2 + 4
    assert torch.equal(term.gain, torch.ones(4)) and "shared" not in entered["a"]
    assert entered["b"]["core"]["first"].heads == 2 == entered["b"]["shared"]["first"].heads
    assert not entered["b"]["shared"]["first"].core.any()


def test_trained_by_all_the_heads_are_aggregated_exactly() -> None:
    method, members = Ravan(heads=2), cards({"a": 4, "b": 4, "c": 4}, layers=WIDE)
    first = play(method, members, random_training(), weights=WEIGHTS)
    second = play(method, members, random_training(1), weights=WEIGHTS, state=first.state, number=2)
    for outcome in (first, second):
        assert gap(deployed(method, outcome), ideal(outcome, WEIGHTS)) < 2e-6


def test_the_product_is_the_same_before_and_after_the_gain_is_folded_in() -> None:
    method = Ravan()
    outcome = play(method, cards({"a": 8}, layers=WIDE), random_training())
    trained = outcome.fitted["a"]["core"]
    assert any(not torch.allclose(term.gain, torch.ones(4), atol=0.1) for term in trained.values())
    after = method.global_model(outcome.state)["core"]
    for name, term in trained.items():
        assert after[name].gain is None
        assert torch.allclose(after[name].dense(), term.dense(), atol=1e-5)


def test_a_head_moves_to_the_mean_of_its_trainers_and_stays_where_there_are_none() -> None:
    method, members = Ravan(heads=4, choose="random"), cards({"a": 2, "b": 4, "c": 2}, layers=WIDE)
    start = play(method, members, random_training(), weights=WEIGHTS).state
    outcome = play(method, members, random_training(1), weights=WEIGHTS, state=start, number=2)
    picks = chosen(outcome)
    assert [len(picks[name]) for name in "abc"] == [1, 2, 1]
    for name, before in start.cores.items():
        for j in range(4):
            held = [
                (WEIGHTS[who], outcome.payloads[who].cores[name][heads.index(j)])
                for who, heads in picks.items()
                if j in heads
            ]
            total = sum(weight for weight, _ in held)
            mean = sum((weight / total * core for weight, core in held), torch.zeros_like(before[j]))
            assert torch.allclose(outcome.state.cores[name][j], mean if held else before[j], atol=1e-6)
            assert held or torch.equal(outcome.state.cores[name][j], before[j])
    assert len({j for heads in picks.values() for j in heads}) < 4


def test_bases_are_one_for_all_clients_and_rounds_to_the_bit_and_training_leaves_them_alone() -> None:
    method, members = Ravan(), cards({"a": 8, "b": 8}, layers=WIDE)
    first = play(method, members, random_training())
    second = play(method, members, random_training(1), state=first.state, number=2)
    for name in WIDE:
        drawn = method.global_model(first.state)["core"][name]
        for outcome in (first, second):
            for who in "ab":
                term = outcome.fitted[who]["core"][name]
                assert torch.equal(term.U, drawn.U) and torch.equal(term.V, drawn.V)


def test_heads_of_the_largest_norm_train_and_in_the_first_round_any() -> None:
    method, members = Ravan(), cards(dict.fromkeys("abcdefgh", 2), layers=WIDE)
    first = play(method, members, random_training())
    assert len({tuple(heads) for heads in chosen(first).values()}) > 1
    norms = sum(core.square().sum(dim=(-2, -1)) for core in first.state.cores.values())
    second = play(method, members, random_training(1), state=first.state, number=2)
    assert set(map(tuple, chosen(second).values())) == {(int(norms.argmax()),)}


def test_heads_of_the_largest_gradient_train_where_that_is_wanted() -> None:
    method, members = Ravan(choose="gradient"), cards({"a": 2, "b": 4}, layers=WIDE)
    outcome = play(method, members, random_training())
    for member in members:  # what the harness answers to a request for gradients
        drawn = {name: root_key(4).fold(member.id, f"core.{name}.core") for name in WIDE}
        sizes = {name: tuple(outcome.state.cores[name].shape) for name in WIDE}
        scores = sum(drawn[name].normal(sizes[name]).double().square().sum(dim=(-2, -1)) for name in WIDE)
        largest = scores.argsort(descending=True)[: method.number(member)]  # type: ignore[union-attr]
        assert outcome.payloads[member.id].chosen == sorted(largest.tolist())


def test_gradients_of_cores_that_are_still_zero_choose_heads_in_real_training() -> None:
    state = run_all(world(Ravan(choose="gradient"), ranks=(2, 4, 4), rounds=1))[-1].progress.state
    touched = [{j for j in range(4) if core[j].any()} for core in state.cores.values()]
    assert all(one == touched[0] and 2 <= len(one) <= 4 for one in touched)


def test_random_heads_differ_from_round_to_round() -> None:
    method, members = Ravan(choose="random"), cards(dict.fromkeys("abcd", 2), layers=WIDE)
    first = play(method, members, random_training())
    second = play(method, members, random_training(1), state=first.state, number=2)
    assert chosen(first) != chosen(second)


def test_one_head_is_the_mean_of_cores_between_fixed_bases() -> None:
    """FedSLM's stage 1 with random U and V, its core from zero."""
    method, members = Ravan(heads=1), cards({"a": 2, "b": 2}, layers=WIDE)
    outcome = play(method, members, random_training(), weights={"a": 0.75, "b": 0.25})
    trained = {who: outcome.fitted[who]["core"] for who in "ab"}
    for name, term in method.global_model(outcome.state)["core"].items():
        mean = 0.75 * trained["a"][name].folded() + 0.25 * trained["b"][name].folded()
        assert torch.allclose(term.dense(), term.U @ mean[0] @ term.V, atol=1e-5)


def test_fedpa_s_comparison_follows_from_its_ranks() -> None:
    """Ranks 2, 4, 16 train 1, 2, 8 heads of width 64 on layers of 1024; two heads cost 32768 bytes."""
    method, layer = Ravan(heads=8), Layer(1024, 1024)
    assert [method.number(card(str(rank), rank)) for rank in (1, 2, 4, 16, 64)] == [1, 1, 2, 8, 8]
    assert method.width(layer) == 64
    assert method.bytes_up(layer, card("1", 4)) == 32_768
    assert method.bytes_down(layer, card("1", 4)) == 8 * 64**2 * 4
    assert Ravan(heads=8, head_rank=115).width(Layer(4096, 1024)) == 115


def test_cores_travel_and_bases_do_not() -> None:
    outcome = play(Ravan(), cards({"a": 4}, layers=WIDE), random_training())
    paths = {path for path, _ in leaves(outcome.payloads["a"])}
    assert paths == {"chosen.0", "chosen.1", "cores.first", "cores.second"}
    assert {path for path, _ in leaves(outcome.bodies["a"])} == {"cores.first", "cores.second", "key.content"}


def test_heads_that_do_not_fit_and_uploads_that_do_not_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Ravan: 4 heads of width 2 do not fit layer w, in which only 2 directions"):
        Ravan(head_rank=2).start(Federation((card("1", 2),), 1), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="4 heads of width 1 do not fit layer w"):
        Ravan().start(Federation((card("1", 2),), 1), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 1 at least"):
        Ravan(heads=0)
    method, one = Ravan(heads=2), card("1", 2)
    good = Heads([1], {"w": torch.zeros(1, 1, 1)})
    method.check(good, one)
    bad = {
        "heads of each of 1 layers": replace(good, cores={}),
        r"heads \[2\] where 1 of 2": replace(good, chosen=[2]),
        r"heads \[0, 1\] where 1 of 2": replace(good, chosen=[0, 1]),
        r"layer w: cores \(1, 2, 2\) where \(1, 1, 1\)": replace(good, cores={"w": torch.zeros(1, 2, 2)}),
        r"layer w: cores \(1, 1, 1\) where \(1, 1, 1\)": replace(good, chosen=[1, 1]),
        "heads of each of": {"w": torch.zeros(1, 1, 1)},
    }
    for said, payload in bad.items():
        with pytest.raises(ModelError, match=said):
            method.check(payload, one)


def test_the_mismatch_counts_cores_and_they_are_exported_as_low_rank_factors() -> None:
    run = world(Ravan(), ranks=(2, 4, 8))
    played = run_all(run)
    assert all(one.metrics["mismatch"]["ideal_norm"] > 0 for one in played)
    state = played[-1].progress.state
    model = run.algorithm.global_model(state)
    exported = flattened(model, BaseLog(), "global")
    assert gap({name: term.product().double() for name, term in exported.items()}, dense(model)) < 1e-6
    assert all(term.rank == 4 * run.algorithm.width(run.cards["c0"].layers[name]) for name, term in exported.items())
