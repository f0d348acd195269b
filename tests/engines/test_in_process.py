"""The engine: what it books, whom it leaves out, what it keeps, and that its plan changes nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from coterie.algorithms import METHODS, FedIT, FedPALoRA, FlexLoRA, FLoRA, LocalOnly
from coterie.engines.in_process import InProcess, Played
from coterie.engines.setting import Fault, Measuring
from coterie.engines.sites import Volatile, load_record
from coterie.errors import RunError
from coterie.protocol import (
    Card,
    Client,
    Evaluate,
    Fit,
    Model,
    Phase,
    Server,
    Term,
    Upload,
    Uploads,
    as_adapters,
    map_tensors,
)
from coterie.training.asks import Plan, TrainSettings
from coterie.wire.codec import decode, encode
from engines.throwaway import TwoStage
from engines.world import FAST, base, dense, play, text, with_sites, world

EVERY = [pytest.param(made, id=name) for name, made in sorted(METHODS.items())] + [
    pytest.param(TwoStage, id="two-stage"),
]
WITH_CLIENTS = [one for one in EVERY if not one.values[0].traits.pools_data]


WHOLE = {"pruning": 0.0, "growth": 0.0, "down_pruning": 0.0}
SMALL: dict[str, dict[str, Any]] = {
    "FedSEE": {"steps": 5, "examples": 8},
    "FedSRD": WHOLE,
    "FedSRD-e": WHOLE,
}
"""Options at layers of this size: of so few entries, last bits say which are kept, and a sparse factor is singular; a
short extraction."""


def engine(made: Any, **options: Any) -> InProcess:
    if issubclass(made, TwoStage):
        options.setdefault("server_data", {"public/toy": text(16, seed=50)})
    if made.traits.server_data:
        public = {f"public/{name}": text(16, seed=50 + i) for i, name in enumerate("xy")}
        unlabeled = text(8, seed=60)
        hidden = replace(unlabeled, stored_labels=torch.full_like(unlabeled.stored_labels, -1))
        options.setdefault("server_data", public | {"unlabeled": hidden})
    if made.traits.pools_data:
        options.setdefault("card", {"groups": ("x", "y")})
    if made.traits.ranks == "equal":
        options["ranks"] = (4,) * len(options.get("ranks", (2, 4, 16)))
    return world(made(**SMALL.get(made.traits.title, {})), **options)


BARE = Measuring(every=99, clients_every=99, objective_examples=0, mismatch=False)
"""For tests that look at what a run trains, not at its figures."""


@cache
def plain(made: Any) -> tuple[InProcess, list[Played]]:
    """A run of two main rounds with nothing special. Read only."""
    run = engine(made, rounds=2)
    return run, play(run)


@pytest.mark.parametrize("made", EVERY)
def test_neither_strict_mode_nor_the_order_in_which_clients_are_listed_changes_a_bit(made: Any) -> None:
    _, expected = plain(made)
    strict = engine(made, rounds=2, strict=True)
    found = play(with_sites(strict, dict(reversed(list(strict.setting.sites.items())))))
    assert [p.metrics for p in found] == [p.metrics for p in expected]
    assert encode(found[-1].progress.state, dense=True) == encode(expected[-1].progress.state, dense=True)


@pytest.mark.parametrize("made", WITH_CLIENTS)
def test_a_client_that_fails_is_left_out_and_recorded(made: Any) -> None:
    faults = (Fault("c1", 2, "exception"),)
    played = play(engine(made, faults=faults, measuring=BARE))
    assert played[1].metrics["failed"] == {"c1": "rehearsed fault: the site raised"}
    assert played[1].metrics["answered"] == ["c0", "c2"]
    assert played[2].metrics["failed"] == {}


@pytest.mark.parametrize("kind", ["nan", "shape"])
def test_an_upload_that_is_not_sound_is_refused_and_not_committed(kind: Any) -> None:
    store = Volatile()
    run = world(FedPALoRA(), store=store, faults=(Fault("c1", 1, kind),), rounds=1)
    played = play(run)[0]
    assert "c1" in played.metrics["failed"]["c1"]
    assert load_record(store, "c1").memory == {}
    assert set(load_record(store, "c0").memory) == {"factors"}
    for term in played.progress.state.reference.values():
        assert bool(torch.isfinite(term.B).all())


def test_a_late_round_stays_at_the_site_and_is_recorded() -> None:
    store = Volatile()
    played = play(world(FedPALoRA(), store=store, faults=(Fault("c1", 1, "late"),), rounds=1))[0]
    assert played.metrics["late"] == ["c1"] and played.metrics["answered"] == ["c0", "c2"]
    assert set(load_record(store, "c1").memory) == {"factors"}


class StayingHome(FedIT):
    """A last phase in which nothing leaves a client: c0 and c1 let something go all the same, c2 does not."""

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase("main", rounds), Phase("home", 1, clients="all", uploads=False)]

    def local(self, client: Client, download: Any) -> Any:
        if client.phase == "main":
            return (yield from super().local(client, download))
        fitted = yield Fit(Model(lora=download), head=client.card.id == "c1")
        return Upload(fitted.model["lora"] if client.card.id == "c0" else None)

    def aggregate(self, state: Any, uploads: Uploads, server: Server) -> Any:
        return super().aggregate(state, uploads, server) if server.phase == "main" else state

    def check(self, payload: Any, card: Card) -> None:
        if payload is not None:
            super().check(payload, card)


@pytest.mark.parametrize("head", ["averaged", "local", "frozen"])
def test_what_would_leave_a_client_in_a_phase_without_uploads_is_refused(head: Any) -> None:
    run = world(StayingHome(), rounds=1, head=head)
    before, home = play(run)
    refused = {"c0": ("a payload", "return Upload(None)")}
    if head == "averaged":
        refused["c1"] = ("its trained head", "give Fit head=False")
    assert home.metrics["failed"] == {
        name: f"client {name}: {what} would leave it in phase 'home', which uploads nothing; {instead}"
        for name, (what, instead) in refused.items()
    }
    assert home.metrics["answered"] == sorted({"c0", "c1", "c2"} - set(refused))
    assert not [row for row in run.ledger.rows() if row["round"] == 2 and row["direction"] == "up"]
    assert encode(home.progress.heads) == encode(before.progress.heads)


def test_too_few_answers_end_the_run_with_the_reasons() -> None:
    faults = tuple(Fault(name, 2, "exception") for name in ("c0", "c1"))
    run = world(FedIT(), faults=faults, min_replies=2)
    rounds = run.rounds(run.begin())
    assert next(rounds).metrics["answered"] == ["c0", "c1", "c2"]
    with pytest.raises(RunError, match=r"round 2: 1 of 3 clients answered.*c0: rehearsed fault"):
        next(rounds)


def test_the_ledger_books_the_methods_formula_and_tells_kinds_apart() -> None:
    algorithm = FedPALoRA()
    run = world(algorithm, rounds=2)
    play(run)
    rows = run.ledger.drain()
    head = sum(value.numel() * 4 for value in base().head.values())
    for name, card in run.cards.items():
        up = sum(algorithm.bytes_up(layer, card) for layer in card.layers.values())
        down = sum(algorithm.bytes_down(layer, card) for layer in card.layers.values())
        for number in (1, 2):
            mine = [row for row in rows if row["client"] == name and row["round"] == number]
            booked = {(row["kind"], row["direction"]): row["payload"] for row in mine if row["kind"] != "evaluation"}
            expected = {
                ("message", "up"): up,
                ("message", "down"): down,
                ("head", "up"): head,
                ("head", "down"): head,
            }
            assert booked == expected | ({("setup", "down"): 8} if number == 1 else {})
    assert any(row["kind"] == "evaluation" for row in rows)
    assert all(row["overhead"] > 0 for row in rows)


@pytest.mark.parametrize("made", EVERY)
def test_going_on_from_any_round_changes_no_bit(made: Any) -> None:
    """Also with partial participation and a client that failed on the way."""
    options: dict[str, Any] = {"ranks": (2, 4, 4), "sample": 2, "faults": (Fault("c1", 2, "exception"),)}
    store = Volatile()
    run = engine(made, store=store, **options)
    whole = [
        (played.metrics, encode(played.progress, dense=True), copy.deepcopy(store))
        for played in run.rounds(run.begin())
    ]
    _, progress, then = copy.deepcopy(whole[0])
    for metrics, expected, kept in whole[1:]:  # one round by every engine
        again = engine(made, store=then, **options)
        played = next(again.rounds(decode(progress)))
        progress = encode(played.progress, dense=True)
        assert played.metrics == metrics and progress == expected
        assert {name: encode(load_record(then, name)) for name in run.cards} == {
            name: encode(load_record(kept, name)) for name in run.cards
        }


@pytest.mark.parametrize(
    ("made", "optimizer"),
    [
        # AdamW has all that the others have; the rest is for `make slow`, but for one method.
        pytest.param(*one.values, optimizer, id=f"{one.id}-{optimizer}", marks=() if quick else pytest.mark.slow)
        for one in EVERY
        for optimizer in ("sgd", "momentum", "adam", "adamw")
        for quick in [optimizer == "adamw" or one.id == "fedpa-lora"]
    ],
)
def test_stacked_equals_sequential_to_1e_10_in_fp64(made: Any, optimizer: str) -> None:
    train = replace(
        FAST,
        optimizer="sgd" if optimizer == "momentum" else optimizer,
        momentum=0.9 if optimizer == "momentum" else 0.0,
        lr=0.1 if optimizer in ("sgd", "momentum") else 1e-3,
        dropout=0.1,
        clip=1.0,
        weight_decay=0.01,
    )
    # Answers come back in the factors' own dtype: fp64 here, since fp32 would hide 1e-10.
    models = []
    for clients in (1, 3):
        plan = Plan(dtype="float64", clients_per_step=clients, padding_rank=16 if clients == 3 else 0)
        run = engine(_in_double(made), plan=plan, train=train, rounds=2, measuring=BARE)
        state = play(run)[-1].progress.state
        models.append(_products(run, state))
    assert models[0].keys() == models[1].keys() and models[0]
    for name, product in models[0].items():
        assert float((product - models[1][name]).abs().max()) <= 1e-10
        assert float(product.abs().max()) > 1e-4


@pytest.mark.parametrize("made", EVERY)
def test_stacked_equals_sequential_to_1e_5_in_fp32_with_sgd(made: Any) -> None:
    one, alone = plain(made)
    stack = engine(made, plan=Plan(clients_per_step=3, padding_rank=16), rounds=2, measuring=BARE)
    expected = _products(one, alone[-1].progress.state)
    found = _products(stack, play(stack)[-1].progress.state)
    assert expected.keys() == found.keys() and expected
    for name, product in expected.items():
        assert float((product - found[name]).abs().max()) <= 1e-5


def test_adding_an_evaluation_moves_no_batch() -> None:
    class Curious(FedIT):
        def local(self, client: Client, download: Any) -> Any:
            yield Evaluate(Model(lora=download), "train")
            fitted = yield Fit(Model(lora=download))
            return Upload(fitted.model["lora"])

    plain, curious = play(world(FedIT())), play(world(Curious()))
    assert encode(plain[-1].progress.state) == encode(curious[-1].progress.state)


def test_sampling_depends_on_the_round_alone_and_absent_clients_keep_their_state() -> None:
    store = Volatile()
    run = world(FedPALoRA(), ranks=(2, 2, 4, 4, 8), store=store, sample=2, rounds=4)
    kept: dict[str, bytes] = {}
    cohorts = []
    for played in run.rounds(run.begin()):
        cohort = played.metrics["cohort"]
        cohorts.append(cohort)
        for name in run.cards:
            now = encode(load_record(store, name).memory)
            if name not in cohort:
                assert now == kept.get(name, encode({}))
            kept[name] = now
    assert all(len(cohort) == 2 for cohort in cohorts) and len({tuple(c) for c in cohorts}) > 1
    assert cohorts == [p.metrics["cohort"] for p in play(world(FedIT(), ranks=(2, 2, 4, 4, 8), sample=2, rounds=4))]


def test_a_program_without_its_yield_is_named() -> None:
    class Forgetful(FedIT):
        def local(self, client: Client, download: Any) -> Any:
            fitted: Any = Fit(Model(lora=download))
            return Upload(fitted.model["lora"])

    class Idle(FedIT):
        def local(self, client: Client, download: Any) -> Any:
            return Upload(download)

    with pytest.raises(RunError, match="has no attribute 'model'"):
        play(world(Forgetful()))
    with pytest.raises(RunError, match="without any answered Fit; is a `yield` missing"):
        play(world(Idle()))


def test_local_heads_never_travel_and_averaged_ones_do() -> None:
    for policy, travels in (("local", False), ("frozen", False), ("averaged", True)):
        store = Volatile()
        run = world(FedIT(), head=policy, store=store, rounds=1)
        played = play(run)
        kinds = {row["kind"] for row in run.ledger.rows()}
        assert ("head" in kinds) == travels
        assert (load_record(store, "c0").head is not None) == (policy == "local")
        trained = played[-1].progress.heads["base/all"]
        same = all(torch.equal(trained[name], value) for name, value in base().head.items())
        assert same == (policy != "averaged")


def test_local_only_keeps_its_heads_whatever_the_experiment_says() -> None:
    store = Volatile()
    run = world(LocalOnly(), head="averaged", store=store)
    play(run)
    assert {row["kind"] for row in run.ledger.rows()} == {"setup", "message", "evaluation"}
    assert sum(row["payload"] for row in run.ledger.rows()) == 3 * 8
    heads = [load_record(store, name).head for name in run.cards]
    assert all(head is not None for head in heads)
    assert not torch.equal(heads[0]["classifier.weight"], heads[1]["classifier.weight"])


def test_fedpa_initialisation_mismatch_is_exactly_zero_and_flexlora_s_is_not() -> None:
    assert [p.metrics.get("init_mismatch") for p in play(world(FedPALoRA()))] == [None] + [{"B": 0.0, "A": 0.0}] * 2
    assert all(p.metrics["init_mismatch"]["B"] > 0.01 for p in play(world(FlexLoRA()))[1:])


def test_fedpa_without_regularisation_equals_local_training_bit_for_bit() -> None:
    stores = {}
    for algorithm in (FedPALoRA(lam=0.0), LocalOnly()):
        stores[type(algorithm)] = Volatile()
        play(world(algorithm, store=stores[type(algorithm)], head="local"))
    for name in ("c0", "c1", "c2"):
        mine, alone = (load_record(store, name) for store in stores.values())
        assert encode(mine.memory) == encode(alone.memory)
        assert encode(mine.head) == encode(alone.head)


def test_a_large_lambda_drives_every_product_to_the_reference() -> None:
    """With lambda / 2 ||BA - X||^2 dominant, the distance to the reference of that round falls by orders."""
    train = TrainSettings(
        optimizer="adam", lr=1e-2, schedule="linear", batch_size=4, steps=120, weight_decay=0.0, clip=None
    )
    network, apart = base(), {}
    for lam in (0.0, 1e4):
        store = Volatile()
        plan = Plan(clients_per_step=3, padding_rank=16)
        fields: dict[str, Any] = {"train": train, "store": store, "network": network, "plan": plan}
        run = world(FedPALoRA(lam=lam), (4, 4, 16), rounds=2, head="frozen", **fields)
        first, _ = run.rounds(run.begin())
        for name in run.cards:
            own = load_record(store, name).memory["factors"]
            for layer, reference in first.progress.state.reference.items():
                target = reference.truncated(run.cards[name].rank).unscaled_product()
                apart[lam, name, layer] = float((own[layer].unscaled_product() - target).norm())
    for lam, name, layer in apart:
        if lam:
            assert apart[lam, name, layer] < 0.01 < 0.05 * apart[0.0, name, layer], (name, layer)


def test_aggregation_mismatch_vanishes_for_exact_methods_only() -> None:
    stacked, averaged = play(world(FLoRA())), play(world(FedIT()))
    assert all(p.metrics["mismatch"]["relative"] < 1e-6 for p in stacked)
    assert all(p.metrics["mismatch"]["relative"] > 1e-3 for p in averaged)


def test_a_set_up_phase_server_training_and_personal_models_run() -> None:
    store = Volatile()
    run = engine(TwoStage, store=store, rounds=2)
    played = play(run)
    assert [p.metrics["phase"] for p in played] == ["survey", "main", "main", "polish"]
    assert played[0].progress.state.sizes == {"c0": 4, "c1": 4, "c2": 4}
    assert played[-1].progress.state.polished == 3 and played[-1].metrics["cohort"] == []
    owns = [load_record(store, name).memory["own"] for name in ("c0", "c1", "c2")]
    assert all(float(own[layer].B.norm()) > 0 for own in owns for layer in own)
    assert set(played[1].metrics["personal"]["clients"]["accuracy"]) == {"c0", "c1", "c2"}
    survey = [row for row in run.ledger.rows() if row["round"] == 1 and row["direction"] == "up"]
    assert {row["payload"] for row in survey if row["kind"] == "message"} == {0}


def test_a_client_that_missed_rounds_catches_up_on_the_base_and_pays_for_it() -> None:
    store = Volatile()
    run = world(FLoRA(), store=store, rounds=3, faults=(Fault("c1", 1, "exception"), Fault("c1", 2, "exception")))
    missed = play(run)
    # The engine patches before local runs; a client that raised has not committed the newer version.
    rows = [row for row in run.ledger.rows() if row["kind"] == "base" and row["client"] == "c1"]
    layers = list(run.cards["c1"].layers.values())
    stack = {2: 2 + 16, 3: 2 + 16}
    per_round = {number: [row["payload"] for row in rows if row["round"] == number] for number in (1, 2, 3)}
    size = sum(layer.d_out + layer.d_in for layer in layers) * 4
    assert per_round[1] == []
    assert per_round[2] == [stack[2] * size]
    assert per_round[3] == [stack[2] * size, stack[3] * size]
    assert load_record(store, "c1").base_version == 2 and missed[-1].progress.state.base.version == 3


def test_the_base_holds_all_patches_in_order_after_a_restart() -> None:
    run = world(FLoRA(), rounds=3)
    first, *_, last = run.rounds(run.begin())
    again = world(FLoRA(), rounds=3, store=Volatile())
    resumed = list(again.rounds(first.progress))
    assert [p.metrics["global"] for p in resumed][-1] == last.metrics["global"]
    for name in run.cards["c0"].layers:
        assert torch.equal(run.executor.bases["base"].weight(name), again.executor.bases["base"].weight(name))


def test_measuring_less_changes_no_bit_of_the_training() -> None:
    full = play(world(FedPALoRA()))
    bare = play(world(FedPALoRA(), measuring=Measuring(every=3, clients_every=3, objective_examples=0, mismatch=False)))
    assert encode(full[-1].progress.state) == encode(bare[-1].progress.state)
    assert "global" not in bare[0].metrics and "global" in bare[-1].metrics


def test_federated_training_beats_the_untrained_model_on_the_toy_task() -> None:
    train = TrainSettings(optimizer="adamw", lr=3e-3, batch_size=8, steps=20)
    played = play(world(FedIT(), ranks=(4, 4, 4), train=train, rounds=6))
    labels = text(40, seed=999).labels
    majority = max(float(labels.double().mean()), 1 - float(labels.double().mean()))
    assert played[-1].metrics["global"]["pooled"]["accuracy"] >= majority + 0.2


def _in_double(made: Any) -> Any:
    """The same method with every Fit entered in fp64, so that its answers are not rounded to fp32."""

    class Double(made):  # type: ignore[misc]
        def local(self, client: Client, download: Any) -> Any:
            program, answer = super().local(client, download), None
            while True:
                try:
                    wanted = program.send(answer)
                except StopIteration as stop:
                    return stop.value
                answer = yield [_doubled(one) for one in wanted] if isinstance(wanted, list) else _doubled(wanted)

    return Double


def _doubled(request: Any) -> Any:
    if not isinstance(request, Fit):
        return request
    wide = map_tensors(request.initial, _double)
    penalties = [map_tensors(penalty, _double) for penalty in request.penalties]
    return replace(request, initial=wide, penalties=penalties)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _products(run: InProcess, state: Any) -> dict[str, torch.Tensor]:
    found = dict(dense(run.algorithm.global_model(state)))
    for group, adapter in getattr(state, "models", {}).items():
        found |= {f"{group}/{layer}": product for layer, product in dense(Model(lora=adapter)).items()}
    for m, expert in enumerate(getattr(state, "experts", ())):
        found |= {f"expert {m}/{layer}": B.double() for layer, B in expert.items()}
    log = getattr(state, "base", None)
    if log is not None:
        for patch in as_adapters(log.patches):
            for name, product in dense(Model(lora=patch)).items():
                found[name] = found[name] + product if name in found else product
    for name in sorted(run.cards):
        record = load_record(run.store, name)
        held = {part: kept for part, kept in record.memory.items() if isinstance(kept, dict)}
        for part, kept in held.items():
            if all(isinstance(one, Term) for one in kept.values()):
                found |= {f"{name}/{part}/{layer}": product for layer, product in dense(Model(lora=kept)).items()}
            if all(isinstance(one, torch.Tensor) for one in kept.values()):
                found |= {f"{name}/{part}/{layer}": factor.double() for layer, factor in kept.items()}
    return found
