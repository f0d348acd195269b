"""What tests of reproductions share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from coterie.experiments import reproduce as module
from coterie.experiments.compare import Outcome
from coterie.experiments.config import parse_override, resolve
from coterie.experiments.runs import run


@pytest.fixture
def small(tiny_base: Path, reviews_csv: Path) -> list[str]:
    """Settings in place of every run's, so that a run takes a moment."""
    return [
        f"task={{name: file, path: {reviews_csv}, test_limit: 30}}",
        f"model.base={tiny_base}",
        "rounds=3",
        "train.steps=2",
        "train.batch_size=4",
        "partition={minimum: 20}",
        "evaluate={every: 1, clients_every: 3, pooled_limit: 10}",
        "execution={dtype: float32, attention: eager}",
    ]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Comparisons play their runs here, one after another; the fixture lists the folders of the runs."""
    played: list[str] = []

    def compare(
        raw: Mapping[str, Any],
        overrides: Sequence[str],
        methods: Sequence[str],
        seeds: Sequence[int],
        folder: Path,
        **_: Any,
    ) -> Outcome:
        for method in methods:
            for seed in seeds:
                given = [parse_override(text) for text in overrides]
                config = resolve(raw, [*given, (["method"], method), (["seed"], seed)])
                place = folder / f"{method}-seed{seed}"
                if not (place / "summary.json").is_file():
                    played.append(str(place.relative_to(folder.parent)))
                    run(config, place)
        return Outcome({}, {})

    monkeypatch.setattr(module, "compare", compare)
    return played
