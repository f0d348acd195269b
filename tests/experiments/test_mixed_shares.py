"""Shares of a mixture: each client its own, tests and validation that match it, public sets apart; and a run of it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.data.holdings import check_disjoint
from coterie.data.mixtures import composition
from coterie.data.sequences import DataSet
from coterie.data.tasks import Examples, Task
from coterie.engines.checkpoints import CheckpointStore
from coterie.errors import ConfigError, DataError
from coterie.experiments.build import Built, build
from coterie.experiments.compare import VALIDATION_FRACTION, _validation_share
from coterie.experiments.config import Config, dump, load, parse
from coterie.experiments.papers.reading import FIGURES, Finished
from coterie.experiments.runs import grounded, load_checkpoint, run
from coterie.experiments.shares import Shares, chosen_task, share_out
from coterie.experiments.summary import part_majorities
from coterie.maths.apportion import largest_remainder
from coterie.maths.keys import root_key
from coterie.protocol import Evaluate, Model
from coterie.training.asks import Ask, Done, Plan
from coterie.wire.codec import encode

NAMES = ["a", "b", "c"]


def examples(counts: list[int], name: str) -> Examples:
    groups = tuple(np.repeat(NAMES, counts).tolist())
    labels = np.concatenate([np.arange(count) % 2 for count in counts])
    return Examples(tuple(f"{name} {i}" for i in range(len(groups))), None, labels, groups)


def task(train: list[int], test: list[int]) -> Task:
    parts = dict.fromkeys(NAMES, ("no", "yes"))
    return Task("mixture", examples(train, "text"), examples(test, "test"), ("no", "yes"), "", (), parts=parts)


def config(partition: dict[str, Any], **sections: Any) -> Config:
    parts = {"name": "mixture", "parts": NAMES}
    return parse({"method": "fedit", "task": parts, "partition": {"kind": "mixture", **partition}, **sections})


def of_groups(made: Task, indices: np.ndarray, test: bool = False) -> np.ndarray:
    groups = (made.test if test else made.train).groups
    assert groups is not None
    return composition(indices, NAMES, groups)


@given(
    alpha=st.sampled_from([0.0, 0.3, 50.0]),
    clients=st.integers(3, 7),
    validation=st.none() | st.integers(1, 15),
    test=st.none() | st.integers(1, 25),
    public=st.none() | st.integers(1, 40),
    unlabeled=st.none() | st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_every_set_has_its_size_and_matches_its_clients_mixture(
    alpha: float,
    clients: int,
    validation: int | None,
    test: int | None,
    public: int | None,
    unlabeled: int | None,
    seed: int,
) -> None:
    made = task([400, 200, 150], [80, 60, 30])
    chosen = config(
        {"alpha": alpha, "validation_size": validation, "test_size": test, "minimum": 1},
        clients={"count": clients},
        server_data={"public": public, "unlabeled": unlabeled},
        seed=seed,
    )
    try:
        shares = share_out(chosen, made)
    except DataError as error:
        assert "leaves none to train on" in str(error) or "the minimum is 1" in str(error)
        return
    everything = np.concatenate(
        [*shares.server.values(), *(p for own in shares.clients.values() for p in own.values())]
    )
    assert len(np.unique(everything)) == len(everything) <= 750
    asked = {f"public/{name}": public for name in NAMES} if public is not None else {}
    asked |= {"unlabeled": unlabeled} if unlabeled is not None else {}
    assert {name: len(part) for name, part in shares.server.items()} == asked
    for name in NAMES if public is not None else []:
        assert of_groups(made, shares.server[f"public/{name}"]).tolist() == [public * (name == o) for o in NAMES]
    for name, own in shares.clients.items():
        whole = np.concatenate([part for kind, part in own.items() if kind in ("train", "validation")])
        realised = of_groups(made, whole) / len(whole)
        assert len(own["train"]) >= 1
        assert len(own.get("validation", ())) == (validation or 0)
        if validation is not None:
            assert (np.abs(of_groups(made, own["validation"]) - validation * realised) < 1 + 1e-9).all()
        if test is None:
            held = len(whole) + len(own["test"])
            assert name not in shares.tests and abs(len(own["test"]) - 0.2 * held) < 1 + 0.2 * (validation or 0)
        else:
            assert "test" not in own and len(shares.tests[name]) == test
            assert (np.abs(of_groups(made, shares.tests[name], test=True) - test * realised) < 1 + 1e-9).all()
    check_record(shares, made)


def check_record(shares: Shares, made: Task) -> None:
    record = shares.record
    assert json.loads(json.dumps(record)) == record
    used: Counter[str] = Counter()
    for held in record["clients"]:
        name = held["id"]
        own = {**shares.clients[name], **({"test": shares.tests[name]} if name in shares.tests else {})}
        assert {part: held[part] for part in own} == {part: places.tolist() for part, places in own.items()}
        counts = held["groups"]
        used.update(counts)
        realised = held["mixture"]["realised"]
        assert realised == {group: count / sum(counts.values()) for group, count in counts.items()}
        assert set(realised) == set(held["mixture"]["requested"])
        assert shares.groups[name] == (next(iter(counts)) if len(counts) == 1 else "all")
    mixture = record["mixture"]
    assert {name: count for name, count in mixture["allocated"].items() if count} == dict(used)
    aside = Counter(made.train.groups[i] for part in shares.server.values() for i in part) if made.train.groups else {}
    whole = Counter(made.train.groups or ())
    assert mixture["supply"] == {name: whole[name] - aside[name] for name in NAMES} and mixture["groups"] == NAMES
    assert record["parts"] == {name: ["no", "yes"] for name in NAMES}


def test_the_seed_alone_decides_and_clients_of_a_large_part_keep_theirs_whatever_is_public(
    files: dict[str, Any],
) -> None:
    def shares(public: int | None, **sections: Any) -> tuple[dict[str, Any], list[set[str]]]:
        chosen = parse({**files, "server_data": {"public": public}, **sections})
        made = chosen_task(chosen)
        found = share_out(chosen, made)
        texts = [{made.train.contents()[i][0] for i in own["train"]} for own in found.clients.values()]
        return found.record, texts

    one, texts = shares(10)
    assert shares(10)[0] == one and shares(10, rounds=7, train={"lr": 0.5})[0] == one
    assert shares(10, seed=1)[0]["clients"] != one["clients"]
    # The files hold more than the limit of 60 and the largest public set together.
    assert shares(20)[1] == texts == shares(None)[1]


@pytest.fixture
def files(tmp_path: Path, tiny_base: Path) -> dict[str, Any]:
    """Settings of a mixture of three files, each of 160 short texts."""
    parts: list[dict[str, Any]] = []
    for name, words in (("wards", "good bad"), ("offices", "early late"), ("shops", "cheap dear")):
        rows = [f"the {word} {i} {name},{word}" for i in range(80) for word in words.split()]
        place = tmp_path / f"{name}.csv"
        place.write_text("\n".join(["text,label", *rows]) + "\n")
        parts.append({"name": name, "task": "file", "path": str(place), "train_limit": 60, "classes": words.split()})
    return {
        "method": "fedit",
        "task": {"name": "mixture", "parts": parts},
        "model": {"base": str(tiny_base), "targets": ["query", "value"]},
        "clients": {"count": 4, "ranks": 2},
        "partition": {"kind": "mixture", "alpha": 1.0, "minimum": 5, "validation_size": 4, "test_size": 12},
        "server_data": {"public": 10},
    }


def texts(built: Built, kind: str, indices: list[int]) -> list[str]:
    held = built.task.train if kind == "train" else built.task.test
    return [held.contents()[i][0] for i in indices]


def test_sites_are_tested_on_the_tasks_test_set_and_the_server_has_a_set_of_each_part(files: dict[str, Any]) -> None:
    built = build(parse(files), Plan())
    setting, names = built.setting, ["offices", "shops", "wards"]
    assert list(setting.server_data) == [f"public/{name}" for name in names]
    assert [len(data) for data in setting.server_data.values()] == [10] * 3
    assert list(setting.federation.server_data) == [f"public/{name}" for name in names]
    assert sorted(setting.more_tests) == names and setting.pooled_test is not None
    assert len(setting.pooled_test) == sum(map(len, setting.more_tests.values())) == len(built.task.test)
    for held in built.partition["clients"]:
        site = setting.sites[held["id"]]
        assert site.card.examples == len(held["train"]) and len(site.data["validation"]) == 4
        own = Counter(text.split()[-1] for text in texts(built, "test", held["test"]))
        assert len(site.data["test"]) == 12 == sum(own.values())
        realised = held["mixture"]["realised"]
        assert all(abs(own[name] - 12 * realised.get(name, 0)) < 1 for name in names)
        labels = built.task.test.labels[held["test"]]
        assert sorted(site.data["test"].labels.tolist()) == sorted(labels.tolist())
        assert set(site.data["test"].rows.tolist()) == set(held["test"])  # type: ignore[union-attr]
    scores = []
    for site in setting.sites.values():
        most = np.bincount(site.data["train"].labels.numpy()).argmax()
        scores.append(float((site.data["test"].labels.numpy() == most).mean()))
    assert built.majority["own"] == pytest.approx(np.mean(scores))


def test_what_all_clients_train_on_of_a_part_is_pooled_for_a_reference_method(files: dict[str, Any]) -> None:
    built = build(parse({**files, "method": "centralised"}), Plan())
    groups = built.task.train.groups
    assert groups is not None
    trained = [i for held in built.partition["clients"] for i in held["train"]]
    data = built.setting.server_data
    assert {"public/wards", "pooled", "pooled/wards", "pooled/offices", "pooled/shops"} <= set(data)
    for name in ("wards", "offices", "shops"):
        expected = sorted(i for i in trained if groups[i] == name)
        assert sorted(data[f"pooled/{name}"].rows.tolist()) == expected  # type: ignore[union-attr]
    assert sorted(data["pooled"].rows.tolist()) == sorted(trained)  # type: ignore[union-attr]


@pytest.mark.parametrize(("public", "examples"), [(40, 40), (61, 61), (90, 68)])
def test_a_part_may_be_the_servers_alone(files: dict[str, Any], public: int, examples: int) -> None:
    part = files["task"]["parts"][1]
    rows = Path(part["path"]).read_text().splitlines()
    Path(part["path"]).write_text("\n".join(rows[:86]) + "\n")  # 85 examples, of which 17 become the test
    part["train_limit"] = 0
    chosen = parse({**files, "server_data": {"public": public}, "partition": {**files["partition"], "minimum": 1}})
    made = chosen_task(chosen)
    shares = share_out(chosen, made)
    assert {name: len(held) for name, held in shares.server.items()} == {
        "public/offices": examples,
        "public/shops": public,
        "public/wards": public,
    }
    assert shares.record["mixture"]["groups"] == ["shops", "wards"]
    with pytest.raises(DataError, match=r"the part 'offices' has train_limit 0, which .* give server_data\.public"):
        share_out(parse({**files, "server_data": {}}), made)


def test_no_example_is_in_two_sets() -> None:
    check_disjoint({"public/a": np.array([1, 2]), "client 0": np.array([3]), "client 1": np.array([], dtype=int)})
    with pytest.raises(ValueError, match="example 3 is in public/a and in client 0"):
        check_disjoint({"public/a": np.array([1, 3]), "client 0": np.array([3, 4])})


def test_tests_that_overlap_are_counted() -> None:
    made = task([300, 300, 300], [20, 20, 20])
    record = share_out(config({"alpha": 0, "test_size": 20}, clients={"count": 4}), made).record
    assert record["tests"]["examples"] == 60 and record["tests"]["of_several_clients"] == 20
    assert record["clients"][0]["test"] == record["clients"][3]["test"]


def test_pure_clients_have_their_task_as_their_group() -> None:
    made = task([300, 200, 100], [20, 20, 20])
    assert list(share_out(config({"alpha": 0}, clients={"count": 5}), made).groups.values()) == [*"abcab"]


@pytest.mark.parametrize(
    ("partition", "sections", "told"),
    [
        ({"alpha": 0.5}, {"server_data": {"public": 100}}, "takes 100 of 100 training examples of 'c', which leaves"),
        ({"alpha": 0.5}, {"server_data": {"public": 90, "unlabeled": 330}}, "unlabeled takes 330 of 330 training"),
        ({"alpha": 0, "validation_size": 90}, {}, "client 02 holds 50 examples, and a validation_size of 90 leaves"),
        ({"alpha": 0, "test_size": 21}, {}, "to be tested on 21 examples of 'a', and the test pool has 20; lower test"),
        ({"alpha": 0, "minimum": 60}, {}, "gives client 2 of 6 only 50 (c 1.00), and the minimum is 60"),
        ({"weights": [[1, 0]] * 6}, {}, "2 numbers for the groups a, b, c"),
    ],
)
def test_what_cannot_be_shared_out_is_told_in_one_line(
    partition: dict[str, Any], sections: dict[str, Any], told: str
) -> None:
    made = task([300, 200, 100], [20, 20, 20])
    with pytest.raises(DataError) as caught:
        share_out(config(partition, clients={"count": 6}, **sections), made)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_tests_of_a_size_need_groups() -> None:
    plain = Examples(tuple(f"text {i}" for i in range(100)), None, np.arange(100) % 2)
    made = Task("toy", plain, plain, ("no", "yes"), "", ())
    chosen = parse(
        {"method": "fedit", "task": {"name": "file"}, "partition": {"test_size": 5}, "clients": {"count": 2}}
    )
    with pytest.raises(DataError, match=r"task 'toy' does not tell; give partition\.test_fraction"):
        share_out(chosen, made)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"task": {"name": "mixture"}}, "parts belong to the task mixture"),
        ({"task": {"name": "sms", "parts": ["movie"]}}, "parts belong to the task mixture"),
        ({"task": {"name": "mixture", "parts": ["sms"], "path": "x"}}, "a mixture has no path of its own"),
        ({"task": {"name": "mixture", "parts": ["hub:a/b"]}}, "no short name; write {name: mine, task: hub:a/b}"),
        ({"task": {"name": "mixture", "parts": [{"name": "a", "clases": []}]}}, "did you mean 'task.parts.classes'"),
        ({"partition": {"kind": "mixture"}}, "a mixture needs alpha, such as alpha: 0.5, or weights, and not both"),
        ({"partition": {"test_size": 5, "test_fraction": 0.1}}, "give test_size or test_fraction, not both"),
        ({"partition": {"kind": "mixture", "alpha": -1}}, "partition.alpha: must be greater than or equal to 0"),
    ],
)
def test_settings_that_cannot_be_meant_are_named(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"method": "fedit", "task": {"name": "sms"}, **sections})
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_validation_of_a_size_is_enough_to_tune_on() -> None:
    sized, shared = ({"partition": {"kind": "iid", name: 5}} for name in ("validation_size", "minimum"))
    assert (
        config({"alpha": 0, "validation_size": 5}).partition.validates and not config({"alpha": 0}).partition.validates
    )
    assert _validation_share(sized, []) == []
    assert _validation_share(shared, []) == [(["partition", "validation_fraction"], VALIDATION_FRACTION)]


def test_settings_survive_a_run_folder_and_paths_of_parts_become_absolute(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files["task"]["parts"][0]["path"] = "wards.csv"
    weights = [{"wards": 1}, [0.5, 0.5, 0], [1, 0, 0], [0, 0, 1.0]]
    chosen = parse({**files, "partition": {**files["partition"], "alpha": None, "weights": weights}})
    assert parse(dump(chosen)) == chosen
    monkeypatch.chdir(tmp_path)
    parts = grounded(chosen).task.parts
    assert parts is not None and [part.path for part in parts] == [
        str(tmp_path / f"{name}.csv") for name in ("wards", "offices", "shops")
    ]


def played(files: dict[str, Any], method: str, place: Path) -> dict[str, Any]:
    settings = {
        "method": method,
        "rounds": 2,
        "train": {"steps": 2, "batch_size": 4},
        "federation": {"head": "frozen"},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 1},
    }
    return run(parse({**files, **settings}), place).summary


def held_of(place: Path) -> dict[str, Counter[str]]:
    """How many of each part's examples stand in every client's test."""
    record = json.loads((place / "partition.json").read_text())
    mixture = {held["id"]: held["mixture"]["realised"] for held in record["clients"]}
    sizes = {name: largest_remainder(np.array([*own.values()]) * 12, 12) for name, own in mixture.items()}
    return {name: Counter(dict(zip(mixture[name], sizes[name].tolist(), strict=True))) for name in mixture}


@pytest.mark.parametrize("method", ["fedit", "local-only", "centralised-per-task"])
def test_scores_are_told_by_client_and_by_part(files: dict[str, Any], tmp_path: Path, method: str) -> None:
    summary = played(files, method, tmp_path / "run")
    sizes = held_of(tmp_path / "run")
    for found in (summary["global"], summary["personal"]):
        if found is None:
            continue
        assert sorted(found["parts"]) == sorted(found["more"]) == ["offices", "shops", "wards"]
        for client, own in sizes.items():
            scores = {part: figures["score"].get(client) for part, figures in found["parts"].items()}
            assert {part for part, score in scores.items() if score is not None} == {p for p in own if own[p]}
            mean = sum(own[part] * score for part, score in scores.items() if score is not None) / 12
            assert found["clients"]["score"][client] == pytest.approx(mean)
    assert summary["validation"]["examples"] == 16
    assert sorted(summary["task"]["majority"]) == ["offices", "shops", "wards"]


def test_each_part_has_a_majority_of_its_own() -> None:
    made = task([4, 4, 4], [3, 6, 1])  # of three examples two are of one class
    assert part_majorities(made) == {"a": pytest.approx(2 / 3), "b": 0.5, "c": 1.0}
    assert part_majorities(replace(made, parts={})) == {}


def test_the_least_lead_is_that_of_the_worst_part() -> None:
    def pick(parts: dict[str, Any], majority: dict[str, float]) -> float | None:
        summary = {"personal": {"parts": parts}, "task": {"majority": majority}}
        return FIGURES["least_lead"].pick(
            Finished(parse({"method": "fedit", "task": {"name": "movie"}}), summary, [], {}), ""
        )

    own = {"a": {"mean": 0.9}, "b": {"mean": 0.7}, "c": {"mean": None}}
    assert pick(own, {"a": 0.8, "b": 0.5, "c": 0.5}) == pytest.approx(0.1)
    assert pick(own, {}) is None and pick({}, {"a": 0.8}) is None


@pytest.mark.parametrize("weights", [None, [{"wards": 1}, [1, 0, 0], [0.5, 0.5, 0], [0, 0, 1]]])
def test_each_example_is_answered_by_the_model_of_its_own_task(
    files: dict[str, Any], tmp_path: Path, weights: Any
) -> None:
    """Also of a client that holds but one task, which is tested on the other tasks as all are."""
    if weights is not None:
        files["partition"] |= {"alpha": None, "weights": weights}
    personal = played(files, "centralised-per-task", tmp_path / "run")["personal"]
    progress, _, _ = load_checkpoint(CheckpointStore(tmp_path / "run"))
    assert progress is not None and sorted(progress.state.models) == ["offices", "shops", "wards"]
    assert set(progress.state.clients.values()) == {1}  # four clients' work for three models, rounded down
    built = build(parse({**files, "method": "centralised-per-task", "federation": {"head": "frozen"}}), Plan())

    def score(part: str, data: DataSet) -> float:
        request = Evaluate(Model(lora=progress.state.models[part]), "test", None, ("accuracy",))
        ask = Ask("anyone", request, "base", built.setting.initial_head("base"), data, root_key(0))
        (done,) = built.executor.answer([ask])
        assert isinstance(done, Done)
        return float(done.answer.accuracy)

    assert len({encode(lora) for lora in progress.state.models.values()}) == 3
    for part, data in built.setting.more_tests.items():
        assert personal["more"][part]["accuracy"] == pytest.approx(score(part, data))
        for name, site in built.setting.sites.items():
            if f"test/{part}" in site.data:
                found = personal["parts"][part]["score"][name]
                assert found == pytest.approx(score(part, site.data[f"test/{part}"]))
    whole = {part: len(data) for part, data in built.setting.more_tests.items()}
    mean = sum(personal["more"][part]["accuracy"] * count for part, count in whole.items()) / sum(whole.values())
    assert personal["pooled"]["accuracy"] == pytest.approx(mean)


@pytest.mark.assets
def test_the_configuration_that_comes_with_the_project_has_six_tasks() -> None:
    chosen = load(Path(__file__).parents[2] / "configs" / "mixture.yaml")
    shares = share_out(chosen, chosen_task(chosen))
    assert len(shares.record["parts"]) == 6
    assert all(len(test) == 100 for test in shares.tests.values()) and len(shares.tests) == chosen.clients.count
