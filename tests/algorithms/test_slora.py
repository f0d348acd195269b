"""SLoRA: one mask for all, the switch by SVD, and FedIT before, after and without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.harness import cards, dense, ideal, play, random_training, server
from engines.world import FAST, base, world
from engines.world import play as play_run

from algorithms.fixtures import card
from coterie.algorithms import FedIT, SLoRA
from coterie.algorithms.masked import Values
from coterie.algorithms.slora import Download, State
from coterie.engines.setting import Fault
from coterie.engines.sites import Volatile
from coterie.errors import ConfigError, ModelError
from coterie.maths.keys import Key, root_key
from coterie.maths.sparse_change import low_rank_part, random_places
from coterie.protocol import Card, Evaluate, Layer, LowRank, Model, Phase, SparseDelta, Uploads
from coterie.protocol.messages import Uploaded
from coterie.training.asks import Ask, Done, Plan
from coterie.training.executor import Executor
from coterie.wire.codec import encode, size

MEMBERS = cards({"a": 2, "b": 2, "c": 2})
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_at_the_switch_a_change_of_rank_one_becomes_factors_of_the_same_product(scale: float) -> None:
    """Rank-1 D = [[3, 0], [0, 0]], r = 1: s B A = D; with S on B, divided by s."""
    zero = {"w": LowRank(torch.zeros(2, 1).double(), torch.zeros(1, 2).double(), scale)}
    term = switched(zero, torch.tensor([3.0, 0.0, 0.0, 0.0]).double())
    assert torch.allclose(term.product(), torch.tensor([[3.0, 0.0], [0.0, 0.0]]).double(), atol=1e-12)
    assert float(term.B.norm()) == pytest.approx(3.0 / scale) and float(term.A.norm()) == pytest.approx(1.0)
    assert term.scale == scale


def switched(lora: dict[str, LowRank], D: torch.Tensor) -> LowRank:
    """What the server makes of a flat change D of all entries, of one client, in the last round of stage 1."""
    state = State(lora, {"w": torch.zeros_like(D)}, Key(0), 1)
    mask = random_places(Key(0).fold("w"), len(D), len(D))
    sent = Uploaded(card("1", lora["w"].rank), Values({"w": D[mask.long()]}), 1.0)
    made: LowRank = SLoRA(density=1.0).aggregate(state, Uploads([sent]), server()).lora["w"]
    return made


def test_without_a_first_stage_it_is_fedit_bit_for_bit() -> None:
    mine = play_run(world(SLoRA(sparse_rounds=0), ranks=(4, 4, 4)))
    plain = play_run(world(FedIT(), ranks=(4, 4, 4)))
    assert encode(mine[-1].progress.state.lora) == encode(plain[-1].progress.state.lora)
    assert [p.metrics for p in mine] == [p.metrics for p in plain]


def test_stage_1_averages_the_values_and_the_switch_cuts_their_matrix() -> None:
    algorithm = SLoRA(sparse_rounds=2)
    first = play(algorithm, MEMBERS, random_training(), weights=WEIGHTS, phase="sparse")
    mean = ideal(first, WEIGHTS)
    deployed = algorithm.global_model(first.state)["sparse"]
    for name, term in deployed.items():
        assert torch.allclose(dense(term), mean[name], atol=1e-6)
    second = play(algorithm, MEMBERS, random_training(1), weights=WEIGHTS, state=first.state, number=2, phase="sparse")
    assert second.state.values is None
    mean = ideal(second, WEIGHTS)
    for name, term in algorithm.global_model(second.state)["lora"].items():
        spectrum = torch.linalg.svdvals(mean[name])
        assert term.rank == 2 and float((dense(term) - mean[name]).norm()) == pytest.approx(
            float(spectrum[2:].norm()), rel=1e-5
        )
        assert torch.allclose(term.A @ term.A.mT, torch.eye(2), atol=1e-5)


def test_all_clients_train_the_same_places_in_every_round_of_stage_1() -> None:
    algorithm = SLoRA(sparse_rounds=2, density=0.3)
    first = play(algorithm, MEMBERS, random_training(), phase="sparse")
    second = play(algorithm, MEMBERS, random_training(), state=first.state, number=2, phase="sparse")
    seen = [one.fitted[client]["sparse"]["first"].places for one in (first, second) for client in "abc"]
    assert all(torch.equal(one, seen[0]) for one in seen)
    assert len(seen[0]) == round(0.3 * 35) == len(set(seen[0].tolist()))
    other = play(algorithm, MEMBERS, random_training(), phase="sparse").fitted["a"]["sparse"]["second"].places
    assert len(other) == round(0.3 * 36)


def test_entries_outside_the_mask_stay_to_the_bit_and_w_itself_does_in_both_stages() -> None:
    run = world(SLoRA(sparse_rounds=2), ranks=(2, 2, 2), rounds=4)
    before = {name: base().weight(name) for name in run.cards["c0"].layers}
    for played in run.rounds(run.begin()):
        state = played.progress.state
        for name in before:
            assert torch.equal(run.executor.bases["base"].weight(name), before[name])
        if state.values is not None:
            for name, term in run.algorithm.global_model(state)["sparse"].items():
                outside = torch.ones(term.d_out * term.d_in, dtype=torch.bool)
                outside[term.places.long()] = False
                W = before[name] + term.dense()
                assert torch.equal(W.flatten()[outside], before[name].flatten()[outside])
                assert float(term.values.abs().max()) > 0
        assert (state.values is None) == (played.progress.round >= 2)


def test_outputs_before_and_after_the_switch_agree_where_the_change_has_a_low_rank() -> None:
    network = base()
    executor = Executor({"base": network}, FAST, Plan())
    changes: dict[str, SparseDelta] = {}
    lora: dict[str, LowRank] = {}
    for name, layer in network.layers.items():
        key = root_key(0).fold(name)
        D = key.fold("B").normal((layer.d_out, 2)) @ key.fold("A").normal((2, layer.d_in)) / 10
        places = torch.arange(D.numel(), dtype=torch.int32)
        changes[name] = SparseDelta(D.flatten(), places, layer.d_out, layer.d_in)
        lora[name] = LowRank(*low_rank_part(D, 2), 1.0).rescaled(2.0)
    data = world(FedIT()).setting.pooled_test
    losses = []
    for model in (Model(), Model(sparse=changes), Model(lora=lora)):
        (done,) = executor.answer([Ask("s", Evaluate(model, "test"), "base", network.head, data, Key(0))])
        assert isinstance(done, Done)
        losses.append(done.answer.loss)  # type: ignore[union-attr]
    assert abs(losses[1] - losses[2]) < 1e-6 < 1e-2 < abs(losses[0] - losses[1])


def test_rows_without_a_direction_of_their_own_can_still_learn() -> None:
    """D of rank 1 at r = 2: the second row of A is orthonormal to the first, the second column of B zero."""
    zero = {"w": LowRank(torch.zeros(2, 2).double(), torch.zeros(2, 2).double())}
    term = switched(zero, torch.tensor([3.0, 0.0, 0.0, 0.0]).double())
    assert torch.allclose(term.A @ term.A.mT, torch.eye(2).double(), atol=1e-12)
    assert torch.allclose(term.product(), torch.diag(torch.tensor([3.0, 0.0])).double(), atol=1e-12)


def test_the_rounds_are_shared_out_and_the_first_stage_has_a_tenth() -> None:
    assert SLoRA().phases(30) == [Phase("sparse", 3), Phase("main", 27)]
    assert SLoRA().phases(3) == [Phase("sparse", 1), Phase("main", 2)]
    assert SLoRA().phases(1) == [Phase("main", 1)]
    assert SLoRA(sparse_rounds=0).phases(5) == [Phase("main", 5)]
    assert SLoRA(sparse_rounds=9).phases(5) == [Phase("sparse", 5), Phase("main", 0)]


def test_a_last_sparse_round_that_nobody_answers_leaves_the_switch_to_the_next() -> None:
    faults = tuple(Fault(name, 2, "exception") for name in ("c0", "c1", "c2"))
    played = play_run(world(SLoRA(sparse_rounds=2), ranks=(2, 2, 2), rounds=4, faults=faults, min_replies=0))
    states = [p.progress.state for p in played]
    assert [state.values is None for state in states] == [False, False, True, True]
    assert not torch.equal(*(next(iter(state.lora.values())).B for state in states[2:]))


def test_a_run_of_sparse_rounds_alone_ends_with_factors() -> None:
    played = play_run(world(SLoRA(sparse_rounds=3), ranks=(4, 4, 4)))
    state = played[-1].progress.state
    assert state.values is None and all(float(term.B.norm()) > 0 for term in state.lora.values())
    assert "mismatch" not in played[0].metrics


def test_values_travel_at_the_mask_and_the_mask_as_a_seed() -> None:
    algorithm = SLoRA(density=0.1, sparse_rounds=1)
    run = world(algorithm, ranks=(4, 4, 4), rounds=2, store=Volatile())
    play_run(run)
    one = run.cards["c0"]
    rows = [row for row in run.ledger.rows() if row["client"] == "c0" and row["kind"] in ("message", "setup")]
    booked = {(row["round"], row["kind"], row["direction"]): row["payload"] for row in rows}
    sparse = sum(round(0.1 * layer.d_out * layer.d_in) * 4 for layer in one.layers.values())
    full = sum(FedIT().bytes_up(layer, one) for layer in one.layers.values())
    assert booked == {
        (1, "message", "down"): sparse,
        (1, "setup", "down"): 8,
        (1, "message", "up"): sparse,
        (2, "message", "down"): full,
        (2, "message", "up"): full,
    }


def test_the_byte_formula_tells_the_stages_apart_and_they_cost_alike_by_default() -> None:
    one = Card("a", 4, 1, 1.0, {"w": Layer(1024, 768)})
    layer = one.layers["w"]
    first, main = SLoRA().phases(20)
    assert SLoRA(density=0.01).bytes_of_round(layer, one, 2, first) == (7864 * 4, 7864 * 4)
    assert SLoRA(density=0.01).bytes_of_round(layer, one, 3, main) == (4 * 1792 * 4, 4 * 1792 * 4)
    assert SLoRA().bytes_of_round(layer, one, 2, first) == SLoRA().bytes_of_round(layer, one, 3, main)
    upload = play(SLoRA(), MEMBERS, random_training(), phase="sparse").payloads["a"]
    assert {name: size(values).payload for name, values in upload.values.items()} == {"first": 96, "second": 96}


def test_who_uploads_what_is_of_the_other_stage_counts_for_nothing() -> None:
    algorithm = SLoRA(sparse_rounds=1)
    late = play(SLoRA(sparse_rounds=0), MEMBERS, random_training()).payloads["a"]
    sparse = play(algorithm, MEMBERS, random_training(), phase="sparse")
    mixed = Uploads([Uploaded(MEMBERS[0], late, 1.0), Uploaded(MEMBERS[1], sparse.payloads["b"], 1.0)])
    alone = Uploads([Uploaded(MEMBERS[1], sparse.payloads["b"], 1.0)])
    assert encode(algorithm.aggregate(sparse.before, mixed, server())) == encode(
        algorithm.aggregate(sparse.before, alone, server())
    )
    assert algorithm.aggregate(sparse.state, alone, server(2)) is sparse.state


def test_what_cannot_be_meant_is_refused() -> None:
    for options in ({"sparse_rounds": -1}, {"density": 0.0}, {"density": 1.5}):
        with pytest.raises(ValueError, match=r"sparse_rounds|density"):
            SLoRA(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="SLoRA needs one rank"):
        play(SLoRA(), cards({"a": 1, "b": 2}), random_training())
    odd: tuple[Any, ...] = (None, Values({"first": torch.zeros(24)}), Download({}, Key(0)))
    for payload in odd:
        with pytest.raises(ModelError, match="client a"):
            SLoRA().check(payload, MEMBERS[0])
