"""What a round's line says of models: the task's metrics of one pass, further tests, validation, further models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from coterie.algorithms import Algorithm, FedIT, FedPALoRA, FedSALoRA, FLoRA, LocalOnly
from coterie.data.text import TextSet
from coterie.engines import scoring
from coterie.engines.heads import head_name
from coterie.engines.in_process import InProcess, Played
from coterie.engines.measures import spread
from coterie.engines.setting import Measuring, Site
from coterie.engines.sites import Volatile, load_record
from coterie.errors import WireError
from coterie.maths.keys import root_key
from coterie.protocol import Client, Evaluate, Model, Predict, Predictions, map_tensors
from coterie.training.asks import Ask, Done, Head
from coterie.training.evaluation import evaluate
from coterie.wire.ledger import Ledger
from engines.world import FAST, joined, play, text, with_sites, world

TELLING = replace(FAST, optimizer="adamw", lr=0.01, steps=10)
"""Training after which models differ in their answers."""

TESTS = {"other": text(25, seed=77, share=0.3), "another": text(15, seed=78, share=0.7)}
METRICS = ("matthews", "f1", "macro_f1", "accuracy")


def answers(run: InProcess, model: Model, head: Head | None, data: TextSet) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true classes, by a forward pass of its own."""
    ask = Ask("server", Predict(model, "test"), "base", head, data, root_key(0))
    (done,) = run.executor.answer([ask])
    assert isinstance(done, Done) and isinstance(done.answer, Predictions)
    return done.answer.logits.argmax(dim=1).numpy(), done.answer.labels.numpy()


def of_scikit_learn(given: np.ndarray, true: np.ndarray) -> dict[str, float]:
    return {
        "matthews": matthews_corrcoef(true, given),
        "f1": f1_score(true, given, zero_division=0),
        "macro_f1": f1_score(true, given, average="macro", zero_division=0),
        "accuracy": accuracy_score(true, given),
    }


def with_validation(run: InProcess, counts: tuple[int, ...] = (9, 0, 5)) -> InProcess:
    """The same run with so many validation examples at each site."""
    chosen = {
        name: Site(site.card, {**site.data, "validation": text(count, seed=300 + place)} if count else site.data)
        for place, ((name, site), count) in enumerate(zip(run.setting.sites.items(), counts, strict=True))
    }
    return with_sites(run, chosen)


def global_of(run: InProcess, last: Played) -> tuple[Model, Head]:
    model = run.algorithm.global_model(last.progress.state)
    assert model is not None
    return model, last.progress.heads[head_name("base", "all")]


def test_global_metrics_are_scikit_learns_on_the_same_predictions_and_the_first_is_the_score() -> None:
    run = world(FedIT(), train=TELLING, metrics=METRICS, more_tests=TESTS)
    last = play(run)[-1]
    model, head = global_of(run, last)
    found = last.metrics["global"]
    assert set(found["more"]) == set(TESTS)
    assert run.setting.pooled_test is not None
    for data, figures in [(run.setting.pooled_test, found["pooled"]), *((TESTS[n], found["more"][n]) for n in TESTS)]:
        theirs = of_scikit_learn(*answers(run, model, head, data))  # type: ignore[arg-type]
        assert list(figures) == ["loss", "accuracy", "examples", "score", "metrics"]
        assert list(figures["metrics"]) == list(METRICS) and figures["metrics"] == pytest.approx(theirs, abs=1e-12)
        assert figures["score"] == figures["metrics"]["matthews"] and figures["examples"] == len(data)
        assert figures["accuracy"] == theirs["accuracy"]
    assert len({figures["score"] for figures in [found["pooled"], *found["more"].values()]}) == 3


def test_own_scores_are_the_tasks_metric_and_accuracy_stands_beside_it() -> None:
    run = world(FedIT(), ranks=(4, 4, 4), train=TELLING, metrics=("f1", "accuracy"))
    last = play(run)[-1]
    model, head = global_of(run, last)
    expected = {
        name: of_scikit_learn(*answers(run, model, head, site.data["test"]))  # type: ignore[arg-type]
        for name, site in run.setting.sites.items()
    }
    for found in (last.metrics["personal"]["clients"], last.metrics["global"]["clients"]):
        assert found["score"] == pytest.approx({name: one["f1"] for name, one in expected.items()})
        assert found["accuracy"] == pytest.approx({name: one["accuracy"] for name, one in expected.items()})
        assert {name: found[name] for name in ("mean", "worst_50", "worst_25")} == spread(found["score"])
    assert found["score"] != found["accuracy"]


def test_all_metrics_come_from_one_forward_pass() -> None:
    counts = []
    for metrics in (("accuracy",), METRICS):
        run = world(FedIT(), metrics=metrics, rounds=1)
        seen = 0

        def counted(*_: Any) -> None:
            nonlocal seen
            seen += 1

        run.executor.bases["base"].network.register_forward_pre_hook(counted)
        play(run)
        counts.append(seen)
    assert counts[0] == counts[1] > 0


def test_without_metrics_of_its_own_a_task_is_judged_by_accuracy() -> None:
    pooled = play(world(FedIT(), rounds=1))[-1].metrics["global"]["pooled"]
    assert pooled["score"] == pooled["accuracy"] == pooled["metrics"]["accuracy"]


def test_with_local_heads_further_tests_are_means_over_sites_each_with_its_own() -> None:
    store = Volatile()
    run = world(FedIT(), (4, 4, 4), train=TELLING, head="local", metrics=("matthews",), more_tests=TESTS, store=store)
    last = play(run)[-1]
    model, _ = global_of(run, last)
    for name, data in TESTS.items():
        each = [
            of_scikit_learn(*answers(run, model, load_record(store, site).head, data))["matthews"] for site in run.cards
        ]
        assert last.metrics["global"]["more"][name]["score"] == pytest.approx(np.mean(each))
        assert last.metrics["personal"]["more"][name]["score"] == pytest.approx(np.mean(each))
        assert len(set(each)) > 1


def test_the_global_model_is_validated_with_weights_by_examples() -> None:
    run = with_validation(world(FedIT(), train=TELLING, metrics=("f1",)))
    played = play(run)
    model, head = global_of(run, played[-1])
    found = played[-1].metrics["validation"]
    scored = {}
    for name in ("c0", "c2"):
        data = run.setting.sites[name].data["validation"]
        ask = Ask("server", Evaluate(model, "validation", judged_by=("f1",)), "base", head, data, root_key(0))
        (done,) = run.executor.answer([ask])
        scored[name] = done.answer  # type: ignore[union-attr]
    assert list(found) == ["loss", "accuracy", "score", "examples"] and found["examples"] == 14
    for figure in ("loss", "accuracy", "score"):
        mean = (9 * getattr(scored["c0"], figure) + 5 * getattr(scored["c2"], figure)) / 14
        assert found[figure] == pytest.approx(mean, abs=1e-12)
    assert found["loss"] != pytest.approx((scored["c0"].loss + scored["c2"].loss) / 2, rel=1e-3)


def test_where_there_is_no_global_model_each_sites_own_is_validated() -> None:
    store = Volatile()
    run = with_validation(world(LocalOnly(), train=TELLING, store=store))
    played = play(run)
    right = 0
    for name in ("c0", "c2"):
        record = load_record(store, name)
        data = run.setting.sites[name].data["validation"]
        given, true = answers(run, Model(lora=record.memory["factors"]), record.head, data)  # type: ignore[arg-type]
        right += int((given == true).sum())
    assert played[-1].metrics["validation"]["accuracy"] == pytest.approx(right / 14)


@pytest.mark.parametrize(("made", "due"), [(FedIT, {2, 4, 5}), (LocalOnly, {3, 5})])
def test_validation_comes_with_the_model_that_it_is_of_and_in_the_last_round(made: Any, due: set[int]) -> None:
    measuring = Measuring(every=2, clients_every=3, objective_examples=0)
    played = play(with_validation(world(made(), rounds=5, measuring=measuring)))
    assert {one.metrics["round"] for one in played if "validation" in one.metrics} == due


def test_without_validation_shares_no_round_has_the_line() -> None:
    assert all("validation" not in one.metrics for one in play(world(FedIT(), rounds=2)))
    assert all("validation" not in one.metrics for one in play(world(LocalOnly(), rounds=2)))


def test_validating_changes_no_bit_of_the_training() -> None:
    plain, validated = play(world(FedPALoRA())), play(with_validation(world(FedPALoRA())))
    for one, other in zip(plain, validated, strict=True):
        assert {k: v for k, v in other.metrics.items() if k != "validation"} == one.metrics


class Kept(FedIT):
    """FedIT that also shows the untrained model, and at one site a second one."""

    def further_models(self, client: Client, download: Any) -> Mapping[str, Model]:
        zero = {name: replace(term, B=0 * term.B) for name, term in download.items()}
        found = {"untrained": Model(lora=zero)}
        return found | ({"alone": Model(lora=download)} if client.card.id == "c1" else {})


def test_further_models_are_scored_as_the_sites_own_are() -> None:
    run = world(Kept(), ranks=(4, 4, 4), train=TELLING, metrics=("f1", "accuracy"), more_tests=TESTS)
    played = play(run)
    personal = played[-1].metrics["personal"]
    assert set(personal["further"]) == {"untrained", "alone"}
    assert set(personal["further"]["alone"]["clients"]["score"]) == {"c1"}
    alone, own = personal["further"]["alone"], personal["clients"]
    assert alone["clients"]["score"]["c1"] == own["score"]["c1"]
    # Every site has the same model here, so that one site's figures are those of all.
    for one, all_ in [(alone["pooled"], personal["pooled"]), *((alone["more"][n], personal["more"][n]) for n in TESTS)]:
        assert one["metrics"] == pytest.approx(all_["metrics"]) and one["loss"] == pytest.approx(all_["loss"])
    untrained = personal["further"]["untrained"]
    _, head = global_of(run, played[-1])
    assert run.setting.pooled_test is not None
    given, true = answers(run, Model(), head, run.setting.pooled_test)  # type: ignore[arg-type]
    assert untrained["pooled"]["score"] == pytest.approx(of_scikit_learn(given, true)["f1"])
    assert untrained["pooled"]["score"] != personal["pooled"]["score"]
    assert set(untrained["clients"]["accuracy"]) == set(own["accuracy"])
    # Before the last round, sites' models are scored on their own tests alone.
    assert set(played[0].metrics["personal"]["further"]["untrained"]) == {"clients"}


def test_fedpa_shows_the_preserved_factors_beside_the_reference() -> None:
    store = Volatile()
    run = world(FedPALoRA(), train=TELLING, store=store)
    last = play(run)[-1]
    head = last.progress.heads[head_name("base", "all")]
    found = last.metrics["personal"]["further"]["preserved"]["clients"]["accuracy"]
    for name, site in run.setting.sites.items():
        own = Model(lora=load_record(store, name).memory["factors"])
        given, true = answers(run, own, head, site.data["test"])  # type: ignore[arg-type]
        assert found[name] == (given == true).mean()


def test_a_site_whose_further_models_fail_keeps_its_own_score_and_is_named() -> None:
    class Failing(FedIT):
        def further_models(self, client: Client, download: Any) -> Mapping[str, Model]:
            if client.card.id == "c1":
                raise ValueError("no second\nmodel")
            return {}

    found = play(world(Failing(), rounds=1))[-1].metrics["personal"]
    assert found["failed"] == {"c1": "ValueError: no second model"} and "further" not in found
    assert set(found["clients"]["score"]) == {"c0", "c1", "c2"}


def passes(run: InProcess) -> Counter[int]:
    """How often each data set, by its identity, is evaluated from now on."""
    found: Counter[int] = Counter()
    answer = run.executor.answer

    def counted(asks: Sequence[Ask]) -> list[Done | Exception]:
        found.update(id(ask.data) for ask in asks if isinstance(ask.request, Evaluate))
        return answer(asks)

    run.executor.answer = counted  # type: ignore[method-assign]
    return found


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no model has a name by which it could be recognised."""

    def refused(*_: object, **__: object) -> str:
        raise WireError("cannot travel")

    monkeypatch.setattr(scoring, "digest", refused)


def test_where_all_sites_use_the_global_model_it_is_scored_once_on_each_data_set() -> None:
    run = world(FedIT(), ranks=(4,) * 5, rounds=1, more_tests=TESTS)
    counts = passes(run)
    found = play(run)[-1].metrics
    assert counts[id(run.setting.pooled_test)] == 1 and {counts[id(data)] for data in TESTS.values()} == {1}
    assert {counts[id(site.data["test"])] for site in run.setting.sites.values()} == {1}
    assert {counts[id(site.data["train"])] for site in run.setting.sites.values()} == {1}
    assert found["personal"]["clients"] == found["global"]["clients"] and len(found["global"]["clients"]["score"]) == 5


def of_parts(method: Algorithm, **fields: Any) -> InProcess:
    """A round in which the pooled test is the further tests together."""
    run = world(method, (4, 4, 4), rounds=1, train=TELLING, more_tests=TESTS)
    setting = replace(run.setting, pooled_test=joined(list(TESTS.values())), **fields)
    return InProcess(setting, run.executor, Volatile(), Ledger())


@pytest.mark.parametrize("method", [FedIT(), LocalOnly()])
def test_a_pooled_test_that_further_tests_make_up_has_their_scores_and_no_pass_of_its_own(method: Algorithm) -> None:
    plain, parted = of_parts(method), of_parts(method, pooled_of=tuple(TESTS))
    counts = passes(parted)
    one, other = play(plain)[-1].metrics, play(parted)[-1].metrics
    assert counts[id(parted.setting.pooled_test)] == 0 and counts[id(TESTS["other"])] > 0
    for kind in ("global", "personal"):
        if one[kind] is not None:
            first, second = one[kind]["pooled"], other[kind]["pooled"]
            assert (first["accuracy"], first["examples"]) == (second["accuracy"], 40) and first["accuracy"] > 0.5
            assert first["loss"] == pytest.approx(second["loss"], rel=1e-6) and one[kind]["more"] == other[kind]["more"]


def test_a_limited_pooled_test_is_scored_itself_as_its_first_examples_are_not_those_of_its_parts() -> None:
    run = of_parts(FedIT(), pooled_of=tuple(TESTS), measuring=Measuring(pooled_limit=10))
    counts = passes(run)
    found = play(run)[-1].metrics
    assert counts[id(run.setting.pooled_test)] == 1  # by the sites; the last round's global figures have no limit
    assert (found["personal"]["pooled"]["examples"], found["global"]["pooled"]["examples"]) == (10, 40)


@pytest.mark.parametrize(("limit", "expected"), [(None, 1), (15, 2), (40, 1), (99, 1)])
def test_a_score_on_fewer_examples_is_a_pass_of_its_own(limit: int | None, expected: int) -> None:
    run = world(FedIT(), (4, 4, 4), rounds=1, measuring=Measuring(pooled_limit=limit))
    counts = passes(run)
    found = play(run)[-1].metrics
    assert counts[id(run.setting.pooled_test)] == expected
    assert found["global"]["pooled"]["examples"] == 40 and found["personal"]["pooled"]["examples"] == min(
        limit or 40, 40
    )


def test_sites_that_cut_the_global_model_to_their_ranks_are_scored_by_rank() -> None:
    run = world(FedIT(), ranks=(2, 4, 16, 4, 2), rounds=1)
    counts = passes(run)
    play(run)
    assert counts[id(run.setting.pooled_test)] == 3


@pytest.mark.parametrize("sampled", [None, 2])
def test_heads_of_their_own_tell_equal_models_apart(sampled: int | None) -> None:
    run = world(FedIT(), (4,) * 5, rounds=1, train=TELLING, head="local", sample=sampled)
    counts = passes(run)
    pooled = play(run)[-1].metrics["personal"]["pooled"]
    # Sites that were not sampled all have the initial head.
    assert counts[id(run.setting.pooled_test)] == (5 if sampled is None else 3)
    assert pooled["examples"] == 40


class Early(FLoRA):
    """FLoRA whose sites are evaluated before the base changes; their model is always the bare one."""

    traits = replace(FLoRA.traits, evaluated="before aggregation")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("made", "ranks", "saved"),
    [
        # Of three sites, three tests of the task and two rounds: own tests in both, the task's in the last.
        (FedIT, (4, 4, 4), 2 * 3 + 3 * 3),
        (FedIT, (2, 4, 16), 2 * 1 + 1 * 3),
        (FedPALoRA, (2, 4, 16), 2 * 1 + 1 * 3),
        (FedSALoRA, (4, 4, 4), 0),
        (LocalOnly, (2, 4, 16), 0),
        (Early, (4, 4, 4), 2 * 3),
    ],
)
def test_figures_have_the_same_bits_as_if_every_model_were_scored_anew(
    monkeypatch: pytest.MonkeyPatch, made: Any, ranks: tuple[int, ...], saved: int, strict: bool
) -> None:
    def played() -> tuple[list[dict[str, Any]], int]:
        train = replace(TELLING, steps=3)
        run = world(made(), ranks, train=train, rounds=2, metrics=("f1",), more_tests=TESTS, strict=strict)
        counts = passes(run)
        return [one.metrics for one in play(run)], counts.total()

    told, few = played()
    forget(monkeypatch)
    told_anew, many = played()
    assert told == told_anew and many - few == saved


def test_a_base_that_changed_within_the_round_is_scored_anew() -> None:
    run = world(Early(), (4, 4, 4), train=TELLING, rounds=1)
    counts = passes(run)
    found = play(run)[-1].metrics
    assert counts[id(run.setting.pooled_test)] == 2
    assert found["personal"]["pooled"]["loss"] != found["global"]["pooled"]["loss"]


class Nudged(FedIT):
    """FedIT that also shows a copy of each site's model, and one with a single other entry."""

    def further_models(self, client: Client, download: Any) -> Mapping[str, Model]:
        copy = map_tensors(download, torch.clone)
        name = sorted(download)[0]
        B = download[name].B.clone()
        B[0, 0] += 1
        return {"copy": Model(lora=copy), "nudged": Model(lora=download | {name: replace(download[name], B=B)})}


def test_base_models_as_they_are_are_scored_in_the_first_round_where_asked() -> None:
    run = world(FedIT(), train=TELLING, rounds=2, more_tests=TESTS, measuring=Measuring(every=2, untrained=True))
    first, last = play(run)
    found = first.metrics["untrained"]
    assert list(found) == ["base"] and "untrained" not in last.metrics and "clients" not in found["base"]
    plain, head = run.executor.bases["base"], run.setting.initial_head("base")
    for data, figures in [
        (run.setting.pooled_test, found["base"]["pooled"]),
        *((TESTS[name], found["base"]["more"][name]) for name in TESTS),
    ]:
        score = evaluate(plain, Model(), head, data, 64)
        assert (figures["loss"], figures["accuracy"], figures["examples"]) == (score.loss, score.accuracy, len(data))
    assert found["base"]["pooled"]["loss"] != last.metrics["global"]["pooled"]["loss"]


def test_a_copy_is_recognised_and_a_model_changed_in_one_entry_is_scored_anew() -> None:
    run = world(Nudged(), (4, 4, 4), train=TELLING, rounds=1)
    counts = passes(run)
    found = play(run)[-1].metrics["personal"]
    assert counts[id(run.setting.pooled_test)] == 2
    assert {counts[id(site.data["test"])] for site in run.setting.sites.values()} == {2}
    assert found["further"]["copy"] == {name: found[name] for name in ("clients", "pooled")}
    assert found["further"]["nudged"]["pooled"]["loss"] != found["pooled"]["loss"]


def test_models_are_named_only_where_their_data_are_scored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[Any] = []
    digest = scoring.digest

    def noted(content: Any, **options: Any) -> str:
        if isinstance(content, Model):
            named.append(content)
        return digest(content, **options)

    monkeypatch.setattr(scoring, "digest", noted)
    run = with_validation(world(LocalOnly(), rounds=2, more_tests=TESTS))
    rounds = run.rounds(run.begin())
    next(rounds)
    assert not named
    next(rounds)
    assert len(named) == 3  # each site's model once, for all the task's tests
