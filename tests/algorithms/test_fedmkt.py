"""FedMKT: predictions on a pool travel, in whatever tokens; who knows more teaches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.harness import cards, play, random_training
from engines.world import FAST, text, world
from engines.world import play as rounds_of
from training.decoders import decoder, tokens

from coterie.algorithms import FedMKT
from coterie.algorithms.factors import initial_adapter
from coterie.assets import fetch
from coterie.engines.driver import Party, drive_one
from coterie.engines.in_process import InProcess
from coterie.engines.setting import Measuring, OwnTests, Setting, Site
from coterie.engines.sites import Volatile
from coterie.errors import ConfigError, ModelError
from coterie.maths.alignment import counterparts
from coterie.maths.keys import root_key
from coterie.models.loading import Base, load_language_base
from coterie.protocol import (
    Card,
    Distillation,
    Evaluate,
    Federation,
    Fit,
    Model,
    Predict,
    Server,
    TopLogits,
    Translate,
)
from coterie.protocol.messages import leaves
from coterie.training.asks import Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.wire.codec import size
from coterie.wire.ledger import Ledger

ADAM = TrainSettings(lr=0.02, batch_size=16, steps=4, weight_decay=0.0)
POOL = 20


def federation(algorithm: FedMKT, rounds: int = 2, **fields: Any) -> InProcess:
    """Two clients with many examples and a decoder of many tokens; a server with few tokens and the pool alone."""
    bases = {"few": decoder(270), "many": decoder(319, 48)}
    pools = {spec: tokens(base, POOL, "pool") for spec, base in bases.items()}
    own, sizes = bases["many"], {spec: (POOL, int(pool.labelled.sum())) for spec, pool in pools.items()}
    sites = {
        f"c{i}": Site(
            Card(f"c{i}", 8, 300, 2.0, own.layers, spec="many", pool=sizes["many"]),
            {
                "train": tokens(own, 300, f"c{i}"),
                "pool": pools["many"],
                "pool/few": pools["few"],
                "test": tokens(own, 40, f"t{i}"),
            },
        )
        for i in range(2)
    }
    setting = Setting(
        algorithm,
        sites,
        rounds=rounds,
        server_data={"pool": pools["few"], "pool/many": pools["many"]},
        pooled_test=tokens(bases["few"], 120, "held out"),
        server_base="few",
        given={"c0": 700, "c1": 300},
        server_card=Card("server", 8, 0, 2.0, bases["few"].layers, spec="few", pool=sizes["few"]),
        own_tests={"many": OwnTests(tokens(own, 20, "held out"), {})},
        measuring=Measuring(objective_examples=0, clients_every=99, every=99),
        head="frozen",
        **fields,
    )
    return InProcess(setting, Executor(bases, ADAM, Plan()), Volatile(), Ledger())


@pytest.fixture(scope="module")
def taught() -> tuple[InProcess, list[Any]]:
    run = federation(FedMKT(gold=0.3, top_k=32), strict=True)
    return run, rounds_of(run)


def receivers_losses(sender: Base, draw: int, golds: tuple[float, float]) -> list[float]:
    """On held-out sentences, of a small random decoder with tokens of its own that has learnt from a pool of 24.

    For each share of its labels; the rest it learns from what a sender says that has seen 600 other sentences.
    """
    bases = {"sender": sender, "small": decoder(312, 48)}
    settings = TrainSettings(lr=0.005, batch_size=16, steps=150, weight_decay=0.0)
    executor = Executor(bases, settings, Plan())

    def party(spec: str, data: dict[str, Any]) -> Party:
        return Party(spec, spec, data, None, root_key(5).fold(spec, draw), trains_head=False)

    def fresh(spec: str) -> Model:
        return Model(lora=initial_adapter(bases[spec].layers, 8, 2.0, root_key(6).fold(draw)))

    pools = {spec: tokens(base, 24, "pool") for spec, base in bases.items()}

    def sent() -> Any:
        fitted = yield Fit(fresh("sender"))
        return TopLogits.of((yield Predict(fitted.model, "pool", top_k=32)))

    said = drive_one(sent(), party("sender", {"train": tokens(sender, 600, "own"), "pool": pools["sender"]}), executor)
    data = {"pool": pools["small"], "pool/sender": pools["sender"], "test": tokens(bases["small"], 150, "held out")}

    def learnt(gold: float) -> Any:
        model = yield from FedMKT(gold=gold, top_k=32).distilled(fresh("small"), [Translate(said, "sender", "pool")])
        return (yield Evaluate(model, "test")).loss

    return [drive_one(learnt(gold), party("small", data), executor) for gold in golds]


def test_the_receivers_held_out_loss_is_lower_than_after_as_many_steps_on_labels_alone() -> None:
    losses = [receivers_losses(decoder(319, 48), draw, (0.3, 1.0)) for draw in range(3)]
    ratios = [taught / alone for taught, alone in losses]
    assert max(ratios) < 1 and sum(ratios) / 3 < 0.95


@pytest.mark.slow
@pytest.mark.assets
@pytest.mark.parametrize("draw", [0, 1])
def test_what_smollm2_says_teaches_a_small_decoder_of_other_tokens_without_any_label(draw: int) -> None:
    sender = load_language_base(str(fetch("smollm2")), targets=("q_proj", "v_proj"))
    without_labels, labels = receivers_losses(sender, draw, (0.0, 1.0))
    assert without_labels < 1.5 * labels


def test_sentences_of_smollm2_and_of_few_tokens_are_laid_beside_each_other() -> None:
    """Written out: what SmolLM2 takes for one token, a tokeniser of 320 cuts into pieces."""
    source = [" The", " horse", " crawls", " well", "."]
    target = [" The", " hor", "se", " crawls", " we", "ll", "."]
    assert counterparts(source, target) == [0, -1, -1, 2, -1, -1, 4]


def test_what_travels_is_the_formula_to_the_byte_and_no_factor(taught: tuple[InProcess, list[Any]]) -> None:
    run, _ = taught
    rows = run.ledger.drain()
    sent = {(r["round"], r["client"], r["direction"]): r["payload"] for r in rows if r["kind"] == "message"}
    asked = run.algorithm
    for name, card in run.cards.items():
        up, down = asked.bytes_apart(card, run.federation)
        E, n = card.pool or (0, 0)
        assert up == 4 * E + 8 * 32 * n and down == 4 * E + 8 * 32 * run.federation.server_card.pool[1]  # type: ignore[index]
        assert sent[1, name, "up"] == sent[2, name, "up"] == up
        assert sent[1, name, "down"] == 0 and sent[2, name, "down"] == sent[3, name, "down"] == down
        assert (3, name, "up") not in sent


def test_examples_given_to_the_pool_are_booked_as_data_once_and_reach_the_others(
    taught: tuple[InProcess, list[Any]],
) -> None:
    found = taught[0].ledger.client_totals
    assert {way: found("c0")["data", way].payload for way in ("up", "down")} == {"up": 700, "down": 300}
    assert {way: found("c1")["data", way].payload for way in ("up", "down")} == {"up": 300, "down": 700}
    assert taught[1][0].metrics["bytes"]["data"]["up"]["payload"] == 1000
    assert all("data" not in one.metrics["bytes"] for one in taught[1][1:])


def test_all_is_played_in_the_codes_order() -> None:
    """A client distils before it trains, from the second round on, and once more at the end; the server every round."""
    asked: dict[str, list[str]] = {}
    members = cards({"a": 2, "b": 2})
    algorithm = FedMKT()

    def record(program: Any, who: str) -> Any:
        answer: Any = None
        try:
            while True:
                request = program.send(answer)
                for one in request if isinstance(request, list) else [request]:
                    kind = (
                        "distil" if isinstance(one, Fit) and isinstance(one.loss, Distillation) else type(one).__name__
                    )
                    asked.setdefault(who, []).append(kind)
                answer = yield request
        except StopIteration as stop:
            return stop.value

    class Watched(FedMKT):
        def local(self, client: Any, download: Any) -> Any:
            return (yield from record(algorithm.local(client, download), f"{client.card.id}{client.round}"))

        def aggregate(self, state: Any, uploads: Any, server: Any) -> Any:
            return (yield from record(algorithm.aggregate(state, uploads, server), f"server{server.round}"))

    first = play(Watched(), members, random_training())
    second = play(Watched(), members, random_training(), state=first.state, memories=first.memories, number=2)
    closing = play(
        Watched(), members, random_training(), state=second.state, memories=second.memories, number=3, phase="closing"
    )
    assert asked["a1"] == ["Fit", "Predict"]
    assert asked["a2"] == ["Predict", "Translate", "distil", "Fit", "Predict"]
    assert asked["a3"] == ["Predict", "Translate", "distil"] and closing.payloads == {"a": None, "b": None}
    assert asked["server1"] == asked["server2"] == ["Predict", "Translate", "Translate", "distil", "Predict"]
    assert "server3" not in asked


def test_with_average_clients_with_one_base_go_on_from_their_mean() -> None:
    members = [*cards({"a": 2, "b": 2}), *(replace(card, spec="other") for card in cards({"c": 2}))]
    outcome = play(FedMKT(average=True), members, random_training(), weights={"a": 0.5, "b": 0.25, "c": 0.25})
    entered: dict[str, Any] = {}

    def watch(name: str, model: Any) -> Any:
        entered.setdefault(name, model)
        return model

    play(FedMKT(average=True), members, watch, state=outcome.state, memories=outcome.memories, number=2)
    for layer, term in entered["a"]["lora"].items():
        a, b = (outcome.fitted[name]["lora"][layer].B for name in "ab")
        assert torch.allclose(term.B, (2 * a + b) / 3) and torch.equal(term.B, entered["b"]["lora"][layer].B)
        assert torch.allclose(entered["c"]["lora"][layer].B, outcome.fitted["c"]["lora"][layer].B)


def test_without_average_no_factor_is_ever_uploaded() -> None:
    outcome = play(FedMKT(), cards({"a": 1, "b": 4}), random_training())
    for name, payload in outcome.payloads.items():
        shapes = [tuple(leaf.shape) for _, leaf in leaves(payload) if isinstance(leaf, torch.Tensor)]
        assert shapes == [(8, 2), (8, 2), (8,)] and size(payload).payload == 8 * 2 * 8 + 8 * 4
        assert outcome.memories[name]["factors"]


def test_classifiers_teach_each_other_by_class() -> None:
    pool = text(16, seed=50)
    run = world(FedMKT(gold=0.5), rounds=2, train=replace(FAST, steps=6), server_data={"pool": pool})
    sites = {
        name: Site(replace(site.card, pool=(16, 16)), {**site.data, "pool": pool})
        for name, site in run.setting.sites.items()
    }
    run = InProcess(replace(run.setting, sites=sites), run.executor, run.store, run.ledger)
    played = rounds_of(run)
    assert [one.metrics["phase"] for one in played] == ["main", "main", "closing"]
    assert not played[-1].metrics["failed"] and played[-1].metrics["global"]["pooled"]["examples"] == 40


def test_a_federation_without_a_pool_is_refused() -> None:
    server = Server((), root_key(0).fold, round=0, phase="start")
    with pytest.raises(ConfigError, match=r"public pool.*server_data\.pool"):
        FedMKT().start(Federation(tuple(cards({"a": 2})), 1), server)


def test_an_upload_of_another_pool_is_refused_by_name() -> None:
    (card,) = cards({"a": 2})
    payload = play(FedMKT(), [card], random_training()).payloads["a"]
    FedMKT().check(payload, card)
    with pytest.raises(ModelError, match=r"client a: 8 rows and 8 losses, where its pool has 9 labels of 8 examples"):
        FedMKT().check(payload, replace(card, pool=(8, 9)))
    with pytest.raises(ModelError, match="at most 1 logits a row"):
        FedMKT(top_k=1).check(payload, card)
