"""Playing many runs, some at a time, each in a process of its own.

A worker ends when the process that started it does, however that ended; what it had computed is kept and is resumed
by the next start. A worker that is killed, as the system does when memory runs out, is started once more after all
others; one that fails by itself is not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import filelock
import yaml

from coterie.experiments.config import Config, dump
from coterie.experiments.folders import CONFIG, SUMMARY, read_lines, write_whole

POLL = 0.3
"""Seconds between looks at the workers."""

PATIENCE = 10.0
"""Seconds that a worker left over from a comparison that was killed may take to end."""


@dataclass(frozen=True)
class Job:
    """One run of a comparison; `rounds` counts those of all its phases.

    name: what it is called, and no other that is played together with it; on disk it is known by its folder.
    """

    name: str
    config: Config
    folder: Path
    rounds: int

    @property
    def finished(self) -> bool:
        """Whether its summary is there."""
        return (self.folder / SUMMARY).is_file()

    def played(self) -> int:
        """How many rounds its metrics hold."""
        return len(self.metrics())

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of its metrics.jsonl, one for each round."""
        return read_lines(self.folder / "metrics.jsonl")


class JobObserver(Protocol):
    """Who watches the runs of one comparison, or of several that share workers."""

    def plan(self, jobs: Sequence[Job], later: int) -> None:
        """Before the first run starts, and again when tuning has settled which runs follow; a run may be in both.
        later: the rounds of runs that are still to be settled."""

    def look(self, running: Sequence[Job]) -> None:
        """Several times a second."""

    def again(self, job: Job, reason: str) -> None:
        """When a run whose worker was killed will be started once more."""

    def finished(self, job: Job, error: str | None) -> None:
        """When a run ends; `error` is why it failed."""

    def end(self) -> None:
        """After the last one, and when the comparison breaks off."""


def play(jobs: Sequence[Job], workers: int, watcher: JobObserver) -> dict[str, str]:
    """Plays what is not finished, `workers` at a time; returns why runs failed, by name."""
    waiting = [job for job in jobs if not job.finished]
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
    failed: dict[str, str] = {}
    killed: set[str] = set()
    with _ended(running):
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                if _free(job.folder):
                    running[job.name] = job, _start(job)
                else:
                    failed[job.name] = "another process is at work on it"
                    watcher.finished(job, failed[job.name])
            for name, (job, process) in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                if process.stdin is not None:
                    process.stdin.close()
                del running[name]
                if code < 0 and name not in killed:
                    killed.add(name)
                    waiting.append(job)
                    watcher.again(job, _reason(job, code))
                    continue
                if code != 0 or not job.finished:
                    failed[name] = _reason(job, code)
                watcher.finished(job, failed.get(name))
            watcher.look([job for job, _ in running.values()])
            if running:
                time.sleep(POLL)
    return failed


def _free(folder: Path) -> bool:
    """Whether nobody works in a run's folder, now or within PATIENCE."""
    if not folder.is_dir():
        return True
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=PATIENCE)
    except filelock.Timeout:
        return False
    lock.release()
    return True


@contextmanager
def _ended(running: dict[str, tuple[Job, subprocess.Popen[bytes]]]) -> Iterator[None]:
    """Ends what is still running on the way out."""
    try:
        yield
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def _start(job: Job) -> subprocess.Popen[bytes]:
    """A worker: it resumes a run that was begun, or starts it. What it says goes into a file beside its folder.

    Its standard input is a pipe of which this process holds the other end, and says nothing: the pipe closes with
    this process, and the worker ends.
    """
    arguments = ["resume", str(job.folder)]
    if not (job.folder / CONFIG).is_file():
        place = _beside(job, "yaml")
        write_whole(place, yaml.safe_dump(dump(job.config), sort_keys=False, allow_unicode=True))
        arguments = ["run", str(place), "--folder", str(job.folder)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with _beside(job, "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "coterie.cli.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _beside(job: Job, ending: str) -> Path:
    """A file beside a run's folder. The name may hold dots, so it is put together, not changed at its suffix."""
    return job.folder.with_name(f"{job.folder.name}.{ending}")


def _reason(job: Job, code: int) -> str:
    """The last line that a worker wrote, or which signal ended it."""
    log = _beside(job, "log")
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"its process was killed ({name}); where memory ran out, fewer --workers need less (see {log})"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = lines[-1] if lines else "it said nothing"
    return f"{last.removeprefix('coterie: error: ')} (exit code {code}, see {log})"
