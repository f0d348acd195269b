"""Runs from Python: what they write, that they are pure functions of their settings, and who may watch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie.adapters.peft_folder import load_peft
from coterie.engines.checkpoints import CheckpointStore
from coterie.errors import CheckpointError, ConfigError
from coterie.experiments.adapters import flattened
from coterie.experiments.config import parse
from coterie.experiments.observers import About
from coterie.experiments.runs import default_folder, grounded, load_checkpoint, resume, run
from coterie.maths.keys import root_key
from coterie.protocol import BaseLog, LowRank, Model


@pytest.fixture
def raw(tiny_base: Path, reviews_csv: Path) -> dict[str, Any]:
    return {
        "method": "fedpa-lora",
        "rounds": 3,
        "task": {"name": "file", "path": str(reviews_csv)},
        "model": {"base": str(tiny_base), "targets": ["query", "value"]},
        "clients": {"count": 4, "ranks": [2, 4, 8]},
        "partition": {"minimum": 10},
        "train": {"batch_size": 4, "steps": 3, "lr": 1e-2},
        "evaluate": {"objective_examples": 4, "pooled_limit": 20, "clients_every": 2},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 2},
    }


class Watching:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin(self, about: About) -> None:
        self.told.append(about)

    def round(self, metrics: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        self.told.append(metrics["round"])

    def note(self, text: str) -> None:
        self.told.append(text)

    def end(self) -> None:
        self.told.append("end")


def test_a_run_is_a_pure_function_of_its_settings(raw: dict[str, Any], tmp_path: Path) -> None:
    watching = Watching()
    one, other = run(raw, tmp_path / "one", watching), run(raw, tmp_path / "other")
    assert watching.told == [About(tmp_path / "one", "FedPA-LoRA", 1, 3), 1, 2, 3, "end"]
    for name in ("metrics.jsonl", "ledger.jsonl", "partition.json"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes()
    for path in (one.folder / "adapters").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (other.folder / path.relative_to(one.folder)).read_bytes()


def test_metrics_follow_the_schedule_and_the_last_round_is_whole(raw: dict[str, Any], tmp_path: Path) -> None:
    result = run(raw, tmp_path / "r")
    metrics = result.metrics
    assert [m["round"] for m in metrics] == [1, 2, 3]
    assert ["personal" in m for m in metrics] == [False, True, True]
    assert [m["global"]["pooled"]["examples"] for m in metrics] == [20, 20, result.summary["task"]["test"]]
    assert "pooled" in metrics[2]["personal"] and "seconds" not in json.dumps(metrics)
    assert result.summary["global"] == metrics[2]["global"]


def test_the_ledger_adds_up_to_the_summary_and_the_metrics(raw: dict[str, Any], tmp_path: Path) -> None:
    result = run(raw, tmp_path / "r")
    rows = [json.loads(line) for line in (result.folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]
    for way in ("up", "down"):
        booked = [r["payload"] + r["overhead"] for r in rows if r["direction"] == way and r["kind"] != "evaluation"]
        assert sum(booked) == result.summary["bytes"][way]
    first = sum(r["payload"] for r in rows if r["round"] == 1 and r["kind"] == "message" and r["direction"] == "up")
    assert result.metrics[0]["bytes"]["message"]["up"]["payload"] == first


def test_adapters_are_the_state_of_the_last_checkpoint(raw: dict[str, Any], tmp_path: Path) -> None:
    result = run(raw, tmp_path / "r")
    progress, _, _ = load_checkpoint(CheckpointStore(result.folder))
    assert progress is not None and progress.finished
    held = load_peft(result.folder / "adapters" / "global")
    assert held.head is not None
    for layer, term in progress.state.reference.items():
        assert held.adapter[layer].product().equal(term.product())
    for name, value in progress.heads["base/all"].items():
        assert held.head[name].equal(value)
    assert load_peft(result.folder / "adapters" / "client-00").adapter[layer].rank == 2


def test_terms_and_patches_of_a_layer_are_one_adapter_of_the_same_product() -> None:
    key = root_key(0)

    def term(name: str, rank: int, scale: float, diagonal: bool = False) -> LowRank:
        draw = key.fold(name)
        return LowRank(
            draw.fold("B").normal((15, rank)),
            draw.fold("A").normal((rank, 12)),
            scale,
            draw.fold("d").normal((rank,)) if diagonal else None,
        )

    lora, shared, patch = term("lora", 2, 2.0), term("shared", 3, 0.5, diagonal=True), term("patch", 1, 1.0)
    made = flattened(Model(lora={"x": lora}, shared={"x": shared}), BaseLog(({"x": patch, "y": patch},)), "me")
    assert made["x"].rank == 6 and made["y"] is patch
    assert made["x"].product().allclose(lora.product() + shared.product() + patch.product(), atol=1e-6)


def test_local_heads_are_exported_with_their_clients(raw: dict[str, Any], tmp_path: Path) -> None:
    result = run(raw | {"federation": {"head": "local"}}, tmp_path / "r")
    heads = [load_peft(result.folder / "adapters" / f"client-0{i}").head for i in range(4)]
    assert all(head is not None for head in heads)
    assert not heads[0]["classifier.weight"].equal(heads[1]["classifier.weight"])  # type: ignore[index]


def test_the_default_folder_names_configuration_method_and_seed(raw: dict[str, Any]) -> None:
    assert default_folder(parse(raw)) == Path("runs/run-fedpa-lora-seed0")
    assert default_folder(parse(raw | {"name": "x", "method": "a/b.py:Mine", "seed": 3})) == Path("runs/x-Mine-seed3")


def test_recorded_paths_are_absolute_so_that_a_run_may_be_resumed_from_anywhere(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    sections = {"method": "m.py:M", "task": {"name": "file", "path": "d.csv"}, "model": {"base": "model"}}
    settled = grounded(parse(raw | sections))
    assert settled.method == f"{tmp_path}/m.py:M"
    assert (settled.task.path, settled.model.base) == (f"{tmp_path}/d.csv", f"{tmp_path}/model")
    assert grounded(parse(raw | {"model": {"base": "org/hub-name"}})).model.base == "org/hub-name"


def test_other_versions_are_noted_on_resume(raw: dict[str, Any], tmp_path: Path) -> None:
    result = run(raw | {"rounds": 1}, tmp_path / "r")
    (result.folder / "summary.json").unlink()
    place = result.folder / "config.yaml"
    content = yaml.safe_load(place.read_text(encoding="utf-8"))
    content["recorded"]["versions"]["torch"] = "0.0"
    place.write_text(yaml.safe_dump(content), encoding="utf-8")
    watching = Watching()
    again = resume(result.folder, watching)
    assert "torch changed since this run began" in watching.told[0]
    assert again.summary["global"] == result.summary["global"]


def test_a_config_without_its_record_cannot_be_resumed(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    with pytest.raises(ConfigError, match="'recorded' is missing"):
        resume(tmp_path)


OWN_METHOD = '''
from dataclasses import dataclass, replace
from coterie.algorithms import FedIT
from coterie.protocol import message

@message
class State:
    lora: dict
    rounds: int

@dataclass(frozen=True)
class Counting(FedIT):
    """FedIT with a state of its own class."""
    start_at: int = 0

    def start(self, federation, server):
        return State(super().start(federation, server).lora, self.start_at)

    def aggregate(self, state, uploads, server):
        return replace(super().aggregate(state, uploads, server), rounds=state.rounds + 1)
'''


def test_a_method_of_ones_own_runs_is_checkpointed_and_read_back(raw: dict[str, Any], tmp_path: Path) -> None:
    place = tmp_path / "counting.py"
    place.write_text(OWN_METHOD, encoding="utf-8")
    result = run(raw | {"method": f"{place}:Counting", "options": {"start_at": 5}}, tmp_path / "r")
    again = resume(result.folder, round=2)
    assert again.metrics == result.metrics
    progress, _, _ = load_checkpoint(CheckpointStore(result.folder))
    assert progress is not None and progress.state.rounds == 8


def test_to_go_back_to_a_round_without_a_checkpoint_is_refused_and_leaves_the_run_finished(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    result = run(raw, tmp_path / "r")
    with pytest.raises(CheckpointError, match="no checkpoint of round 9"):
        resume(result.folder, round=9)
    assert resume(result.folder).resumed_finished
