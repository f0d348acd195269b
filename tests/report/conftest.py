"""Runs to report on: real ones of the toy world, and records made up to hold exactly what a test is about."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

Records = Callable[..., Path]


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """Writes a run folder: `records(name, scores=[...], **changes)`, a score of the pooled test for each round.

    Two clients of ranks 2 and 4, whose own scores lie 0.1 below and above the pooled one. settings: put over the
    configuration; summary: over the summary, None for a run that is not finished; rows: over each round's line.
    """

    def write(
        name: str,
        *,
        scores: Sequence[float] = (0.5, 0.7),
        method: str = "fedit",
        title: str = "FedIT",
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
        summary: Mapping[str, Any] | None = {},
        rows: Mapping[str, Any] | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config: dict[str, Any] = {
            "name": "made",
            "method": method,
            "options": {},
            "seed": seed,
            "rounds": len(scores),
            "model": {"base": "minilm"},
            "clients": {"count": 2, "ranks": [2, 4], "ids": ["north", "south"]},
            "task": {"name": "movie"},
            "train": {"lr": 0.001},
            **(settings or {}),
            "recorded": {"versions": {"python": "3.11.0", "coterie": "0.1.0"}, "plan": {"dtype": "float32"}},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        lines = [_line(number, score) | dict(rows or {}) for number, score in enumerate(scores, 1)]
        times = [{"round": number, "seconds": {"clients": 2.0, "server": 0.5}} for number in range(1, len(scores) + 1)]
        for file, content in (("metrics", lines), ("timing", times)):
            text = "".join(json.dumps(line) + "\n" for line in content)
            (folder / f"{file}.jsonl").write_text(text, encoding="utf-8")
        partition = {
            "how": {"kind": "dirichlet", "beta": 0.5},
            "statistics": {"classes": [0, 1], "histogram": [[30, 10], [5, 55]], "mean_total_variation": 0.4},
        }
        (folder / "partition.json").write_text(json.dumps(partition), encoding="utf-8")
        if summary is not None:
            told = {
                "method": method,
                "title": title,
                "seed": seed,
                "rounds": len(scores),
                "metric": "accuracy",
                "clients": {"north": {"rank": 2, "examples": 40}, "south": {"rank": 4, "examples": 60}},
                "task": {"name": "movie", "classes": ["bad", "good"], "test": 400, "source": "made up", "notes": []},
                "majority": {"pooled": 0.55, "own": 0.8},
                **summary,
            }
            (folder / "summary.json").write_text(json.dumps(told), encoding="utf-8")
        return folder

    return write


def _line(number: int, score: float) -> dict[str, Any]:
    own = {"north": score - 0.1, "south": score + 0.1}
    shares = {"score": own, "accuracy": own, "mean": score, "worst_50": score - 0.1, "worst_25": score - 0.1}
    size = {"payload": 1000, "overhead": 24}
    return {
        "round": number,
        "phase": "main",
        "cohort": ["north", "south"],
        "answered": ["north", "south"],
        "failed": {},
        "late": [],
        "train": {"loss": 1.0 / number},
        "mismatch": {"relative": 0.25},
        "global": {
            "pooled": {"loss": 0.4, "accuracy": score, "score": score, "examples": 400, "metrics": {"accuracy": score}},
            "clients": {"score": {"north": score, "south": score}},
        },
        "personal": {"clients": shares},
        "bytes": {
            "message": {"up": size, "down": size},
            "evaluation": {"down": {"payload": 9_000_000, "overhead": 0}},
        },
    }


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, reviews_csv: Path) -> Path:
    """A folder of four finished runs, two methods with two seeds, with a failure and a late answer. Read only."""
    from coterie.experiments.runs import run

    place = tmp_path_factory.mktemp("comparison") / "small"
    for method in ("fedit", "fedpa-lora"):
        for seed in (0, 1):
            run(
                {
                    "method": method,
                    "seed": seed,
                    "rounds": 3,
                    "task": {"name": "file", "path": str(reviews_csv)},
                    "model": {"base": str(tiny_base), "targets": ["query", "value"]},
                    "clients": {"count": 4, "ranks": [2, 4, 8]},
                    "partition": {"minimum": 10},
                    "train": {"batch_size": 4, "steps": 3, "lr": 1e-2},
                    "evaluate": {"objective_examples": 4, "pooled_limit": 20},
                    "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 2},
                    "faults": [
                        {"client": "01", "round": 2, "kind": "exception"},
                        {"client": "02", "round": 3, "kind": "late"},
                    ],
                },
                place / f"{method}-seed{seed}",
            )
    return place
