"""Several programs on one prepared workload, each as a process of its own, and whether they come to the same end."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from coterie.cli.processes import Watch, busy_cores, descendants
from coterie.errors import ConfigError, nearest

START = "start.safetensors"
"""In a workload's folder: what everybody begins with, where a contender has a twin."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class Contender(BaseModel):
    """script: beside the file; needs: modules without which it cannot run; environment: whose interpreter it needs.

    twin: the contender that does the same in full precision; see `Contest`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    script: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    environment: str | None = None
    twin: str | None = None


class Contest(BaseModel):
    """prepare: a script that makes the workload's folder; tolerance: how far any final weight may be from those of the
    reference.

    A contender in lower precision cannot be that near. It counts if its twin does, which shows that both do the work
    that was asked for, and if its own change from the common start is no further from the reference's change than
    the part `change` of it, in the Euclidean norm of all weights. A step left out, or another one taken, shows there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    prepare: str
    reference: str
    tolerance: float
    change: float | None = None
    workload: dict[str, Any]
    contenders: tuple[Contender, ...]


@dataclass(frozen=True)
class Played:
    """One process: wall and CPU seconds of its rounds and of what came before, the peak of memory in bytes."""

    seconds: float
    cpu: float
    start: float
    start_cpu: float
    peak: int
    busy: float | None
    versions: dict[str, str]


@dataclass
class Row:
    """What is known of a contender. apart: the largest distance of a final weight; drift: where it has a twin, how far
    its change is from the reference's, as a part of that; why: it has no valid figures."""

    contender: Contender
    played: list[Played] = field(default_factory=list)
    apart: float | None = None
    drift: float | None = None
    why: str | None = None

    def figures(self) -> dict[str, Any]:
        """As it is written."""
        valid = self.why is None and bool(self.played)
        found: dict[str, Any] = {"valid": valid, "why": self.why, "apart": self.apart, "drift": self.drift}
        if self.played:
            seconds = [one.seconds for one in self.played]
            found |= {
                "best": min(seconds),
                "median": statistics.median(seconds),
                "seconds": seconds,
                "cpu": statistics.median(one.cpu for one in self.played),
                "start": statistics.median(one.start for one in self.played),
                "start_cpu": statistics.median(one.start_cpu for one in self.played),
                "peak_mib": max(one.peak for one in self.played) / 2**20,
                "busy_before": [one.busy for one in self.played],
                "versions": self.played[-1].versions,
            }
        return found


def read_contest(place: Path) -> Contest:
    """The file of a contest; raises ConfigError for what cannot be meant."""
    try:
        made = Contest(**yaml.safe_load(place.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, TypeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"{place}: cannot be read ({reason})") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{place}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    names = [contender.name for contender in made.contenders]
    if made.reference not in names:
        raise ConfigError(f"{place}: the reference {made.reference!r} is no contender{nearest(made.reference, names)}")
    for one in made.contenders:
        if one.twin is not None and (one.twin not in names or made.change is None):
            lacks = "there is no `change` to judge it by" if one.twin in names else f"{one.twin!r} is no contender"
            raise ConfigError(f"{place}: {one.name!r} has a twin, but {lacks}")
    return made


def require_quiet(most: float = 0.15) -> None:
    """Raises ConfigError while other programs keep more than so many cores busy."""
    busy = busy_cores()
    if busy is not None and busy > most:
        raise ConfigError(
            f"other programs keep {busy:.1f} cores busy, so times would say little; wait until they have ended, or "
            "measure all the same with --loaded"
        )


def prepare(contest: Contest, place: Path, folder: Path) -> None:
    """Makes the workload's folder; raises ConfigError when its script fails."""
    done = subprocess.run(
        [sys.executable, str(place.parent / contest.prepare), str(folder)],
        input=json.dumps(contest.workload),
        capture_output=True,
        text=True,
        env=_environment(),
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"{contest.prepare} failed: {_last_line(done.stderr)}")


def missing(contender: Contender, interpreter: str) -> list[str]:
    """The modules that it needs and this interpreter does not find."""
    asked = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"
    done = subprocess.run([interpreter, "-c", asked, *contender.needs], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{interpreter} is no Python that runs: {_last_line(done.stderr)}")
    return done.stdout.split()


def play(
    contender: Contender, interpreter: str, scripts: Path, folder: Path, out: Path, cores: int, limit: float
) -> Played:
    """Runs one process to its end, on so many cores.

    Raises:
        RuntimeError: it failed, told no marks, or took longer than `limit` seconds.
    """
    busy = busy_cores()
    with (folder / "stderr.txt").open("w+b") as errors, _on_cores(cores):
        began = time.perf_counter()
        process = subprocess.Popen(
            [interpreter, str(scripts / contender.script), str(folder), str(out), *contender.arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_environment(),
            start_new_session=True,
        )
        marks: dict[str, tuple[float, float]] = {}
        versions: dict[str, str] = {}
        assert process.stdout is not None
        ended = threading.Timer(limit, _kill_all, [process.pid])
        ended.start()
        try:
            with Watch(process.pid) as watch:
                for line in process.stdout:
                    if line.startswith("mark: "):
                        marks[line.removeprefix("mark: ").strip()] = time.perf_counter(), watch.cpu()
                    elif line.startswith("versions: "):
                        versions = json.loads(line.removeprefix("versions: "))
                code = process.wait()
        finally:
            ended.cancel()
            _kill_all(process.pid)
            process.wait()
            process.stdout.close()
        errors.seek(0)
        said = _last_line(errors.read().decode(errors="replace"))
    if code or not {"ready", "done"} <= marks.keys():
        raise RuntimeError(f"ended with code {code}: {said}")
    (ready, ready_cpu), (done, done_cpu) = marks["ready"], marks["done"]
    return Played(done - ready, done_cpu - ready_cpu, ready - began, ready_cpu, watch.peak, busy, versions)


def furthest(one: Path, other: Path) -> float:
    """The largest difference of any weight in two files; infinite where they hold different ones."""
    from safetensors.torch import load_file

    a, b = load_file(one), load_file(other)
    if {k: v.shape for k, v in a.items()} != {k: v.shape for k, v in b.items()}:
        return float("inf")
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def drifted(one: Path, other: Path, start: Path) -> float:
    """How far the change of one file from the start is from the other's, as a part of the latter: Euclidean norms."""
    from safetensors.torch import load_file

    a, b, began = load_file(one), load_file(other), load_file(start)
    if {k: v.shape for k, v in a.items()} != {k: v.shape for k, v in b.items()}:
        return float("inf")
    between = sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)
    whole = sum(float((b[name].double() - began[name].double()).square().sum()) for name in b)
    return float((between / whole) ** 0.5) if whole else float("inf")


def contend(
    contest: Contest, place: Path, folder: Path, interpreters: Mapping[str, str], repeats: int, limit: float
) -> Iterator[tuple[list[Row], str]]:
    """Plays all, repeat after repeat; yields the rows so far with the name of whoever has just ended."""
    rows = {contender.name: Row(contender) for contender in contest.contenders}
    outs = {name: folder / f"out-{number}.safetensors" for number, name in enumerate(rows)}
    cores = int(contest.workload.get("cores", 1))
    for row in rows.values():
        lacking = missing(row.contender, _interpreter(row.contender, interpreters))
        row.why = f"not installed: {', '.join(lacking)}" if lacking else None
    for _ in range(repeats):
        for name, row in rows.items():
            if row.why is not None:
                continue
            try:
                interpreter = _interpreter(row.contender, interpreters)
                found = play(row.contender, interpreter, place.parent, folder, outs[name], cores, limit)
                row.played.append(found)
            except RuntimeError as error:
                row.why = str(error)
            _judge(rows, outs, contest, folder / START)
            yield list(rows.values()), name


def _judge(rows: Mapping[str, Row], outs: Mapping[str, Path], contest: Contest, start: Path) -> None:
    """Compares whoever has played with the reference, twins first."""
    reference = outs[contest.reference]
    for name, row in sorted(rows.items(), key=lambda item: item[1].contender.twin is not None):
        if not row.played or row.why is not None or not reference.is_file():
            continue
        row.apart = furthest(outs[name], reference)
        twin = row.contender.twin
        if twin is None:
            if not row.apart <= contest.tolerance:
                row.why = f"void: its end is {row.apart:.1e} from that of {contest.reference}"
            continue
        row.drift = drifted(outs[name], reference, start) if start.is_file() else float("inf")
        if contest.change is None or not row.drift <= contest.change:
            row.why = f"void: its change from the start is {row.drift:.1%} off that of {contest.reference}"
        elif twin not in rows or rows[twin].why is not None:
            row.why = f"void: its twin {twin!r} has no valid figures"


def _interpreter(contender: Contender, interpreters: Mapping[str, str]) -> str:
    return interpreters.get(contender.environment or "", sys.executable)


def _environment() -> dict[str, str]:
    single = dict.fromkeys(THREADS, "1")
    return os.environ | single | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """What is started inside runs on the first so many of the cores that this process may use."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _kill_all(pid: int) -> None:
    """Ends a contender with all that it started."""
    for one in descendants(pid):
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _last_line(text: str) -> str:
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
