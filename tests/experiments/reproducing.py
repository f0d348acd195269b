"""Reproductions computed on the toy world, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coterie.experiments.reproduce import Reproduced, reproduce
from coterie.experiments.runs import run
from coterie.experiments.workers import Job, JobObserver


class Unwatched:
    """An observer of runs that looks away."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def computed(name: str, folder: Path, settings: Sequence[str], **options: Any) -> Reproduced:
    return reproduce(name, folder=folder, settings=settings, **{"watcher": Unwatched(), **options})


def play_here(jobs: Sequence[Job], workers: int, watcher: JobObserver) -> dict[str, str]:
    """Plays what is not finished in this process, one run after another."""
    for job in jobs:
        if not job.finished:
            run(job.config, job.folder)
    return {}
