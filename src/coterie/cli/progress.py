"""Progress on stderr: a bar with the time left in a terminal, a plain line for each round elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from coterie.experiments.observers import About, Observer
from coterie.report.numbers import decimal, duration, percent, size

if TYPE_CHECKING:
    from coterie.experiments.workers import Job, JobObserver


def watcher() -> Observer:
    """The observer that suits stderr."""
    return Bar() if sys.stderr.isatty() else Lines()


class Figures:
    """What is shown of a round; traffic is summed over the rounds seen, evaluation apart."""

    def __init__(self) -> None:
        self.bytes = {"up": 0, "down": 0}

    def line(self, metrics: Mapping[str, Any]) -> str:
        """Loss, scores and traffic so far, in words."""
        for kind, ways in metrics["bytes"].items():
            if kind != "evaluation":
                for way, amount in ways.items():
                    self.bytes[way] += amount["payload"] + amount["overhead"]
        told = [f"loss {decimal(metrics['train']['loss'])}"]
        if scores := _scores(metrics):
            told.append(scores)
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


class Pace:
    """How fast the rounds of many runs are played, and how long the rest will take.

    Only rounds of this session count, from the first that was seen to end on: before it, processes get ready, and what
    was played in an earlier session took no time of this one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._played: dict[str, int] = {}
        self._later, self._counted = 0, 0
        self._first: float | None = None

    def plan(self, jobs: Sequence[Job], later: int) -> None:
        """Adds runs, with what they have played before; `later` rounds will come in runs that are not known yet."""
        self._later = later
        for job in jobs:
            self._jobs[job.name] = job
            self._played[job.name] = job.rounds if job.finished else job.played()

    def look(self, running: Sequence[Job]) -> list[Job]:
        """The runs that have gone on since the last look. One with fewer rounds than then was resumed."""
        gone_on, gained = [], 0
        for job in running:
            before, now = self._played[job.name], job.played()
            self._played[job.name] = now
            if now > before:
                gone_on.append(job)
                gained += now - before
        if self._first is not None:
            self._counted += gained
        elif gained:
            self._first = self._clock()
        return gone_on

    def close(self, job: Job) -> None:
        """Takes a run for ended, whatever is left of it."""
        self.look([job])
        self._played[job.name] = job.rounds

    @property
    def total(self) -> int:
        """The rounds of all runs."""
        return sum(job.rounds for job in self._jobs.values()) + self._later

    @property
    def played(self) -> int:
        """Those played, in this session and before."""
        return sum(self._played.values())

    @property
    def runs(self) -> int:
        """The runs known so far."""
        return len(self._jobs)

    @property
    def ended(self) -> int:
        """Those that are over."""
        return sum(self._played[name] >= job.rounds for name, job in self._jobs.items())

    def left(self) -> float | None:
        """Seconds; None until a round has ended after the first."""
        if self._first is None or self._counted == 0:
            return None
        return (self._clock() - self._first) / self._counted * (self.total - self.played)

    def told(self) -> str:
        """The rounds of all runs, and the time left, in words."""
        left = self.left()
        return f"all: round {self.played}/{self.total}" + ("" if left is None else f", left {duration(left)}")


class JobLines:
    """One plain line for each round of each run, with the time left for all."""

    def __init__(self) -> None:
        self._pace = Pace()

    def plan(self, jobs: Sequence[Job], later: int) -> None:
        self._pace.plan(jobs, later)
        done = sum(job.finished for job in jobs)
        told = f"{len(jobs)} runs, {done} of them finished before" + (
            "; then those with what is chosen" if later else ""
        )
        print(told, file=sys.stderr, flush=True)

    def look(self, running: Sequence[Job]) -> None:
        for job in self._pace.look(running):
            told = f"round {job.played()}/{job.rounds}  {_state(job)}  {self._pace.told()}"
            print(f"{job.name}  {told}", file=sys.stderr, flush=True)

    def again(self, job: Job, reason: str) -> None:
        print(f"{job.name}  will be started once more: {reason}", file=sys.stderr, flush=True)

    def finished(self, job: Job, error: str | None) -> None:
        self._pace.close(job)
        print(_ending(job, error), file=sys.stderr, flush=True)

    def end(self) -> None:
        pass


class JobBars:
    """A bar over all rounds of all runs, and one for each run that is being played.

    A run that ends leaves a line above the bars: more bars than a terminal has lines would hide those that move.
    """

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            console=Console(stderr=True),
        )
        self._bars: dict[str, TaskID] = {}
        self._pace = Pace()
        self._all = self._progress.add_task("all runs", total=None, said="")

    def plan(self, jobs: Sequence[Job], later: int) -> None:
        self._pace.plan(jobs, later)
        self._progress.start()
        self._overall()

    def look(self, running: Sequence[Job]) -> None:
        self._pace.look(running)
        for job in running:
            self._show(job, _state(job))
        self._overall()

    def again(self, job: Job, reason: str) -> None:
        self._show(job, f"will be started once more: {reason}")

    def finished(self, job: Job, error: str | None) -> None:
        self._pace.close(job)
        if job.name in self._bars:
            self._progress.remove_task(self._bars.pop(job.name))
        self._progress.console.print(_ending(job, error), highlight=False, markup=False)
        self._overall()

    def end(self) -> None:
        self._progress.stop()

    def _show(self, job: Job, said: str) -> None:
        if job.name not in self._bars:
            self._bars[job.name] = self._progress.add_task(job.name, total=job.rounds, said=said)
        self._progress.update(self._bars[job.name], completed=job.played(), said=said)

    def _overall(self) -> None:
        left = self._pace.left()
        said = f"{self._pace.ended} of {self._pace.runs} runs" + ("" if left is None else f", left {duration(left)}")
        self._progress.update(self._all, total=self._pace.total, completed=self._pace.played, said=said)


def _ending(job: Job, error: str | None) -> str:
    """How a run ended, in a line."""
    return f"{job.name}  failed: {error}" if error else f"{job.name}  finished  {_state(job)}"


def _state(job: Job) -> str:
    """The score that a run has reached."""
    metrics = job.metrics()
    return (_scores(metrics[-1]) if metrics else "") or "getting ready"


def _scores(metrics: Mapping[str, Any]) -> str:
    """The global model on the pooled test and the mean of clients' own models, where a round has them."""
    pooled = ((metrics.get("global") or {}).get("pooled") or {}).get("score")
    own = ((metrics.get("personal") or {}).get("clients") or {}).get("mean")
    figures = {"pooled": pooled, "own": own}
    return "  ".join(f"{name} {percent(value)} %" for name, value in figures.items() if value is not None)
