"""IFCA: the least loss decides, an empty cluster stays, one cluster is FedIT, and every cluster has a head."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from conformance.harness import cards, play, random_training, server
from engines.world import base, world
from engines.world import play as play_run

from algorithms.fixtures import t1, uploads
from coterie.algorithms import IFCA, FedIT
from coterie.algorithms.ifca import State, nearest
from coterie.engines.evaluation import site_models
from coterie.engines.scoring import Evaluation
from coterie.engines.sites import Volatile, load_record
from coterie.engines.traffic import Chosen, Traffic
from coterie.errors import ConfigError, ModelError
from coterie.experiments.methods import algorithm
from coterie.maths.keys import Key, root_key
from coterie.protocol import Client, Evaluate, Federation, Fit, Fitted, Memory, Model, Score, Server, Uploads, copied
from coterie.protocol.messages import Uploaded
from coterie.training.asks import Ask, Done
from coterie.wire.codec import encode, size
from coterie.wire.ledger import Ledger

SERVER = Server((), lambda purpose: Key(0), 1, "main")


def client(number: int = 2, phase: str = "main", memory: dict[str, Any] | None = None) -> Client:
    member = cards({"a": 2})[0]
    return Client(member, Memory(memory or {}, copied), ("train",), root_key(0).fold, number, phase)


def asked_of(losses: tuple[float, ...], number: int = 2, phase: str = "main") -> tuple[Any, list[Any]]:
    """The upload of a client with these losses under the clusters' adapters, and what it asked for."""
    method = IFCA(clusters=len(losses))
    state = method.start(Federation((client().card,), 3), server(0))
    program: Any = method.local(client(number, phase), method.send(state, client().card))
    asked, answer = [], None
    try:
        while True:
            request = program.send(answer)
            asked.append(request)
            if isinstance(request, Fit):
                answer = Fitted(request.initial, 1.0, 1, 1)
            else:
                answer = [Score(loss, 0.5, 8) for loss in losses]
    except StopIteration as stop:
        return stop.value, asked


@pytest.mark.parametrize(("losses", "chosen"), [((0.2, 0.5), "0"), ((0.6, 0.1), "1"), ((0.3, 0.4), "0")])
def test_the_least_training_loss_decides(losses: tuple[float, ...], chosen: str) -> None:
    """N17."""
    assert nearest(list(losses), ("0", "1")) == chosen
    upload, asked = asked_of(losses)
    assert upload.head_group == chosen
    evaluated, fit = asked
    assert [(one.data, one.limit, one.group) for one in evaluated] == [("train", 512, "0"), ("train", 512, "1")]
    assert all(isinstance(one, Evaluate) for one in evaluated) and fit.head == chosen


def test_of_equal_losses_the_first_counts() -> None:
    assert asked_of((0.5, 0.5, 0.5))[0].head_group == "0"


def test_in_the_first_round_clients_are_dealt_out_evenly_and_nothing_is_evaluated() -> None:
    members = cards(dict.fromkeys("abcdefghij", 2))
    for seed_of in (server(0), Server((), lambda purpose: Key(9), 0, "start")):
        state = IFCA(clusters=3).start(Federation(tuple(members), 3), seed_of)
        assert sorted(Counter(state.dealt.values()).values()) == [3, 3, 4]
    other = IFCA(clusters=3).start(Federation(tuple(members), 3), server(0))
    assert other.dealt != state.dealt
    upload, asked = asked_of((0.9, 0.1), number=1)
    assert len(asked) == 1 and isinstance(asked[0], Fit)
    dealt = IFCA().start(Federation((client().card,), 3), server(0)).dealt["a"]
    assert upload.head_group == dealt


def test_only_members_move_a_cluster_and_one_without_any_stays_to_the_bit() -> None:
    before = IFCA(clusters=3).start(Federation(tuple(cards({"a": 2, "b": 2})), 1), server(0))
    outcome = play(IFCA(clusters=3), cards({"a": 2, "b": 2}), random_training(), state=before)
    for name, lora in outcome.state.models.items():
        alone = [who for who, cluster in outcome.chosen.items() if cluster == name]
        assert (encode(lora) == encode(before.models[name])) == (not alone)
        if len(alone) == 1:
            assert encode(lora) == encode(outcome.fitted[alone[0]]["lora"])


def test_a_cluster_is_the_plain_mean_of_its_members() -> None:
    made = Uploads([Uploaded(one.card, {"w": t1()[one.card.id]}, 1.0, "1") for one in uploads(t1())])
    start = {"w": t1()["1"]}
    after = IFCA().aggregate(State({"0": start, "1": start}, {}), made, SERVER)
    assert torch.equal(after.models["1"]["w"].B, torch.full((2, 1), 0.5).double())
    assert after.models["0"] is start


def test_one_cluster_is_fedit_to_the_bit() -> None:
    mine = play_run(world(IFCA(clusters=1)))
    theirs = play_run(world(FedIT(), weights="uniform"))
    for one, two in zip(mine, theirs, strict=False):
        assert encode(one.progress.state.models["0"]) == encode(two.progress.state.lora)
        assert encode(one.progress.heads["base/0"]) == encode(two.progress.heads["base/all"])


def test_the_last_round_trains_nothing_and_lets_all_choose_among_the_final_clusters() -> None:
    store = Volatile()
    run = world(IFCA(), ranks=(2, 2, 2, 2), sample=1, rounds=2, store=store)
    *_, last, choice = play_run(run)
    assert choice.metrics["phase"] == "choice" and choice.metrics["cohort"] == ["c0", "c1", "c2", "c3"]
    assert encode(choice.progress.state) == encode(last.progress.state)
    assert encode(choice.progress.heads) == encode(last.progress.heads)
    for name, site in run.setting.sites.items():
        losses = []
        for cluster, lora in last.progress.state.models.items():
            head = last.progress.heads.get(f"base/{cluster}", base().head)
            model = Model(lora={layer: term.truncated(2) for layer, term in lora.items()})
            (done,) = run.executor.answer(
                [Ask(name, Evaluate(model, "train"), "base", head, site.data["train"], Key(0))]
            )
            assert isinstance(done, Done) and isinstance(done.answer, Score)
            losses.append(done.answer.loss)
        record = load_record(store, name)
        assert record.head_group == nearest(losses, ("0", "1")) and record.memory == {}


def test_a_site_uses_the_adapter_and_the_head_of_its_cluster() -> None:
    store = Volatile()
    run = world(IFCA(), ranks=(2, 2, 2, 2), rounds=2, store=store)
    *_, last = play_run(run)
    view = Evaluation(run.setting, run.executor, store, 3, "main", Traffic(Ledger(), 3, "main", False))
    state, heads = last.progress.state, last.progress.heads
    assert encode(heads["base/0"]) != encode(heads["base/1"])
    for name, model, head in site_models(view, state, heads, {}):
        cluster = load_record(store, name).head_group
        assert cluster is not None
        assert encode(model["lora"]) == encode({n: t.truncated(2) for n, t in state.models[cluster].items()})
        assert encode(head) == encode(heads[f"base/{cluster}"])


def test_heads_travel_for_every_cluster_where_they_are_averaged_and_not_otherwise() -> None:
    head = sum(value.numel() * 4 for value in base().head.values())
    for policy in ("averaged", "local", "frozen"):
        run = world(IFCA(clusters=3), rounds=1, head=policy)
        play_run(run)
        rows = [row for row in run.ledger.rows() if row["kind"] == "head" and row["round"] == 1]
        sizes = {(row["direction"], row["payload"]) for row in rows}
        assert sizes == ({("down", 3 * head), ("up", head)} if policy == "averaged" else set())


def test_before_its_first_choice_a_site_uses_the_adapter_and_the_head_of_the_cluster_it_was_dealt() -> None:
    run = world(IFCA(), ranks=(2, 2, 2, 2), sample=1, rounds=2)
    first, *_ = play_run(run)
    view = Evaluation(run.setting, run.executor, Volatile(), 2, "main", Traffic(Ledger(), 2, "main", False))
    state, heads = first.progress.state, first.progress.heads
    assert len(set(state.dealt.values())) == 2
    for name, model, head in site_models(view, state, heads, {}):
        dealt = state.dealt[name]
        assert encode(model["lora"]) == encode({n: t.truncated(2) for n, t in state.models[dealt].items()})
        assert encode(head) == encode(heads.get(f"base/{dealt}", base().head))


def test_the_clusters_name_travels_once_and_k_adapters_down() -> None:
    """The upload is booked with the name, and without it where all stays at home."""
    run = world(IFCA(), rounds=1, ranks=(2, 2, 2), strict=True)
    _, choice = play_run(run)
    rows = [row for row in run.ledger.rows() if row["direction"] == "up" and row["kind"] == "message"]
    assert {row["round"] for row in rows} == {1} and choice.metrics["phase"] == "choice"
    member = run.cards["c0"]
    sent = run.algorithm.start(run.federation, server(0)).models["0"]
    amount, bare = size(Chosen("0", sent)), size(sent)
    assert {(row["payload"], row["overhead"]) for row in rows} == {(amount.payload, amount.overhead)}
    assert amount.payload == bare.payload and amount.overhead > bare.overhead
    for layer in member.layers.values():
        assert IFCA(clusters=4).bytes_down(layer, member) == 4 * IFCA(clusters=4).bytes_up(layer, member)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"clusters \(0\) and examples \(512\) must be at least 1"):
        algorithm("ifca", {"clusters": 0})
    member = cards({"a": 2})[0]
    with pytest.raises(ModelError, match="client a"):
        IFCA().check({}, member)
