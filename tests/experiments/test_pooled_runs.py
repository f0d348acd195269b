"""A run whose clients work in several processes is the run of one process, to the last byte."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from experiments.test_resume import configuration, results

from coterie.engines.in_process import InProcess, Played, Progress
from coterie.experiments.folders import read_config
from coterie.experiments.runs import resume, run
from coterie.training import pool
from coterie.training.pool import PoolExecutor

PERSONAL: dict[str, Any] = {
    "rounds": 3,
    "method": "fedpa-lora",
    "federation": {"sample": 3, "head": "local"},
    "partition": {"minimum": 10, "test_fraction": 0.2},
    "train": {"optimizer": "adamw", "dropout": 0.1},
}
MERGED: dict[str, Any] = {"rounds": 3, "method": "flora", "partition": {"minimum": 10, "validation_fraction": 0.2}}


class Broken(Exception):
    """Ends a run in its middle."""


def with_workers(special: dict[str, Any], count: int, base: Path, data: Path) -> dict[str, Any]:
    made = configuration(special, base, data)
    return {**made, "execution": {**made["execution"], "clients_per_step": 1, "workers": count}}


@pytest.fixture(params=[PERSONAL, MERGED], ids=["personal", "merged base"])
def special(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def test_neither_workers_nor_their_deaths_nor_a_resumption_change_a_byte(
    special: dict[str, Any], tmp_path: Path, tiny_base: Path, reviews_csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    run(with_workers(special, 1, tiny_base, reviews_csv), one)
    expected = results(one)

    play = InProcess.play
    pools: list[PoolExecutor] = []

    def after_a_death(engine: InProcess, progress: Progress) -> Played:
        """Before the second round a worker is killed."""
        assert isinstance(engine.executor, PoolExecutor)
        if progress.round == 1:
            process = engine.executor._workers[0].process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            pools.append(engine.executor)
        return play(engine, progress)

    monkeypatch.setattr(InProcess, "play", after_a_death)
    run(with_workers(special, 2, tiny_base, reviews_csv), two)
    assert results(two) == expected
    assert pools[0].replaced == 1 and read_config(two)[1]["plan"]["workers"] == 2

    def broken(engine: InProcess, progress: Progress) -> Played:
        if progress.round == 2:
            raise Broken
        return play(engine, progress)

    monkeypatch.setattr(InProcess, "play", broken)
    with pytest.raises(Broken):
        run(with_workers(special, 3, tiny_base, reviews_csv), three)
    monkeypatch.setattr(InProcess, "play", play)
    resume(three)
    assert results(three) == expected


def test_workers_end_with_the_run(
    tmp_path: Path, tiny_base: Path, reviews_csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = pool._start
    monkeypatch.setattr(pool, "_start", lambda threads: started.append(start(threads)) or started[-1])
    run(
        with_workers(
            {"rounds": 1, "method": "fedit", "evaluate": {"objective_examples": 0}}, 2, tiny_base, reviews_csv
        ),
        tmp_path / "run",
    )
    assert [process.poll() for process in started] == [-signal.SIGKILL] * 2
