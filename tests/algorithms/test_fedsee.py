"""FedSEE: extraction, contributions, who trains what, what travels, what a site uses, what it becomes in its limits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from conformance.harness import LAYERS, Outcome, cards, fading_training, play, play_phases, random_training, server
from engines.world import FAST, base, text, with_sites, world
from engines.world import play as play_run
from torch import Tensor

from coterie.algorithms import FedSEE
from coterie.algorithms.expert_pool import Common, Download, Start, Trained, routed_model
from coterie.algorithms.extraction import Pool, extracted
from coterie.algorithms.fedsee import State
from coterie.data.text import TextSet
from coterie.engines.setting import Fault, Site
from coterie.engines.sites import Volatile, load_record
from coterie.errors import ConfigError
from coterie.maths.extraction import Descent, flat, mixtures, weight_gradients
from coterie.maths.keys import root_key
from coterie.protocol import (
    Client,
    Evaluate,
    Federation,
    Fit,
    Gradient,
    LowRank,
    Memory,
    Model,
    Routed,
    Upload,
    Uploads,
    UsageDivergence,
    copied,
)
from coterie.protocol.messages import Uploaded
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.wire.codec import encode, size

WIDE = torch.float64
THREE = dict.fromkeys("abc", 2)
QUICK = FedSEE(steps=5, examples=8)


def public(*names: str, flipped: tuple[str, ...] = ()) -> dict[str, TextSet]:
    """Server data of toy tasks; in flipped ones classes are the other way round."""
    return {f"public/{name}": task(24, 50 + i, name in flipped) for i, name in enumerate(names)}


def task(count: int, seed: int, flip: bool) -> TextSet:
    made = text(count, seed)
    return replace(made, stored_labels=1 - made.stored_labels) if flip else made


def federation(algorithm: FedSEE, **options: Any) -> Any:
    return world(algorithm, (4,) * options.pop("clients", 3), server_data=public("x", "y", "z"), **options)


def rounds(algorithm: FedSEE, count: int = 2, names: dict[str, int] = THREE) -> list[Outcome]:
    return play_phases(algorithm, cards(names), random_training, count)


# Extraction.


def driven(pool: list[tuple[str, dict[str, Tensor]]], targets: list[Tensor], descent: Descent, clients: int) -> Any:
    """`extracted` on L_m(B) = ||B - B*_m||^2."""
    tasks = [f"public/{m}" for m in range(len(targets))]
    program = extracted(Pool(pool, {"w": torch.eye(2)}, 1.0), tasks, {}, clients, descent, None)
    answer: Any = None
    while True:
        try:
            asked = program.send(answer)
        except StopIteration as stop:
            return stop.value
        assert [one.data for one in asked] == tasks and all(one.wrt == ("lora.*.B",) for one in asked)
        answer = [
            {"lora.w.B": 2 * (one.model["lora"]["w"].B - target)} for one, target in zip(asked, targets, strict=True)
        ]


def test_pure_clients_of_a_squared_loss_give_back_the_tasks_experts() -> None:
    optima = [root_key(m).normal((3, 2), dtype=WIDE) for m in range(3)]
    pool = [(name, {"w": B}) for name, B in zip("abc", optima, strict=True)]
    found = driven(pool, optima, Descent(800, lr=0.03, regulariser=0.0), 3)
    for m, name in enumerate("abc"):
        assert torch.allclose(found.experts[m]["w"], optima[m], atol=1e-8)
        assert torch.allclose(found.contributions[name], torch.eye(3, dtype=WIDE)[m], atol=1e-8)


def test_one_task_and_one_client_give_the_upload_back() -> None:
    B = root_key(1).normal((3, 2))
    found = driven([("a", {"w": B})], [torch.zeros(3, 2)], Descent(), 1)
    assert torch.equal(found.experts[0]["w"], B) and found.contributions["a"].tolist() == [1.0]


def test_without_steps_the_first_experts_are_means_of_the_pool() -> None:
    blocks = [root_key(i).normal((3, 2)) for i in range(3)]
    pool = [(name, {"w": B}) for name, B in zip("aab", blocks, strict=True)]
    found = driven(pool, [torch.zeros(3, 2)] * 2, Descent(0), 2)
    expected = (blocks[0] + blocks[1]) / 4 + blocks[2] / 2
    assert all(torch.allclose(expert["w"], expected, atol=1e-6) for expert in found.experts)
    assert all(column.tolist() == pytest.approx([0.5, 0.5]) for column in found.contributions.values())


def test_the_gradient_by_a_weight_is_the_change_of_the_task_loss_in_a_network() -> None:
    """The chain rule through a whole encoder: <B_p, dL/dB>, summed over layers, against a difference of losses."""
    frozen, key, data = base(), root_key(5), public("x")["public/x"]
    shapes = {name: (layer.d_out, 2) for name, layer in frozen.layers.items()}
    A = {name: key.fold("A", name).normal((2, layer.d_in), 0.3, WIDE) for name, layer in frozen.layers.items()}
    pool = torch.stack(
        [flat({n: key.fold("B", n, p).normal(s, 0.3, WIDE) for n, s in shapes.items()}, list(shapes)) for p in range(4)]
    )
    omega = key.uniform((1, 4), 0.1, 0.5, WIDE)
    head = {name: value.double() for name, value in frozen.head.items()}
    executor = Executor({"base": frozen}, FAST, Plan(dtype="float64"))

    def answered(weights: Tensor, request: type) -> Any:
        row, start, lora = mixtures(weights, pool)[0], 0, {}
        for name, shape in shapes.items():
            end = start + shape[0] * shape[1]
            lora[name] = LowRank(row[start:end].view(shape), A[name], 2.0)
            start = end
        asked = (
            Evaluate(Model(lora=lora), "d") if request is Evaluate else Gradient(Model(lora=lora), "d", ("lora.*.B",))
        )
        (done,) = executor.answer([Ask("server", asked, "base", head, data, key)])
        assert isinstance(done, Done), done
        return done.answer

    gradient = answered(omega, Gradient)
    found = weight_gradients(flat({n: gradient[f"lora.{n}.B"] for n in shapes}, list(shapes))[None], pool)
    for p in range(4):
        step = torch.zeros_like(omega)
        step[0, p] = 1e-5
        numerical = (answered(omega + step, Evaluate).loss - answered(omega - step, Evaluate).loss) / 2e-5
        assert float(found[0, p]) == pytest.approx(numerical, rel=1e-5, abs=1e-9)


def test_a_drawn_sample_of_the_servers_examples_is_another_one_at_each_request() -> None:
    frozen, data = base(), public("x")["public/x"]
    executor, root = Executor({"base": frozen}, FAST, Plan()), root_key(2)
    model = Model(lora={n: LowRank(torch.ones(s.d_out, 1), torch.ones(1, s.d_in)) for n, s in frozen.layers.items()})

    def of(examples: int | None, key: int) -> dict[str, Tensor]:
        asked = Gradient(model, "d", ("lora.*.B",), examples=examples)
        (done,) = executor.answer([Ask("server", asked, "base", frozen.head, data, root.fold(key))])
        assert isinstance(done, Done), done
        return done.answer  # type: ignore[return-value]

    first, second, again = of(8, 0), of(8, 1), of(8, 0)
    assert all(torch.equal(first[n], again[n]) for n in first) and any(
        not torch.equal(first[n], second[n]) for n in first
    )
    chosen = data.select(root.fold(0).choice(len(data), 8))
    whole = Gradient(model, "d", ("lora.*.B",))
    (done,) = executor.answer([Ask("server", whole, "base", frozen.head, chosen, root)])
    assert isinstance(done, Done) and all(torch.equal(done.answer[n], first[n]) for n in first)  # type: ignore[index]
    assert all(torch.equal(v, of(99, 3)[n]) for n, v in of(None, 4).items())


# A client's half.


def test_the_first_round_trains_one_adapter_and_keeps_the_mean_of_a() -> None:
    first, second, third = rounds(QUICK)
    assert all(
        isinstance(download, Start) and size(first.bodies[n]).payload == 0 for n, download in first.downloads.items()
    )
    for name in LAYERS:
        mean = torch.stack([first.payloads[client][name].A.double() for client in THREE]).mean(dim=0)
        assert torch.allclose(first.state.A[name].double(), mean, atol=1e-6)
        assert torch.equal(second.state.A[name], first.state.A[name]) and torch.equal(
            third.downloads["a"].A[name], first.state.A[name]
        )


def test_experts_are_convex_combinations_of_the_pool_with_the_contributions_kept() -> None:
    outcome = rounds(QUICK)[0]
    state: State = outcome.state
    assert set(state.contributions) == set(THREE) and len(state.experts) == 3
    weights = torch.stack([state.contributions[name] for name in THREE], dim=1)
    assert torch.allclose(weights.sum(dim=1), torch.ones(3, dtype=WIDE), atol=1e-9)
    for m, expert in enumerate(state.experts):
        for name in LAYERS:
            mixed = sum(weights[m, i] * outcome.payloads[c][name].B.double() for i, c in enumerate(THREE))
            assert torch.allclose(expert[name].double(), mixed, atol=1e-5)  # type: ignore[arg-type]


def test_a_client_trains_its_active_experts_router_and_shared_pair_alone() -> None:
    algorithm = replace(QUICK, training=2, tau=0.0)
    entered: list[dict[str, Model]] = []

    def kept_training(number: int) -> Any:
        entered.append({})

        def trained(name: str, model: Model) -> Model:
            entered[-1][name] = model
            return random_training(number)(name, model)

        return trained

    _, second, third = play_phases(algorithm, cards(THREE), kept_training)
    for outcome, starts in ((second, entered[1]), (third, entered[2])):
        for client in THREE:
            start = starts[client]
            download, payload = outcome.downloads[client], outcome.payloads[client]
            assert isinstance(download, Download) and isinstance(payload, Trained)
            active = download.assignment.active
            assert len(active) == 2 and tuple(payload.blocks) == active
            for name in LAYERS:
                term = outcome.fitted[client]["experts"][name]
                assert isinstance(term, Routed) and len(term.A) == 1
                assert torch.equal(term.A[0], download.A[name])
                for m in range(3):
                    moved = not torch.equal(term.B[m], download.experts[m][name])
                    assert moved == (m in active)
                assert torch.equal(payload.common.router[name], term.router)
                for pick in (
                    lambda model, name=name: model["experts"][name].router,
                    lambda model, name=name: model["experts"][name].bias,
                    lambda model, name=name: model["shared"][name].B,
                    lambda model, name=name: model["shared"][name].A,
                ):
                    assert not torch.equal(pick(outcome.fitted[client]), pick(start))
                assert torch.equal(payload.common.shared[name].B, outcome.fitted[client]["shared"][name].B)


def test_later_rounds_start_from_the_means_of_routers_and_shared_pairs() -> None:
    _, second, third = rounds(QUICK)
    assert second.downloads["a"].common is None and isinstance(third.downloads["a"].common, Common)
    for name in LAYERS:
        for pick in (
            lambda common, name=name: common.router[name],
            lambda common, name=name: common.bias[name],
            lambda common, name=name: common.shared[name].B,
            lambda common, name=name: common.shared[name].A,
        ):
            mean = torch.stack([pick(second.payloads[c].common).double() for c in THREE]).mean(dim=0)
            assert torch.allclose(pick(third.downloads["b"].common).double(), mean, atol=1e-6)


def asks(algorithm: FedSEE, download: Any, phase: str = "main") -> Fit:
    """What a client's program asks for first."""
    card = cards({"a": 2})[0]
    client = Client(card, Memory({}, copied), ("train",), root_key(1).fold, 2, phase)
    request = next(algorithm.local(client, download))  # type: ignore[arg-type]
    assert isinstance(request, Fit)
    return request


def test_a_fit_has_the_routers_own_rate_and_the_calibration_and_the_first_its_own_length() -> None:
    outcome = rounds(QUICK)[2]
    download = outcome.downloads["a"]
    fit = asks(replace(QUICK, router_lr=7.0), download)
    assert dict(fit.lr_scale) == {"experts.*.router": 7.0, "experts.*.bias": 7.0}
    assert fit.epochs is None and fit.head is True and fit.data == "train"
    (penalty,) = fit.penalties
    assert isinstance(penalty, UsageDivergence) and penalty.weight == 1e-3
    assert penalty.target.tolist() == pytest.approx(list(download.assignment.target))
    assert list(asks(replace(QUICK, calibration="none"), download).penalties) == []
    first = asks(replace(QUICK, init_epochs=5), Start(root_key(3)), "init")
    assert first.epochs == 5 and first.train == ("lora.*",)


def test_experts_are_extracted_beside_the_base_alone_and_later_beside_the_shared_pair() -> None:
    first, second, _ = rounds(QUICK)
    members = {card.id: card for card in cards(THREE)}
    for outcome, phase in ((first, "init"), (second, "main")):
        uploads = Uploads([Uploaded(members[name], sent, 1.0) for name, sent in outcome.payloads.items()])
        data = ("public/x", "public/y", "public/z")
        asked = next(QUICK.aggregate(outcome.before, uploads, server(2, data, phase)))
        assert [one.data for one in asked] == list(data) and all(one.examples == 8 for one in asked)
        for one in asked:
            assert isinstance(one, Gradient) and one.batch == "all" and one.wrt == ("lora.*.B",)
            assert set(one.model.terms) == ({"lora"} if outcome is first else {"lora", "shared"})
            for name in LAYERS:
                assert torch.equal(one.model["lora"][name].A, outcome.state.A[name])
                if outcome is second:
                    shared = torch.stack([p.common.shared[name].B.double() for p in outcome.payloads.values()])
                    assert torch.allclose(one.model["shared"][name].B.double(), shared.mean(dim=0), atol=1e-6)


def started(algorithm: FedSEE) -> dict[str, Model]:
    """The model that enters each client's first main Fit."""
    seen = {}

    def keep(name: str, model: Model) -> Model:
        seen[name] = model
        return model

    first = play(algorithm, cards(THREE), random_training(), phase="init")
    play(algorithm, cards(THREE), keep, state=first.state, number=2)
    return seen


def test_first_shared_pairs_and_routers_are_each_clients_own_unless_drawn_alike() -> None:
    own, alike = started(QUICK), started(replace(QUICK, alike=True))
    for name in LAYERS:
        assert not torch.equal(own["a"]["shared"][name].A, own["b"]["shared"][name].A)
        assert torch.equal(alike["a"]["shared"][name].A, alike["b"]["shared"][name].A)
        for models in (own, alike):
            assert float(models["a"]["shared"][name].B.abs().max()) == 0.0
            assert not torch.equal(models["a"]["experts"][name].router, models["b"]["experts"][name].router)
            assert float(models["a"]["experts"][name].bias.abs().max()) == 0.0


def test_a_client_without_room_for_all_is_sent_what_it_routes_to() -> None:
    algorithm = replace(QUICK, inference=2)
    for outcome in rounds(algorithm)[1:]:
        for client, download in outcome.downloads.items():
            assert tuple(download.experts) == download.assignment.inference and len(download.experts) == 2
            term = outcome.fitted[client]["experts"]["first"]
            (absent,) = set(range(3)) - set(download.assignment.inference)
            assert term.allowed.tolist() == [m != absent for m in range(3)] and float(term.B[absent].abs().max()) == 0


def test_without_the_shared_pair_there_is_none_anywhere() -> None:
    for outcome in rounds(replace(QUICK, shared=False))[1:]:
        assert all("shared" not in model for model in outcome.fitted.values())
        assert all(payload.common.shared == {} for payload in outcome.payloads.values())


@dataclass(frozen=True)
class Watched(FedSEE):
    """The method, which keeps what entered each client's last Fit and what came out, and sites' models by round."""

    fits: dict[str, tuple[Model, Model]] = field(default_factory=dict)
    used: dict[tuple[int, str], Model] = field(default_factory=dict)

    def local(self, client: Client, download: Any) -> Any:
        program = super().local(client, download)
        request = next(program)  # type: ignore[arg-type]
        fitted = yield request
        self.fits[client.card.id] = (request.initial, fitted.model)
        with pytest.raises(StopIteration) as ended:
            program.send(fitted)  # type: ignore[union-attr]
        return ended.value.value

    def site_model(self, client: Client, download: Any) -> Model:
        model = self.used[client.round, client.card.id] = super().site_model(client, download)
        return model


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_passive_expert_gets_no_gradient_and_its_router_row_does(decay: float) -> None:
    """From the task's loss alone: without calibration, and for routers without decay, which would move them too."""
    watched = Watched(steps=5, examples=8, calibration="none")
    run = federation(watched, rounds=1, train=replace(FAST, optimizer="adamw", weight_decay=decay))
    state = play_run(run)[0].progress.state
    assert set(watched.fits) == {"c0", "c1", "c2"}
    for client, (entered, left) in watched.fits.items():
        assignment = watched.send(state, run.cards[client]).assignment  # type: ignore[union-attr]
        (active,) = assignment.active
        for name, term in left["experts"].items():
            start = entered["experts"][name]
            for m in range(3):
                assert torch.equal(start.B[m], state.experts[m][name])
                assert torch.equal(term.B[m], start.B[m]) == (m != active)
                assert decay or float((term.router[m] - start.router[m]).abs().max()) > 0


# What a site uses.


def test_a_site_uses_what_it_trained_among_the_experts_that_it_was_sent() -> None:
    store = Volatile()
    run = federation(QUICK, store=store, rounds=2)
    state = play_run(run)[1].progress.state
    client = run.setting.sites["c1"].card
    own: Trained = load_record(store, "c1").memory["trained"]

    class Site:
        card, memory = client, {"trained": own}

        @staticmethod
        def key(purpose: str) -> Any:
            return root_key(0).fold(purpose)

    download = QUICK.send(state, client)
    assert isinstance(download, Download)
    download = replace(download, A=state.A)
    model = QUICK.site_model(Site, download)  # type: ignore[arg-type]
    for name, term in model["experts"].items():
        for m in range(3):
            expected = own.blocks[m][name] if m in own.blocks else state.experts[m][name]
            assert torch.equal(term.B[m], expected)
        assert torch.equal(term.router, own.common.router[name])
        assert torch.equal(model["shared"][name].B, own.common.shared[name].B)
    assert QUICK.global_model(state) is None


def test_a_site_whose_training_failed_is_scored_with_this_rounds_download_and_what_it_trained_before() -> None:
    watched, store = Watched(steps=5, examples=8), Volatile()
    play_run(federation(QUICK, rounds=1, store=store, head="frozen"))
    own: Trained = load_record(store, "c1").memory["trained"]
    run = federation(watched, rounds=2, faults=(Fault("c1", 3, "exception"),), head="frozen")
    played = play_run(run)
    state, used = played[1].progress.state, watched.used[3, "c1"]
    (active,) = own.blocks
    for name, term in used["experts"].items():
        for m in range(3):
            assert torch.equal(term.B[m], own.blocks[m][name] if m == active else state.experts[m][name])
        assert not torch.equal(term.B[active], state.experts[active][name])
        assert torch.equal(term.router, own.common.router[name]) and torch.equal(term.bias, own.common.bias[name])
        assert torch.equal(used["shared"][name].B, own.common.shared[name].B)
    figures = played[2].metrics["personal"]["clients"]["accuracy"]
    assert set(figures) == {"c0", "c1", "c2"}
    head, data = run.setting.heads["base"], run.setting.sites["c1"].data["test"]
    (done,) = run.executor.answer([Ask("c1", Evaluate(used, "test"), "base", head, data, root_key(0))])
    assert isinstance(done, Done) and figures["c1"] == done.answer.accuracy, done  # type: ignore[union-attr]


# Whole runs.


def test_clients_in_one_stack_end_where_they_end_one_by_one() -> None:
    """In fp32, with dropout and calibration, clients of other masks and active experts; bit for bit."""
    train = replace(FAST, optimizer="adamw", lr=1e-2, dropout=0.1, batch_size=8)
    for algorithm in (QUICK, replace(QUICK, inference=2, training=2, tau=0.0, beta=0.1)):
        one, three = (
            play_run(federation(algorithm, train=train, plan=Plan(clients_per_step=size, padding_rank=4)))
            for size in (1, 3)
        )
        assert encode(one[-1].progress.state) == encode(three[-1].progress.state)


def test_partial_participation_keeps_the_columns_of_those_who_stay_away() -> None:
    run = federation(QUICK, clients=4, sample=2, rounds=4)
    before = None
    for played in play_run(run):
        state = played.progress.state
        if before is not None:
            for name in state.contributions:
                answered = name in played.metrics["answered"]
                assert torch.equal(state.contributions[name], before.contributions[name]) != answered
        assert all(float(c.sum()) == pytest.approx(3 / 4, abs=1e-3) for c in state.contributions.values())
        before = state


def test_who_missed_the_first_round_joins_with_even_contributions() -> None:
    run = federation(QUICK, faults=(Fault("c1", 1, "exception"), Fault("c1", 2, "exception")), rounds=3)
    played = play_run(run)
    assert set(played[0].progress.state.contributions) == {"c0", "c2"}
    assert set(played[1].progress.state.contributions) == {"c0", "c2"}
    assert set(played[2].progress.state.contributions) == {"c0", "c1", "c2"}


def test_if_the_first_round_failed_for_all_it_is_made_up_for() -> None:
    faults = tuple(Fault(f"c{i}", 1, "exception") for i in range(3))
    played = play_run(federation(QUICK, faults=faults, rounds=2, min_replies=0))
    assert played[0].progress.state.A == {} and played[1].progress.state.A != {}
    assert played[2].progress.state.common is not None


def test_contributions_tell_clients_tasks_apart() -> None:
    """Two tasks of opposite classes, two clients of each: most of what a client contributes is to its own task."""
    run = world(FedSEE(), (4,) * 4, server_data=public("x", "y", flipped=("y",)), rounds=2, head="frozen")
    run = replace_data(run, {"c0": False, "c1": True, "c2": False, "c3": True})
    run.executor.settings = TrainSettings(optimizer="adamw", lr=1e-2, batch_size=8, steps=20)
    state = play_run(run)[-1].progress.state
    for name, flipped in {"c0": 0, "c1": 1, "c2": 0, "c3": 1}.items():
        share = state.contributions[name] / state.contributions[name].sum()
        assert float(share[flipped]) > 0.75, state.contributions


def replace_data(run: Any, flips: dict[str, bool]) -> Any:
    sites = {
        name: Site(site.card, {"train": task(40, 10 + i, flips[name]), "test": task(20, 90 + i, flips[name])})
        for i, (name, site) in enumerate(run.setting.sites.items())
    }
    return with_sites(run, sites)


# Limits.


def test_one_task_without_a_shared_pair_is_ffa_lora_with_a_learned_a() -> None:
    """M = 1: routing is constant, a client trains B alone on the common A, and one client's expert is its upload."""
    store = Volatile()
    algorithm = FedSEE(steps=3, examples=8, shared=False)
    train = replace(FAST, optimizer="adamw", lr=1e-2, clip=1.0, weight_decay=0.01)
    run = world(algorithm, (4,), store=store, server_data=public("x"), rounds=2, train=train, head="frozen")
    first, second, _ = play_run(run)
    state = first.progress.state
    site = run.setting.sites["c0"]
    start = {name: LowRank(B, state.A[name], 2.0) for name, B in state.experts[0].items()}
    request = Fit(Model(lora=start), train=("lora.*.B",), head=False)
    key = run.root.fold("request", 2, "c0").fold("Fit", 0)
    head = run.setting.heads["base"]
    (done,) = run.executor.answer([Ask("c0", request, "base", head, site.data["train"], key)])
    assert isinstance(done, Done), done
    for name, term in done.answer.model["lora"].items():  # type: ignore[union-attr]
        assert torch.allclose(second.progress.state.experts[0][name], term.B, atol=1e-6)
        assert torch.equal(second.progress.state.A[name], state.A[name])
    assert second.progress.state.contributions["c0"].tolist() == [1.0]


def test_one_task_extracts_the_convex_combination_that_its_public_examples_like() -> None:
    """M = 1, two clients, one of the opposite task: independent weights leave it out, balanced ones cannot."""
    data = public("x")
    flips, train = {"c0": False, "c1": True}, TrainSettings(optimizer="adamw", lr=1e-2, batch_size=8, steps=20)
    shares = {}
    for balanced_ in (True, False):
        run = world(FedSEE(balanced=balanced_, shared=False), (4, 4), server_data=data, rounds=2, head="frozen")
        run = replace_data(run, flips)
        run.executor.settings = train
        shares[balanced_] = play_run(run)[-1].progress.state.contributions
    assert float(shares[False]["c0"]) > 0.8 and float(shares[True]["c0"]) == pytest.approx(0.5, abs=1e-6)


def test_equal_experts_make_the_router_of_no_consequence() -> None:
    download: Download = rounds(QUICK)[2].downloads["a"]
    assert download.common is not None
    same = replace(download, experts=dict.fromkeys(download.experts, download.experts[0]))
    term = routed_model(cards({"a": 2})[0], same, download.common)["experts"]["second"]
    x = root_key(3).normal((5, LAYERS["second"].d_in))
    assert torch.allclose(term.apply(x), LowRank(same.experts[0]["second"], same.A["second"], 2.0).apply(x), atol=1e-5)


# What travels, and what is refused.


def test_a_global_travels_once_to_each_client() -> None:
    first, second, third = rounds(QUICK)
    held = sum(2 * layer.d_in for layer in LAYERS.values()) * 4
    setup = {n: size(second.downloads[n]).payload - size(second.bodies[n]).payload for n in THREE}
    assert set(setup.values()) == {held}
    assert first.downloads["a"].init_key is not None and third.bodies["a"].A is not None


def test_too_little_at_the_server_or_other_tasks_than_it_has_are_refused() -> None:
    members = cards(THREE)
    with pytest.raises(ConfigError, match="no public examples at all"):
        FedSEE().start(Federation(tuple(members), 1), server(1, ("unlabeled",)))
    data = ("public/sst2", "public/qnli", "unlabeled")
    with pytest.raises(ConfigError, match="of 'sst3'; did you mean 'sst2'"):
        FedSEE(tasks=("sst3",)).start(Federation(tuple(members), 1, data), server(1, data))
    assert FedSEE().start(Federation(tuple(members), 1, data), server(1, data)).tasks == ("public/qnli", "public/sst2")
    chosen = FedSEE(tasks=("sst2",)).start(Federation(tuple(members), 1, data), server(1, data))
    assert chosen.tasks == ("public/sst2",)
    with pytest.raises(ConfigError, match="client a: it would train 2 of the 1 experts"):
        FedSEE(inference=1, training=2).start(Federation(tuple(members), 1, data), server(1, data))


def test_values_that_cannot_be_meant_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"smoothing": 0.0}, {"smoothing": 1.1}, {"tau": 1.0}, {"beta": -1.0}]
    for options in [*wrong, {"steps": -1}, {"examples": 0}, {"inference": 0}, {"training": 0}]:
        with pytest.raises(ValueError, match=f"{next(iter(options))} "):
            FedSEE(**options)


def test_an_upload_for_another_number_of_experts_is_left_out() -> None:
    first, second, _ = rounds(QUICK)
    members = cards(THREE)
    wide = {name: torch.cat([router, router]) for name, router in second.payloads["c"].common.router.items()}
    bias = {name: torch.zeros(6) for name in LAYERS}
    other = replace(second.payloads["c"], common=replace(second.payloads["c"].common, router=wide, bias=bias))
    QUICK.check(other, members[2])
    outcome = play(
        QUICK,
        members,
        fading_training(2),
        state=first.state,
        number=2,
        tamper=lambda name, payload: other if name == "c" else payload,
    )
    column = outcome.state.contributions
    assert torch.equal(column["c"], first.state.contributions["c"])
    assert not torch.equal(column["a"], first.state.contributions["a"])


@pytest.mark.parametrize("odd", [1, 2, 3])
def test_a_client_that_sends_what_another_phase_asks_for_is_left_out_alone(odd: int) -> None:
    """An adapter in a main round, or trained experts in the first; the others' round is as if it had been away."""

    class Odd(FedSEE):
        def local(self, client: Client, download: Any) -> Any:
            upload = yield from super().local(client, download)
            if (client.card.id, client.round) != ("c1", odd):
                return upload
            card = client.card
            B = {name: torch.ones(layer.d_out, card.rank) for name, layer in card.layers.items()}
            A = {name: torch.ones(card.rank, layer.d_in) for name, layer in card.layers.items()}
            pair = {name: LowRank(B[name], A[name], card.scale) for name in card.layers}
            router = {name: torch.ones(3, layer.d_in) for name, layer in card.layers.items()}
            sent = Trained({0: B}, Common(pair, router, dict.fromkeys(card.layers, torch.zeros(3))))
            return Upload(sent if odd == 1 else pair)

    options: dict[str, Any] = {"rounds": 2, "head": "frozen"}
    played = play_run(federation(Odd(steps=5, examples=8), **options))
    away = play_run(federation(QUICK, faults=(Fault("c1", odd, "exception"),), **options))
    assert encode(played[odd - 1].progress.state) == encode(away[odd - 1].progress.state)
    assert set(played[-1].progress.state.contributions) == {"c0", "c1", "c2"}


def test_a_round_in_which_all_send_what_another_phase_asks_for_changes_nothing() -> None:
    first, second, _ = rounds(QUICK)
    members = cards(THREE)
    for state, sent, phase in ((first.before, second.payloads, "init"), (first.state, first.payloads, "main")):
        uploads = Uploads([Uploaded(card, sent[card.id], 1.0) for card in members])
        program = QUICK.aggregate(state, uploads, server(2, phase=phase))
        with pytest.raises(StopIteration) as stopped:
            next(program)  # type: ignore[arg-type]
        assert stopped.value.value is state
