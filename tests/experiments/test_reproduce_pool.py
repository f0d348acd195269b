"""All runs of a reproduction share one pool of workers, whatever comparison they belong to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import pytest
from experiments.reproducing import Unwatched, computed, play_here

from coterie.errors import ConfigError, RunError
from coterie.experiments import reproduce as module
from coterie.experiments import workers as workers_module
from coterie.experiments.compare import compare
from coterie.experiments.papers.definition import definition
from coterie.experiments.reproduce import Block, Reproduced, plan, with_methods
from coterie.experiments.workers import Job

NAME = "fedpa/table2"
OPTIONS: dict[str, Any] = {"methods": ["fedit"], "seeds": [0, 1]}
WRITTEN = ("comparison.json", "comparison.md", "timing.json")

COPIES = """
import os, shutil, sys, time
source, target, awaited = sys.argv[1:]
latest = time.monotonic() + 60
while awaited and not os.path.exists(awaited):
    if time.monotonic() > latest:
        sys.exit("waited in vain")
    time.sleep(0.02)
shutil.copytree(source, target + ".part", dirs_exist_ok=True)
os.rename(target + ".part", target)
"""
"""A worker that takes over a run played before, once there is what it waits for."""

FAILS = "import sys; sys.exit('cannot be played')"


@dataclass
class Workers:
    """Starts stand-ins for worker processes. Runs are known by the last two parts of their folders.

    awaits: the run that has to be finished before another ends; most: how many were at work at a time; unheld: folders
    of comparisons that were free while runs were played.
    """

    source: Path
    awaits: dict[str, str] = field(default_factory=dict)
    fails: set[str] = field(default_factory=set)
    interrupted_at: str = ""
    started: list[str] = field(default_factory=list)
    unheld: set[str] = field(default_factory=set)
    most: int = 0
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __call__(self, job: Job) -> subprocess.Popen[bytes]:
        comparison, runs = job.folder.parent, job.folder.parents[1]
        run = f"{comparison.name}/{job.folder.name}"
        if run == self.interrupted_at:
            raise KeyboardInterrupt
        self.started.append(run)
        self.unheld |= {place.name for place in runs.iterdir() if is_free(place)}
        awaited = str(runs / self.awaits[run] / "summary.json") if run in self.awaits else ""
        command = [FAILS] if run in self.fails else [COPIES, str(self.source / run), str(job.folder), awaited]
        with job.folder.with_name(f"{job.folder.name}.log").open("wb") as log:
            process = subprocess.Popen([sys.executable, "-c", *command], stdin=subprocess.PIPE, stderr=log)
        self._processes.append(process)
        self.most = max(self.most, sum(one.poll() is None for one in self._processes))
        return process


class Watched(Unwatched):
    """Notes which runs were announced, and whether it was told of the end."""

    def __init__(self) -> None:
        self.plans: list[list[str]] = []
        self.ends = 0

    def plan(self, jobs: Sequence[Job], later: int) -> None:
        self.plans.append([job.name for job in jobs])

    def end(self) -> None:
        self.ends += 1


def is_free(folder: Path) -> bool:
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    lock.release()
    return True


def bytes_of(comparison: Path) -> dict[str, bytes]:
    return {name: (comparison / name).read_bytes() for name in WRITTEN}


@pytest.fixture(scope="module")
def settings(small: list[str]) -> list[str]:
    """With everything settled, so that no execution plan is probed for."""
    return [*small, "execution.clients_per_step=2"]


@pytest.fixture(scope="module")
def blocks() -> list[Block]:
    whole = with_methods(NAME, definition(NAME), OPTIONS["methods"])
    return plan(whole, whole.scales["small"])


@pytest.fixture(scope="module")
def names(blocks: list[Block]) -> list[str]:
    """All runs in the order of their comparisons."""
    found = [f"{block.folder}/fedit-seed{seed}" for block in blocks for seed in OPTIONS["seeds"]]
    assert len(found) == 8
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Reproduced:
    """A reproduction with real runs, of four comparisons with two runs each. Read only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "play", play_here)
        return computed(NAME, tmp_path_factory.mktemp("played"), settings, **OPTIONS)


@pytest.fixture
def workers(played: Reproduced, monkeypatch: pytest.MonkeyPatch) -> Workers:
    made = Workers(played.folder / "runs")
    monkeypatch.setattr(workers_module, "_start", made)
    monkeypatch.setattr(workers_module, "POLL", 0.02)
    return made


def test_a_worker_that_is_free_plays_runs_of_the_next_comparison(
    workers: Workers, played: Reproduced, names: list[str], settings: list[str], tmp_path: Path
) -> None:
    workers.awaits[names[0]] = names[-1]  # the first run of all outlasts every other
    watcher, said = Watched(), list[str]()
    done = computed(NAME, tmp_path, settings, workers=2, watcher=watcher, say=said.append, **OPTIONS)
    assert done.failed == {} and workers.started == names and workers.most == 2
    assert done.result["rows"] == played.result["rows"]
    assert watcher.plans == [names] and watcher.ends == 1 and said == [f"{NAME}: 8 runs in 4 comparisons"]


def test_runs_begin_one_by_one_in_the_order_of_comparisons_where_there_is_one_worker(
    workers: Workers, names: list[str], settings: list[str], tmp_path: Path
) -> None:
    computed(NAME, tmp_path, settings, **OPTIONS)
    assert workers.started == names and workers.most == 1


def test_comparisons_are_held_while_runs_of_any_are_played_and_free_afterwards(
    workers: Workers, blocks: list[Block], settings: list[str], tmp_path: Path
) -> None:
    computed(NAME, tmp_path, settings, **OPTIONS)
    assert len(workers.started) == 8 and workers.unheld == set()
    assert all(is_free(tmp_path / "runs" / block.folder) for block in blocks)
    with filelock.FileLock(tmp_path / "runs" / blocks[-1].folder / ".lock"), pytest.raises(RunError) as error:
        computed(NAME, tmp_path, settings, **OPTIONS)
    assert f"{blocks[-1].folder}: another process is at work" in str(error.value)


def test_each_comparison_is_as_compare_alone_makes_it_and_its_folder_is_taken_over(
    workers: Workers, blocks: list[Block], settings: list[str], tmp_path: Path
) -> None:
    computed(NAME, tmp_path / "pool", settings, workers=2, **OPTIONS)
    for block in blocks:
        place = tmp_path / "alone" / "runs" / block.folder
        watcher: Any = Unwatched()
        compare(block.config, settings, block.methods, OPTIONS["seeds"], place, workers=2, watcher=watcher)
        assert bytes_of(place) == bytes_of(tmp_path / "pool" / "runs" / block.folder)
    assert len(workers.started) == 16
    over = computed(NAME, tmp_path / "alone", settings, **OPTIONS)
    assert len(workers.started) == 16 and over.result["rows"]["fedit"]["here"]
    for block in blocks:
        assert bytes_of(tmp_path / "alone" / "runs" / block.folder) == bytes_of(tmp_path / "pool/runs" / block.folder)


def test_a_run_that_fails_is_named_with_its_comparison_and_the_others_are_kept(
    workers: Workers, blocks: list[Block], names: list[str], settings: list[str], tmp_path: Path
) -> None:
    workers.fails = {names[3]}
    done = computed(NAME, tmp_path, settings, workers=2, **OPTIONS)
    assert workers.started == names and list(done.failed) == [names[3]]
    assert done.failed[names[3]].startswith("cannot be played (exit code 1")
    missing = [
        json.loads((tmp_path / "runs" / block.folder / "comparison.json").read_text())["missing"] for block in blocks
    ]
    assert missing == [[], ["fedit-seed1"], [], []]
    column = next(iter(done.result["columns"]))
    assert done.result["rows"]["fedit"]["here"][column]["own"]["values"].keys() == {"0", "1"}


def test_a_comparison_without_any_run_is_told_after_the_others_are_written_and_the_next_start_plays_what_is_missing(
    workers: Workers, played: Reproduced, blocks: list[Block], names: list[str], settings: list[str], tmp_path: Path
) -> None:
    workers.fails = {names[0], names[1], names[5]}
    watcher = Watched()
    with pytest.raises(RunError) as error:
        computed(NAME, tmp_path, settings, workers=2, watcher=watcher, **OPTIONS)
    assert sorted(workers.started) == sorted(names) and watcher.ends == 1
    told = str(error.value).split("; ")
    assert {one.partition(" failed: cannot be played")[0] for one in told} == workers.fails
    written = [(tmp_path / "runs" / block.folder / "comparison.json").is_file() for block in blocks]
    assert written == [False, True, True, True] and not (tmp_path / "result.json").exists()
    again, workers.fails = sorted(workers.fails), set()
    workers.started.clear()
    done = computed(NAME, tmp_path, settings, workers=2, **OPTIONS)
    assert sorted(workers.started) == again and done.result["rows"] == played.result["rows"]


def test_an_interrupted_reproduction_goes_on_with_what_is_unfinished(
    workers: Workers, played: Reproduced, blocks: list[Block], names: list[str], settings: list[str], tmp_path: Path
) -> None:
    workers.interrupted_at = names[5]
    watcher = Watched()
    with pytest.raises(KeyboardInterrupt):
        computed(NAME, tmp_path, settings, watcher=watcher, **OPTIONS)
    assert watcher.ends == 1 and all(is_free(tmp_path / "runs" / block.folder) for block in blocks)
    workers.interrupted_at = ""
    done = computed(NAME, tmp_path, settings, **OPTIONS)
    assert workers.started == names and done.result["rows"] == played.result["rows"]


def test_settings_of_all_comparisons_are_checked_before_any_run_begins(
    workers: Workers, played: Reproduced, blocks: list[Block], settings: list[str], tmp_path: Path
) -> None:
    last = tmp_path / "runs" / blocks[-1].folder
    (last / "fedit-seed0").mkdir(parents=True)
    other = (played.folder / "runs" / blocks[0].folder / "fedit-seed0" / "config.yaml").read_text(encoding="utf-8")
    (last / "fedit-seed0" / "config.yaml").write_text(other, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds a run with partition\.beta: 100"):
        computed(NAME, tmp_path, settings, **OPTIONS)
    assert workers.started == []
