"""Comparisons: methods times seeds, each run in a process of its own, on the same partitions and keys.

The partition and all random keys follow from the seed, never from the method. A comparison that was broken off goes on
when it is started again: finished runs are taken as they are, half-done ones are resumed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from coterie.errors import ConfigError, RunError
from coterie.experiments.build import build
from coterie.experiments.comparison import comparison
from coterie.experiments.config import Config, dump, parse_override, resolve
from coterie.experiments.folders import (
    CONFIG,
    SUMMARY,
    alone_in,
    json_text,
    read_config,
    read_lines,
    write_whole,
)
from coterie.experiments.methods import algorithm, short_name
from coterie.experiments.runs import grounded
from coterie.report.comparison import markdown

POLL = 0.3
"""Seconds between looks at the workers."""


@dataclass(frozen=True)
class Job:
    """One run of a comparison; `rounds` counts those of all its phases."""

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
        return len(read_lines(self.folder / "metrics.jsonl"))

    def last(self) -> dict[str, Any] | None:
        """The metrics of its last round."""
        lines = read_lines(self.folder / "metrics.jsonl")
        return lines[-1] if lines else None


class JobObserver(Protocol):
    """Who watches a comparison."""

    def begin(self, jobs: Sequence[Job]) -> None:
        """Before the first run starts."""

    def look(self, running: Sequence[Job], done: int) -> None:
        """Several times a second."""

    def finished(self, job: Job, error: str | None) -> None:
        """When a run ends; `error` is why it failed."""

    def end(self) -> None:
        """After the last one, and when the comparison breaks off."""


@dataclass(frozen=True)
class Outcome:
    """The comparison of all runs that finished (the content of comparison.json), and why the others failed."""

    comparison: dict[str, Any]
    failed: dict[str, str] = field(default_factory=dict)


def comparison_folder(name: str) -> Path:
    """comparisons/<name>."""
    return Path("comparisons") / name


def compare(
    raw: Mapping[str, Any],
    overrides: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    *,
    workers: int = 1,
    watcher: JobObserver,
) -> Outcome:
    """Plays every method with every seed and writes comparison.json and comparison.md.

    raw: a configuration as read from a file; `options` in it are those of its own `method` alone, `per_method` gives
    sections of single methods. One execution plan, chosen once, serves all runs.

    Raises:
        ConfigError: a setting that cannot be meant, or a folder that holds another comparison.
        RunError: no run finished.
    """
    configs = _configs(raw, overrides, methods, seeds)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: the folder cannot be made ({error.strerror or error})") from error
    with alone_in(folder):
        execution = _execution(folder, configs)
        jobs = []
        for name, config in configs.items():
            settled = config.model_copy(update={"execution": config.execution.model_copy(update=execution)})
            phases = algorithm(config.method, config.options).phases(config.rounds)
            jobs.append(Job(name, settled, folder / name, sum(phase.rounds for phase in phases)))
        _check_same(jobs)
        failed = _play(jobs, max(1, workers), watcher)
        summaries = [json.loads((job.folder / SUMMARY).read_text(encoding="utf-8")) for job in jobs if job.finished]
        if not summaries:
            raise RunError("; ".join(f"{name} failed: {reason}" for name, reason in failed.items()))
        found = comparison(summaries)
        write_whole(folder / "comparison.md", markdown(found))
        write_whole(folder / "comparison.json", json.dumps(json.loads(json_text(found)), indent=1) + "\n")
    return Outcome(found, failed)


def read_list(text: str, what: str) -> list[str]:
    """Names with commas between; raises ConfigError when there is none, or one twice."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"{what} needs different names with commas between, such as fedit,flexlora, not {text!r}")
    return names


def read_seeds(text: str) -> list[int]:
    """Whole numbers with commas between; raises ConfigError for anything else."""
    names = read_list(text, "--seeds")
    if not all(name.isdecimal() for name in names):
        raise ConfigError(f"--seeds needs whole numbers with commas between, such as 0,1,2, not {text!r}")
    return [int(name) for name in names]


def _configs(
    raw: Mapping[str, Any], overrides: Sequence[str], methods: Sequence[str], seeds: Sequence[int]
) -> dict[str, Config]:
    """The settings of every run by its name; all are checked before any is played."""
    given = [parse_override(text) for text in overrides]
    configs = {}
    for seed in seeds:
        for method in methods:
            base = dict(raw)
            if raw.get("method") != method:
                base.pop("options", None)
            config = grounded(resolve(base, [*given, (["method"], method), (["seed"], seed)]))
            algorithm(config.method, config.options)
            configs[f"{short_name(method)}-seed{seed}"] = config
    if len(configs) != len(seeds) * len(methods):
        raise ConfigError("two of the methods have the same class name; rename one")
    return configs


def _execution(folder: Path, configs: Mapping[str, Config]) -> dict[str, Any]:
    """The execution settings of all runs; what is `auto` is settled once and kept for the comparison's next start."""
    first = next(iter(configs.values()))
    if "auto" not in (first.execution.dtype, first.execution.attention, first.execution.clients_per_step):
        return {}
    place = folder / "execution.yaml"
    if place.is_file():
        chosen: dict[str, Any] = yaml.safe_load(place.read_text(encoding="utf-8"))
    else:
        plan = build(first).plan
        chosen = {"dtype": plan.dtype, "attention": plan.attention, "clients_per_step": plan.clients_per_step}
        write_whole(place, yaml.safe_dump(chosen, sort_keys=False))
    given = first.execution.model_dump()
    return {name: value for name, value in chosen.items() if given[name] == "auto"}


def _check_same(jobs: Sequence[Job]) -> None:
    """Raises ConfigError when a folder holds a run of other settings."""
    for job in jobs:
        if not (job.folder / CONFIG).is_file():
            continue
        there, wanted = dump(read_config(job.folder)[0]), dump(job.config)
        if there != wanted:
            key = next(name for name in wanted if there[name] != wanted[name])
            raise ConfigError(
                f"{job.folder} holds a run with another setting {key!r}; choose another folder with --out, or remove it"
            )


def _play(jobs: Sequence[Job], workers: int, watcher: JobObserver) -> dict[str, str]:
    """Plays what is not finished, `workers` at a time; returns why runs failed, by name."""
    waiting = [job for job in jobs if not job.finished]
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
    failed: dict[str, str] = {}
    watcher.begin(jobs)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                running[job.name] = job, _start(job)
            for name, (job, process) in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    if process.returncode != 0 or not job.finished:
                        failed[name] = _reason(job, process.returncode)
                    watcher.finished(job, failed.get(name))
            watcher.look([job for job, _ in running.values()], len(jobs) - len(waiting) - len(running))
            if running:
                time.sleep(POLL)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
        watcher.end()
    return failed


def _start(job: Job) -> subprocess.Popen[bytes]:
    """A worker: it resumes a run that was begun, or starts it. What it says goes into a file beside its folder."""
    arguments = ["resume", str(job.folder)]
    if not (job.folder / CONFIG).is_file():
        place = job.folder.with_suffix(".yaml")
        write_whole(place, yaml.safe_dump(dump(job.config), sort_keys=False, allow_unicode=True))
        arguments = ["run", str(place), "--folder", str(job.folder)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with _log(job).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "coterie", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _log(job: Job) -> Path:
    return job.folder.with_suffix(".log")


def _reason(job: Job, code: int) -> str:
    """The last line that a worker wrote."""
    lines = _log(job).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = lines[-1] if lines else "it said nothing"
    return f"{last.removeprefix('coterie: error: ')} (exit code {code}, see {_log(job)})"
