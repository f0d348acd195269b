"""Progress on stderr: a bar with the time left in a terminal, a plain line for each round elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from coterie.experiments.observers import About, Observer
from coterie.report.numbers import decimal, duration, percent, size

if TYPE_CHECKING:
    from coterie.experiments.compare import Job, JobObserver


def watcher() -> Observer:
    """The observer that suits stderr."""
    return Bar() if sys.stderr.isatty() else Lines()


class Figures:
    """What is shown of a round; traffic is summed over the rounds seen, evaluation apart."""

    def __init__(self) -> None:
        self.bytes = {"up": 0, "down": 0}

    def line(self, metrics: Mapping[str, Any]) -> str:
        """Loss, accuracy and traffic so far, in words."""
        for kind, ways in metrics["bytes"].items():
            if kind != "evaluation":
                for way, amount in ways.items():
                    self.bytes[way] += amount["payload"] + amount["overhead"]
        scored = metrics.get("global") or {}
        pooled = (scored.get("pooled") or {}).get("accuracy")
        own = ((metrics.get("personal") or {}).get("clients") or {}).get("mean")
        told = [f"loss {decimal(metrics['train']['loss'])}"]
        if pooled is not None:
            told.append(f"pooled {percent(pooled)} %")
        if own is not None:
            told.append(f"own {percent(own)} %")
        told.append(f"up {size(self.bytes['up'])}, down {size(self.bytes['down'])}")
        if metrics["failed"] or metrics["late"]:
            told.append(f"failed {len(metrics['failed'])}, late {len(metrics['late'])}")
        return "  ".join(told)


class Lines:
    """One plain line a round."""

    def begin(self, about: About) -> None:
        self._about, self._figures, self._started = about, Figures(), time.monotonic()
        self._played = 0
        print(
            f"{about.title}: rounds {about.first} to {about.rounds} in {about.folder}",
            file=sys.stderr,
            flush=True,
        )

    def round(self, metrics: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        self._played += 1
        left = (time.monotonic() - self._started) / self._played * (self._about.rounds - metrics["round"])
        print(
            f"round {metrics['round']}/{self._about.rounds}  {self._figures.line(metrics)}  left {duration(left)}",
            file=sys.stderr,
            flush=True,
        )

    def note(self, text: str) -> None:
        print(f"coterie: note: {text}", file=sys.stderr, flush=True)

    def end(self) -> None:
        pass


class Bar:
    """A bar over the rounds."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}"),
            console=Console(stderr=True),
        )

    def begin(self, about: About) -> None:
        self._figures = Figures()
        self._progress.start()
        self._task: TaskID = self._progress.add_task(
            about.title, total=about.rounds, completed=about.first - 1, said="first round"
        )

    def round(self, metrics: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        self._progress.update(self._task, completed=metrics["round"], said=self._figures.line(metrics))

    def note(self, text: str) -> None:
        self._progress.console.print(f"note: {text}", highlight=False)

    def end(self) -> None:
        self._progress.stop()


def comparison_watcher() -> JobObserver:
    """The observer of a comparison that suits stderr."""
    return JobBars() if sys.stderr.isatty() else JobLines()


class JobLines:
    """One plain line for each round of each run, with the time left for all."""

    def begin(self, jobs: Sequence[Job]) -> None:
        self._started, self._jobs = time.monotonic(), list(jobs)
        self._played = {job.name: job.played() for job in jobs}
        self._before, self._total = sum(self._played.values()), sum(job.rounds for job in jobs)
        done = sum(job.finished for job in jobs)
        print(f"{len(jobs)} runs, {done} of them finished before", file=sys.stderr, flush=True)

    def look(self, running: Sequence[Job], done: int) -> None:
        for job in running:
            played = job.played()
            if played > self._played[job.name]:
                self._played[job.name] = played
                print(
                    f"{job.name}  round {played}/{job.rounds}  {_state(job)}{self._left()}", file=sys.stderr, flush=True
                )

    def finished(self, job: Job, error: str | None) -> None:
        told = f"failed: {error}" if error else f"finished  {_state(job)}"
        self._played[job.name] = job.rounds
        print(f"{job.name}  {told}", file=sys.stderr, flush=True)

    def end(self) -> None:
        pass

    def _left(self) -> str:
        played = sum(self._played.values())
        left = (time.monotonic() - self._started) / (played - self._before) * (self._total - played)
        return f"  all: round {played}/{self._total}, left {duration(left)}"


class JobBars:
    """A bar over all rounds of all runs, and one for each run that is being played."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}"),
            console=Console(stderr=True),
        )
        self._bars: dict[str, TaskID] = {}

    def begin(self, jobs: Sequence[Job]) -> None:
        self._jobs = list(jobs)
        self._progress.start()
        self._all = self._progress.add_task("all runs", total=sum(job.rounds for job in jobs), said="")

    def look(self, running: Sequence[Job], done: int) -> None:
        for job in running:
            if job.name not in self._bars:
                self._bars[job.name] = self._progress.add_task(job.name, total=job.rounds, said="getting ready")
            self._progress.update(self._bars[job.name], completed=job.played(), said=_state(job))
        played = sum(job.played() for job in self._jobs)
        self._progress.update(self._all, completed=played, said=f"{done} of {len(self._jobs)} finished")

    def finished(self, job: Job, error: str | None) -> None:
        if job.name in self._bars:
            self._progress.update(
                self._bars[job.name],
                completed=job.played(),
                said=f"failed: {error}" if error else _state(job),
            )

    def end(self) -> None:
        self._progress.stop()


def _state(job: Job) -> str:
    """The accuracy that a run has reached."""
    metrics = job.last()
    if metrics is None:
        return "getting ready"
    pooled = ((metrics.get("global") or {}).get("pooled") or {}).get("accuracy")
    own = ((metrics.get("personal") or {}).get("clients") or {}).get("mean")
    return "  ".join(
        text
        for value, text in ((pooled, f"pooled {percent(pooled)} %"), (own, f"own {percent(own)} %"))
        if value is not None
    )
