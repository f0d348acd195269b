"""Fed-PLoRA: fixture N15, the same start for all, means over who trained a module, FedIT where all train all."""

from __future__ import annotations

import pytest
import torch
from conformance.harness import cards, deployed, gap, play, random_training, server
from engines.world import dense, world
from engines.world import play as run_all

from algorithms.fixtures import card, term, uploads
from coterie.algorithms import FedIT, FedPLoRA
from coterie.algorithms.directions import State
from coterie.algorithms.fed_plora import apart
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import Federation, LowRank, Model


def test_r_2_module_one_is_the_mean_of_two_clients_and_module_two_is_the_second_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = {"1": [0], "2": [0, 1]}
    monkeypatch.setattr(State, "selected", lambda state, one: chosen[one.id])
    start = State({"w": term([[9, 9], [9, 9]], [[9, 9], [9, 9]])}, root_key(0), 0)
    sent = {"1": term([[1], [0]], [[1, 0]]), "2": term([[3, 5], [0, 5]], [[3, 2], [7, 7]])}
    made = FedPLoRA().aggregate(start, uploads(sent), server(1)).lora["w"]
    assert torch.equal(made.B, torch.tensor([[2.0, 5.0], [0.0, 5.0]], dtype=torch.float64))
    assert torch.equal(made.A, torch.tensor([[2.0, 1.0], [7.0, 7.0]], dtype=torch.float64))


def test_every_client_starts_at_the_global_model_whatever_it_selected() -> None:
    method, members = FedPLoRA(rank=6), cards({"a": 1, "b": 3, "c": 6})
    state = play(method, members, random_training()).state
    target, entered = dense(method.global_model(state)), []

    def seen(name: str, model: Model) -> Model:
        entered.append(name)
        assert gap(dense(model), target) < 1e-6
        assert ("shared" in model) == (name != "c")
        return random_training(1)(name, model)

    play(method, members, seen, state=state, number=2)
    assert entered == ["a", "b", "c"]


def test_modules_that_nobody_trained_stay_to_the_bit_and_selections_change() -> None:
    method, members = FedPLoRA(rank=10), cards({"a": 1, "b": 2})
    first = play(method, members, random_training())
    second = play(method, members, random_training(1), state=first.state, number=2)
    chosen = {member.id: first.state.selected(member) for member in members}
    assert chosen != {member.id: second.state.selected(member) for member in members}
    touched = set(chosen["a"]) | set(chosen["b"])
    for name, before in first.state.lora.items():
        after = second.state.lora[name]
        for j in range(10):
            same = torch.equal(after.A[j], before.A[j]) and torch.equal(after.B[:, j], before.B[:, j])
            assert same == (j not in touched)


def test_folded_modules_are_frozen_in_real_training() -> None:
    run = world(FedPLoRA(rank=8), ranks=(2, 4, 4), rounds=1)
    start = run.begin()
    sent = {name: start.state.selected(one) for name, one in run.cards.items()}
    after = run_all(run)[-1].progress.state
    untouched = set(range(8)) - set().union(*sent.values())
    for name, before in start.state.lora.items():
        moved = {j for j in range(8) if not torch.equal(after.lora[name].B[:, j], before.B[:, j])}
        assert moved == set(range(8)) - untouched


def test_where_everybody_trains_all_modules_it_is_fedit_with_uniform_weights() -> None:
    members = cards({"a": 3, "b": 3, "c": 3})
    state = {FedPLoRA: None, FedIT: None}
    for number in (1, 2):
        made = {}
        for kind in state:
            outcome = play(kind(), members, random_training(number), state=state[kind], number=number)
            state[kind], made[kind] = outcome.state, deployed(kind(), outcome)
        assert gap(made[FedPLoRA], made[FedIT]) < 2e-6


def test_selected_and_folded_modules_are_all_of_them() -> None:
    one = {"w": LowRank(torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(3, 2), 2.0)}
    chosen, folded = apart(one, [0, 2])
    assert torch.equal(chosen["w"].B, one["w"].B[:, [0, 2]]) and torch.equal(folded["w"].A, one["w"].A[[1]])
    assert chosen["w"].scale == folded["w"].scale == 2.0
    assert apart(one, [0, 1, 2])[1] == {}


def test_unequal_scales_are_met() -> None:
    members = cards({"a": 1, "b": 2}, scale={"a": 1.0, "b": 4.0})
    method = FedPLoRA()
    first = play(method, members, random_training())
    for member in members:
        assert gap(dense(method.site_model(None, method.send(first.state, member))), deployed(method, first)) < 1e-6  # type: ignore[arg-type]
    idle = play(method, members, lambda name, model: model, state=first.state, number=2)
    assert gap(deployed(method, idle), deployed(method, first)) < 1e-6


def test_all_modules_come_down_and_the_trained_ones_go_up() -> None:
    members = tuple(cards({"a": 2, "b": 16}))
    layer = members[0].layers["first"]
    asked = FedPLoRA().in_federation(Federation(members, 1))
    assert asked.bytes_up(layer, members[0]) == 2 * 12 * 4 and asked.bytes_down(layer, members[0]) == 16 * 12 * 4
    assert FedPLoRA(rank=20).in_federation(Federation(members, 1)).bytes_down(layer, members[1]) == 20 * 12 * 4
    with pytest.raises(ModelError, match="rank 1 where 2 is expected"):
        FedPLoRA().check({"w": term([[1], [0]], [[1, 0]])}, card("1", 2))
    with pytest.raises(ValueError, match="rank must be 1 at least"):
        FedPLoRA(rank=0)
