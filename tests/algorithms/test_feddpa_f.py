"""FedDPA-F: one global adapter, copies fine-tuned at home in the end, and inputs that mix the two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.harness import cards, play, play_phases, random_training
from engines.world import play as play_run
from engines.world import world

from coterie.algorithms import FedDPAF, FedIT
from coterie.engines.sites import Volatile, load_record
from coterie.errors import ConfigError
from coterie.experiments.methods import algorithm
from coterie.maths.keys import root_key
from coterie.protocol import Client, LowRank, Memory, Mix, Model, copied
from coterie.wire.codec import encode

MEMBERS = cards({"a": 2, "b": 2, "c": 2})


def client(memory: dict[str, Any]) -> Client:
    return Client(MEMBERS[0], Memory(memory, copied), ("train",), root_key(0).fold, 3, "main")


def test_the_first_phase_is_fedit_and_the_second_leaves_the_global_adapter_as_it_is() -> None:
    store, other = Volatile(), Volatile()
    mine = play_run(world(FedDPAF(), store=store))
    theirs = play_run(world(FedIT(), store=other, weights="uniform"))
    assert [p.metrics["phase"] for p in mine] == ["main"] * 3 + ["local"]
    for one, two in zip(mine, theirs, strict=False):
        assert all(torch.equal(a.A, b.A) and torch.equal(a.B, b.B) for a, b in pairs(one, two))
    assert all(torch.equal(a.A, b.A) and torch.equal(a.B, b.B) for a, b in pairs(mine[3], theirs[2]))


def pairs(one: Any, two: Any) -> list[tuple[LowRank, LowRank]]:
    first, second = one.progress.state.lora, two.progress.state.lora
    return [(first[layer], second[layer]) for layer in first]


def test_the_local_adapter_begins_as_a_copy_of_the_final_global_one() -> None:
    entered: dict[str, Model] = {}

    def watched(name: str, model: Model) -> Model:
        if "local" in model:
            entered[name] = model
        return random_training()(name, model)

    *_, last, fine = play_phases(FedDPAF(), MEMBERS, lambda _: watched)
    for member in MEMBERS:
        for layer, term in entered[member.id]["local"].items():
            assert torch.equal(term.B, last.state.lora[layer].B) and torch.equal(term.A, last.state.lora[layer].A)
            assert torch.equal(fine.memories[member.id]["local"][layer].B, fine.fitted[member.id]["local"][layer].B)
    assert encode(fine.state) == encode(last.state)


def test_nothing_is_uploaded_in_the_second_phase_and_the_local_adapter_never() -> None:
    played = play_phases(FedDPAF(), MEMBERS, random_training)
    assert set(played[-1].payloads.values()) == {None}
    run = world(FedDPAF(), rounds=2)
    play_run(run)
    last = [row for row in run.ledger.rows() if row["round"] == 3 and row["direction"] == "up"]
    assert sum(row["payload"] for row in last) == 0
    down = [row["payload"] for row in run.ledger.rows() if (row["round"], row["kind"]) == (3, "message")]
    assert sorted(down) == sorted(
        sum(FedDPAF().bytes_down(layer, card) for layer in card.layers.values()) for card in run.cards.values()
    )


def test_the_second_phase_leaves_the_head_as_it_is_whoever_keeps_it() -> None:
    for policy in ("averaged", "local"):
        store = Volatile()
        run = world(FedDPAF(), rounds=2, head=policy, store=store)
        heads = []
        for played in run.rounds(run.begin()):
            own = [load_record(store, name).head for name in run.cards]
            heads.append(encode((played.progress.heads, own)))
        assert heads[0] != heads[1] == heads[2]


def test_before_the_second_phase_a_site_uses_the_global_adapter_and_afterwards_both() -> None:
    lora = FedDPAF().send(play(FedDPAF(), MEMBERS, random_training()).state, MEMBERS[0])
    assert set(FedDPAF().site_model(client({}), lora).terms) == {"lora"}
    kept = {"local": lora, "anchors": torch.ones(5, 4)}
    model = FedDPAF(lam=0.3).site_model(client(kept), lora)
    assert set(model.terms) == {"lora", "local"} and isinstance(model.mix, Mix)
    assert (model.mix.near, model.mix.far, model.mix.by, model.mix.weight) == ("local", "lora", "local", 0.3)
    turned = FedDPAF(as_released=True).site_model(client(kept), lora).mix
    assert turned is not None and (turned.near, turned.far, turned.by) == ("lora", "local", "local")


def test_as_many_own_examples_are_kept_as_asked_for_and_no_more_than_there_are() -> None:
    for asked, kept in ((5, 5), (100, 20)):
        store = Volatile()
        play_run(world(FedDPAF(anchors=asked), rounds=1, store=store))
        anchors = load_record(store, "c0").memory["anchors"]
        assert tuple(anchors.shape) == (kept, 32) and len(torch.unique(anchors, dim=0)) == kept


def test_fine_tuning_that_stays_at_home_is_no_aggregation_mismatch() -> None:
    played = play_run(world(FedDPAF(), rounds=1))
    assert "mismatch" in played[0].metrics and "mismatch" not in played[1].metrics


@pytest.mark.parametrize("options", [{"lam": 1.5}, {"lam": -0.1}, {"anchors": 0}])
def test_shares_beyond_one_and_no_anchors_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"lam .* must be in \[0, 1\] and anchors"):
        algorithm("feddpa-f", options)
