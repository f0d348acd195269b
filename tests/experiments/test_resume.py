"""A run that is killed, however often and wherever, ends with the same bytes as one that is not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from experiments.forking import played

from coterie.experiments.folders import UPLOADS

PRIVATE: dict[str, Any] = {
    "method": "fedpa-lora",
    "federation": {"sample": 3, "head": "local"},
    "train": {"optimizer": "adamw", "dropout": 0.1},
}
MERGED: dict[str, Any] = {"method": "fed-rac-lora", "clients": {"ranks": 4}}
SHARED: dict[str, Any] = {
    "method": "flexlora",
    "checkpoint": {"every": 2},
    "execution": {"strict": True, "upload_memory": 0},
}


def configuration(special: dict[str, Any], base: Path, data: Path) -> dict[str, Any]:
    made: dict[str, Any] = {
        "rounds": 5,
        "task": {"name": "file", "path": str(data)},
        "model": {"base": str(base), "targets": ["query", "value"]},
        "clients": {"count": 4, "ranks": [2, 4, 8]},
        "partition": {"minimum": 10},
        "train": {"batch_size": 4, "steps": 3, "lr": 1e-2},
        "evaluate": {"objective_examples": 8, "pooled_limit": 20},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 2},
    }
    for name, value in special.items():
        made[name] = {**made[name], **value} if isinstance(made.get(name), dict) else value
    return made


def results(folder: Path) -> dict[str, Any]:
    """What must be equal: every adapter file, the records without times, the last checkpoint's contents."""
    found: dict[str, Any] = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted((folder / "adapters").rglob("*"))
        if path.is_file()
    }
    assert any(name.endswith("adapter_model.safetensors") for name in found)
    for name in ("metrics.jsonl", "ledger.jsonl", "partition.json"):
        found[name] = (folder / name).read_bytes()
    manifests = sorted((folder / "checkpoints").glob("round-*.json"))
    found["state"] = json.loads(manifests[-1].read_bytes())["manifest"]["blobs"]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    found["summary"] = {name: value for name, value in summary.items() if name != "seconds"}
    return found


def killed_and_whole(
    special: dict[str, Any], attempts: list[dict[str, Any]], tmp_path: Path, base: Path, data: Path
) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    ended = played(configuration(special, base, data), {whole: [{}], killed: [*attempts, {}]})
    assert ended[whole] == [0] and ended[killed][-1] == 0
    return ended[killed], results(killed), results(whole)


def at_random(count: int, seed: int, longest: float) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [{"after": draw.uniform(0.05, longest)} for _ in range(count)]


def test_three_kills_at_random_moments_leave_no_trace(tmp_path: Path, tiny_base: Path, reviews_csv: Path) -> None:
    attempts = at_random(3, seed=0, longest=1.0)
    _, killed, whole = killed_and_whole(PRIVATE, attempts, tmp_path, tiny_base, reviews_csv)
    assert killed == whole


def test_kills_inside_checkpoints_and_records_leave_no_trace(
    tmp_path: Path, tiny_base: Path, reviews_csv: Path
) -> None:
    events = ["half an upload", "half a line", "half a blob", "between blobs"]
    events += ["before the manifest", "after the manifest", "adapters"]
    ended, killed, whole = killed_and_whole(
        SHARED, [{"at": event} for event in events], tmp_path, tiny_base, reviews_csv
    )
    assert ended == [-9] * len(events) + [0]
    assert killed == whole
    assert not list(tmp_path.rglob(UPLOADS))


def test_kills_around_checkpoints_lose_no_patch_of_the_base(tmp_path: Path, tiny_base: Path, reviews_csv: Path) -> None:
    attempts = [{"at": event} for event in ("between blobs", "after the manifest", "before the manifest")]
    _, killed, whole = killed_and_whole(MERGED, attempts, tmp_path, tiny_base, reviews_csv)
    assert killed == whole
    assert {f"base/{version:05d}" for version in range(5)} < set(whole["state"])


@pytest.mark.slow
@pytest.mark.parametrize("special", [PRIVATE, SHARED, MERGED], ids=["local heads", "averaged heads", "merged base"])
def test_twenty_kills_at_random_moments_leave_no_trace(
    special: dict[str, Any], tmp_path: Path, tiny_base: Path, reviews_csv: Path
) -> None:
    special = {**special, "rounds": 100}
    attempts = at_random(20, seed=1, longest=1.0)
    ended, killed, whole = killed_and_whole(special, attempts, tmp_path, tiny_base, reviews_csv)
    assert ended.count(-9) >= 18
    assert killed == whole
