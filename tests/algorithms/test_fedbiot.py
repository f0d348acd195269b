"""FedBiOT: outer blocks are trained around an emulator that the server brings near to the whole model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from conformance.harness import cards, play, random_training
from engines.world import FAST, text
from engines.world import play as rounds_of
from training.small import KEY, bert

from coterie.algorithms import FedBiOT
from coterie.engines.driver import Party, drive_one
from coterie.engines.in_process import InProcess
from coterie.engines.setting import Measuring, Setting, Site
from coterie.engines.sites import Volatile
from coterie.errors import ConfigError, ModelError
from coterie.maths.keys import root_key
from coterie.models.emulator import emulator
from coterie.models.loading import Base, from_network
from coterie.protocol import Bottleneck, Card, Federation, Fit, Imitation, Layer, LowRank, Model, Server
from coterie.training.asks import Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.wire.ledger import Ledger

TARGETS, HEAD = ("query", "value"), KEY.fold("head")
ALIGN = TrainSettings(lr=0.02, batch_size=8, steps=20, weight_decay=0.0)
TALL = {f"layers.{i}.q": Layer(6, 6) for i in (0, 1, 3, 6, 7)}


@cache
def bases() -> dict[str, Base]:
    whole = from_network(bert(num_hidden_layers=5, num_labels=2), None, TARGETS, HEAD, attention="eager")
    return {"base": whole, "emulator": emulator(whole, TARGETS, 0.6, 1, HEAD)}


def federation(algorithm: FedBiOT, **fields: Any) -> InProcess:
    small, whole = bases()["emulator"], bases()["base"]
    sites = {}
    for i in range(3):
        card = Card(f"c{i}", 2 + i, 16 + 4 * i, 2.0, small.layers, spec="emulator")
        sites[card.id] = Site(card, {"train": text(16 + 4 * i, seed=i + 1), "test": text(8, seed=90 + i)})
    setting = Setting(
        algorithm,
        sites,
        rounds=2,
        heads={spec: base.head for spec, base in bases().items()},
        server_data={"public/movie": text(24, seed=40)},
        pooled_test=text(24, seed=99),
        server_base="base",
        server_card=Card("server", 4, 0, 2.0, whole.layers, spec="base"),
        measuring=Measuring(objective_examples=0),
        strict=True,
        head="frozen",
        **fields,
    )
    return InProcess(setting, Executor(bases(), replace(FAST, steps=3), Plan()), Volatile(), Ledger())


def alignment(distance: str = "l2", steps: int = 30) -> tuple[float, float]:
    """What the server's alignment is at, at first and after so many steps."""
    algorithm = FedBiOT(outer=1, distance=distance, align=1)  # type: ignore[arg-type]
    run = federation(algorithm)
    run = InProcess(run.setting, Executor(bases(), ALIGN, Plan()), run.store, run.ledger)
    state = run.begin().state
    server = Server(("public/movie",), root_key(2).fold, round=1, phase="main")
    losses = [state.alignment[0]]
    for count in (steps, 1):
        program = replace(algorithm, align=count).aligned(state, server)
        party = Party("server", "base", run.setting.server_data, None, root_key(3), trains_head=False, is_server=True)
        state = drive_one(program, party, run.executor)
        losses.append(state.alignment[-1])
    return losses[0], losses[-1]


@pytest.mark.parametrize("distance", ["l2", "cosine"])
def test_the_alignment_loss_falls(distance: str) -> None:
    first, last = alignment(distance)
    assert last < 0.7 * first


def test_an_emulator_that_is_the_whole_model_has_nothing_to_align() -> None:
    whole = bases()["base"]
    both = {"base": whole, "emulator": emulator(whole, TARGETS, 0.0, 1, HEAD)}
    fit = Fit(
        Model(spec="emulator", shared=model_of(whole).terms["lora"]),
        train=("shared.*",),
        head=False,
        loss=Imitation(Model(spec="base"), "bert.encoder.layer.4"),
        data="public",
        steps=1,
    )
    party = Party("server", "base", {"public": text(12)}, None, root_key(3), trains_head=False, is_server=True)

    def program() -> Any:
        return (yield fit).mean_loss

    assert abs(drive_one(program(), party, Executor(both, ALIGN, Plan()))) < 1e-9


def model_of(base: Base) -> Model:
    """Factors that add nothing."""
    return Model(
        lora={
            name: LowRank(torch.zeros(layer.d_out, 2), KEY.fold(name).normal((2, layer.d_in), 0.1))
            for name, layer in base.layers.items()
        }
    )


def test_a_teacher_needs_a_base_of_its_own_and_the_block() -> None:
    whole = bases()["base"]
    party = Party("server", "base", {"public": text(12)}, None, root_key(3), trains_head=False, is_server=True)
    for spec, at, told in (("base", "bert.encoder.layer.4", "not the learner's"), ("emulator", "nowhere", "no block")):

        def program(spec: str = spec, at: str = at) -> Any:
            yield Fit(model_of(whole), head=False, loss=Imitation(Model(spec=spec), at), data="public", steps=1)

        with pytest.raises(ModelError, match=told):
            drive_one(program(), party, Executor(bases(), ALIGN, Plan()))


@pytest.mark.parametrize("adapter", ["lora", "bottleneck"])
def test_a_federation_trains_outer_blocks_and_deploys_them_in_the_whole_model(adapter: str) -> None:
    run = federation(FedBiOT(outer=1, align=4, adapter=adapter, bottleneck=4, again=2))  # type: ignore[arg-type]
    played = rounds_of(run)
    last = played[-1]
    assert not last.metrics["failed"] and last.metrics["global"]["pooled"]["examples"] == 24
    assert set(last.metrics["global"]["further"]) == {"emulated"}
    state = last.progress.state
    outer = {name for name in bases()["base"].layers if ".0." in name or ".4." in name}
    assert set(state.adapter) == outer and not set(state.emulator) & outer and state.emulator
    assert len(state.alignment) == 2  # at the start, and again in round 2
    rows = run.ledger.drain()
    for name, card in run.cards.items():
        up = sum(run.algorithm.bytes_up(card.layers[layer], card) for layer in outer)
        sent = {(r["round"], r["kind"], r["direction"]): r["payload"] for r in rows if r["client"] == name}
        assert sent[1, "message", "up"] == sent[2, "message", "up"] == sent[2, "message", "down"] == up
        factors = sum(term.B.numel() + term.A.numel() for term in state.emulator.values()) * 4
        assert sent[1, "setup", "down"] == factors and (2, "setup", "down") not in sent


def test_clients_train_the_adapter_alone_and_are_drawn_to_what_they_received() -> None:
    """The distance is 0 at the first step, and mu times that of merged adapters afterwards."""
    members = [replace(card, layers=TALL) for card in cards({"a": 2, "b": 2})]
    algorithm = FedBiOT(outer=2, mu=0.3, align=0)
    seen = []

    def local(client: Any, download: Any) -> Any:
        program = FedBiOT.local(algorithm, client, download)
        fit = next(program)
        seen.append((fit, download))
        try:
            program.send((yield fit))
        except StopIteration as stop:
            return stop.value

    watched = type("Watched", (FedBiOT,), {"local": lambda self, client, download: local(client, download)})
    before = FedBiOT(outer=2, align=0)
    state = play(watched(outer=2, align=0), members, random_training(), state=started(before, members)).state
    fit, download = seen[0]
    assert fit.train == ("lora.*",) and set(fit.initial.terms) == {"lora", "shared"}
    assert set(fit.initial["lora"]) == {f"layers.{i}.q" for i in (0, 1, 6, 7)}
    assert set(fit.initial["shared"]) == {"layers.3.q"} == set(download.emulator)
    (penalty,) = fit.penalties
    stacked = type(penalty).stack([penalty], 2)
    assert float(stacked.value(Model.stack([fit.initial]))) == 0
    moved = random_training(4)("a", fit.initial)
    apart = sum(
        float((moved["lora"][name].product() - download.adapter[name].product()).square().sum())
        for name in download.adapter
    )
    assert float(stacked.value(Model.stack([moved]))) == pytest.approx(0.3 * apart, rel=1e-4)
    assert set(state.adapter) == set(download.adapter)


def started(algorithm: FedBiOT, members: list[Card]) -> Any:
    """The server's state without an alignment."""
    server = Server(("public/x",), root_key(0).fold, round=0, phase="start")
    program = algorithm.start(Federation(tuple(members), 1), server)
    try:
        next(program)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("without steps nothing is asked for")


def test_a_bottleneck_is_the_identity_at_the_start_and_its_average_is_weighted() -> None:
    members = cards({"a": 2, "b": 2})
    outcome = play(
        FedBiOT(adapter="bottleneck", bottleneck=3), members, random_training(), weights={"a": 0.75, "b": 0.25}
    )
    for term in outcome.before.adapter.values():
        assert isinstance(term, Bottleneck) and not term.down.any() and term.up.any()
    for name, term in outcome.state.adapter.items():
        a, b = (outcome.fitted[client]["bottleneck"][name] for client in "ab")
        assert torch.allclose(term.down, 0.75 * a.down + 0.25 * b.down, atol=1e-6)


def test_without_public_data_there_is_no_alignment_and_that_is_said() -> None:
    members = tuple(replace(card, layers=TALL) for card in cards({"a": 2}))
    server = Server((), root_key(0).fold, round=0, phase="start")
    with pytest.raises(ConfigError, match=r"public data.*server_data\.public"):
        next(FedBiOT().start(Federation(members, 1), server))


def test_layers_of_another_depth_are_refused_by_name() -> None:
    members = [replace(card, layers=TALL) for card in cards({"a": 2})]
    payload = play(FedBiOT(align=0), members, random_training(), state=started(FedBiOT(align=0), members)).payloads["a"]
    FedBiOT().check(payload, members[0])
    with pytest.raises(ModelError, match="client a"):
        FedBiOT().check({name: payload[name] for name in list(payload)[:2]}, members[0])
    with pytest.raises(ModelError, match="client a: a bottleneck of 64"):
        FedBiOT(adapter="bottleneck").check({}, members[0])
