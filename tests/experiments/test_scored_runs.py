"""Whole runs of tasks with metrics of their own: what metrics.jsonl and summary.json say, and what the server holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from sklearn.metrics import f1_score, matthews_corrcoef

from coterie.data.text import TextSet
from coterie.engines.heads import head_name
from coterie.engines.in_process import InProcess
from coterie.engines.sites import Volatile
from coterie.errors import ConfigError
from coterie.experiments.build import build
from coterie.experiments.config import Config, parse
from coterie.experiments.runs import run
from coterie.maths.keys import root_key
from coterie.protocol import Predict, Predictions
from coterie.training.asks import Ask, Done, Plan
from coterie.wire.ledger import Ledger

PLAN = Plan()


def sentences(count: int, name: str) -> list[tuple[int, str]]:
    """Labels, three in five of class 1, and texts of words that hint at them, no two alike."""
    key = root_key(5).fold(name)
    found: dict[str, int] = {}
    for number in range(20 * count):
        draw = key.fold(number).unit(9)
        label = int(draw[0] < 0.6)
        words = [toy.FILLER[int(part * len(toy.FILLER))] for part in draw[1:8]]
        hint = (toy.BAD, toy.GOOD)[label if draw[8] < 0.9 else 1 - label]
        text = " ".join([*words[:4], hint[int(draw[1] * len(hint))], *words[4:]])
        found.setdefault(text, label)
        if len(found) == count:
            break
    return [(label, text) for text, label in found.items()]


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of CoLA, MRPC and QQP as their archives have them, with toy sentences."""
    root = tmp_path_factory.mktemp("glue")
    parts = {name: sentences(count, name) for name, count in (("train", 160), ("dev", 60), ("other", 40))}
    for name in ("cola", "mrpc", "qqp"):
        (root / name).mkdir()
    for file, name, source in (
        ("in_domain_train.tsv", "train", "abc"),
        ("in_domain_dev.tsv", "dev", "abc"),
        ("out_of_domain_dev.tsv", "other", "xyz"),
    ):
        rows = [f"{source}{n % 3}\t{label}\t\t{text}" for n, (label, text) in enumerate(parts[name])]
        (root / "cola" / file).write_text("\n".join(rows) + "\n", encoding="utf-8")
    for file, name in (("msr_paraphrase_train.txt", "train"), ("msr_paraphrase_test.txt", "dev")):
        rows = [f"{label}\t{n}\t{n}\t{text}\tso it was" for n, (label, text) in enumerate(parts[name])]
        head = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        (root / "mrpc" / file).write_text(head + "\n".join(rows) + "\n", encoding="utf-8")
    for file, name in (("train.tsv", "train"), ("dev.tsv", "dev")):
        rows = [f"{n}\t{text}\tso it was\t{label}" for n, (label, text) in enumerate(parts[name])]
        head = "id\tquestion1\tquestion2\tis_duplicate\n"
        (root / "qqp" / file).write_text(head + "\n".join(rows) + "\n", encoding="utf-8")
    return root


@pytest.fixture
def config(glue: Path, tiny_base: Path) -> Any:
    def made(name: str, **sections: Any) -> Config:
        return parse(
            {
                "method": "fedit",
                "rounds": 2,
                "task": {"name": name, "path": str(glue / name)},
                "model": {"base": str(tiny_base), "targets": ["query", "value"]},
                "clients": {"count": 3},
                "partition": {"kind": "iid", "minimum": 10},
                "train": {"batch_size": 8, "steps": 12, "lr": 2e-2},
                "evaluate": {"objective_examples": 0, "mismatch": False},
                "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 3},
                **sections,
            }
        )

    return made


def played(chosen: Config) -> tuple[InProcess, dict[str, Any], Any]:
    """The engine after a whole run, the last line of its metrics, and where it stands."""
    built = build(chosen, PLAN)
    engine = InProcess(built.setting, built.executor, Volatile(), Ledger())
    last = list(engine.rounds(engine.begin()))[-1]
    return engine, last.metrics, last.progress


def answers(engine: InProcess, progress: Any, data: Any) -> tuple[np.ndarray, np.ndarray]:
    model, head = engine.algorithm.global_model(progress.state), progress.heads[head_name("base", "all")]
    assert model is not None
    (done,) = engine.executor.answer([Ask("server", Predict(model, "test"), "base", head, data, root_key(0))])
    assert isinstance(done, Done) and isinstance(done.answer, Predictions)
    return done.answer.logits.argmax(dim=1).numpy(), done.answer.labels.numpy()


def test_cola_is_judged_by_scikit_learns_matthews_on_both_parts_of_its_test_too(config: Any) -> None:
    engine, metrics, progress = played(config("cola"))
    found = metrics["global"]
    assert set(found["more"]) == {"in-domain", "out-of-domain"}
    tests = {"pooled": engine.setting.pooled_test, **engine.setting.more_tests}
    for name, data in tests.items():
        given, true = answers(engine, progress, data)
        figures = found["pooled"] if name == "pooled" else found["more"][name]
        assert figures["examples"] == {"pooled": 100, "in-domain": 60, "out-of-domain": 40}[name]
        assert figures["score"] == figures["metrics"]["matthews"] == pytest.approx(matthews_corrcoef(true, given))
        assert figures["metrics"]["accuracy"] == figures["accuracy"] == (given == true).mean()
    assert found["pooled"]["score"] != 0


@pytest.mark.parametrize("name", ["mrpc", "qqp"])
def test_mrpc_and_qqp_have_scikit_learns_f1_beside_the_accuracy(config: Any, name: str) -> None:
    engine, metrics, progress = played(config(name))
    given, true = answers(engine, progress, engine.setting.pooled_test)
    pooled = metrics["global"]["pooled"]
    assert list(pooled["metrics"]) == ["accuracy", "f1"]
    assert pooled["metrics"]["f1"] == pytest.approx(f1_score(true, given))
    assert pooled["score"] == pooled["accuracy"] == (given == true).mean()


def test_a_run_writes_metric_validation_and_the_baseline_in_the_tasks_own_metric(config: Any, tmp_path: Path) -> None:
    partition = {"kind": "iid", "minimum": 10, "validation_fraction": 0.25}
    result = run(config("cola", partition=partition, rounds=3, evaluate={"every": 2}), tmp_path / "run")
    lines = result.metrics
    assert [line["round"] for line in lines if "validation" in line] == [2, 3]
    assert lines[-1]["validation"]["examples"] == sum(
        len(client["validation"]) for client in build(result.config, PLAN).partition["clients"]
    )
    summary = result.summary
    assert summary["metric"] == "matthews" and summary["validation"] == lines[-1]["validation"]
    assert summary["global"] == lines[-1]["global"] and summary["personal"] == lines[-1]["personal"]
    assert summary["majority"] == {"pooled": 0.0, "own": 0.0}  # of one answer, whichever, there is no correlation


def test_the_majority_baseline_of_accuracy_is_the_share_of_the_class(config: Any) -> None:
    built = build(config("mrpc"), PLAN)
    assert built.majority["pooled"] == np.bincount(built.task.test.labels).max() / len(built.task.test)


def test_the_server_holds_what_was_set_aside_and_knows_no_class_of_the_unlabelled(config: Any) -> None:
    built = build(config("cola", server_data={"public": 20, "unlabeled": 30}), PLAN)
    held = built.setting.server_data
    assert set(held) == {"public/cola", "unlabeled"} == set(built.partition["server"])
    assert built.setting.federation.server_data == ("public/cola", "unlabeled")
    rows: list[int] = []
    for name, data in held.items():
        assert isinstance(data, TextSet)
        indices = built.partition["server"][name]["indices"]
        assert sorted(data.rows.tolist()) == indices and len(indices) == built.partition["server"][name]["examples"]
        rows += indices
        known = built.task.train.labels[data.rows.numpy()].tolist()
        assert data.labels.tolist() == (known if name != "unlabeled" else [-1] * 30)
    for site in built.setting.sites.values():
        rows += [row for data in site.data.values() for row in data.rows.tolist()]  # type: ignore[union-attr]
    assert sorted(rows) == list(range(len(built.task.train)))


def test_the_servers_data_are_the_same_whatever_the_method(config: Any) -> None:
    server_data = {"public": 20, "unlabeled": 30}
    one, other = (build(config("cola", server_data=server_data, method=m), PLAN) for m in ("fedit", "flexlora"))
    assert one.partition == other.partition
    for name, data in one.setting.server_data.items():
        assert data.rows.tolist() == other.setting.server_data[name].rows.tolist()  # type: ignore[union-attr]


def test_a_reference_gets_the_clients_training_data_together_and_by_group(config: Any) -> None:
    clients, partition = {"count": 3, "groups": ["x", "y"]}, {"minimum": 5, "validation_fraction": 0.2}
    sections = {"clients": clients, "partition": partition, "server_data": {"public": 15}}
    built = build(config("cola", method="centralised", **sections), PLAN)
    held = built.setting.server_data
    assert set(held) == {"pooled", "pooled/x", "pooled/y", "public/cola"}
    trained = {name: set(site.data["train"].rows.tolist()) for name, site in built.setting.sites.items()}  # type: ignore[union-attr]
    assert [site.card.group for site in built.setting.sites.values()] == ["x", "y", "x"]
    members = {"pooled": ["00", "01", "02"], "pooled/x": ["00", "02"], "pooled/y": ["01"]}
    for name, ids in members.items():
        rows = held[name].rows.tolist()  # type: ignore[union-attr]
        assert sorted(rows) == sorted(set().union(*(trained[one] for one in ids))) and rows != sorted(rows)
    federated = build(config("cola", **sections), PLAN)
    assert set(federated.setting.server_data) == {"public/cola"} and federated.partition == built.partition


def test_a_natural_partition_tells_groups_to_cards(config: Any) -> None:
    built = build(config("cola", partition={"kind": "natural", "minimum": 10}), PLAN)
    assert [site.card.group for site in built.setting.sites.values()] == ["abc0", "abc1", "abc2"]


def test_a_method_that_needs_data_at_the_server_says_which_setting_gives_them(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"needs public data at the server; .* server_data\.public=200") as caught:
        build(config("cola", method="engines.throwaway:TwoStage"), PLAN)
    assert "\n" not in str(caught.value)
