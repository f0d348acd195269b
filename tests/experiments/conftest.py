"""What tests of reproductions share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from experiments.reproducing import play_here

from coterie.experiments import reproduce as module
from coterie.experiments.workers import Job, JobObserver


@pytest.fixture(scope="session")
def small(tiny_base: Path, reviews_csv: Path) -> list[str]:
    """Settings in place of every run's, so that a run takes a moment. Read only."""
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
    """Reproductions play their runs here, one after another; the fixture lists the runs' names."""
    played: list[str] = []

    def play(jobs: Sequence[Job], workers: int, watcher: JobObserver) -> dict[str, str]:
        played.extend(job.name for job in jobs if not job.finished)
        return play_here(jobs, workers, watcher)

    monkeypatch.setattr(module, "play", play)
    return played
