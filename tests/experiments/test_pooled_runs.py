"""A run whose clients work in several processes is the run of one process, to the last byte."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from experiments.test_resume import configuration, results
from training.forked import Forked

from coterie.engines.in_process import InProcess, Played, Progress
from coterie.experiments.folders import read_config
from coterie.experiments.runs import resume, run
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


def test_neither_workers_nor_their_deaths_nor_a_resumption_change_a_byte_and_none_outlives_its_run(
    special: dict[str, Any],
    tmp_path: Path,
    tiny_base: Path,
    reviews_csv: Path,
    monkeypatch: pytest.MonkeyPatch,
    forked_workers: list[Forked],
) -> None:
    """Before the second round a worker is killed; in the third the run breaks off, and is resumed."""
    one, two = tmp_path / "one", tmp_path / "two"
    run(with_workers(special, 1, tiny_base, reviews_csv), one)
    expected = results(one)

    play = InProcess.play
    pools: list[PoolExecutor] = []
    forked_workers.clear()

    def disturbed(engine: InProcess, progress: Progress) -> Played:
        assert isinstance(engine.executor, PoolExecutor)
        if progress.round == 1:
            process = engine.executor._workers[0].process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            pools.append(engine.executor)
        if progress.round == 2:
            raise Broken
        return play(engine, progress)

    monkeypatch.setattr(InProcess, "play", disturbed)
    with pytest.raises(Broken):
        run(with_workers(special, 2, tiny_base, reviews_csv), two)
    assert pools[0].replaced == 1 and read_config(two)[1]["plan"]["workers"] == 2
    monkeypatch.setattr(InProcess, "play", play)
    resume(two)
    assert results(two) == expected
    assert [process.poll() for process in forked_workers] == [-signal.SIGKILL] * 5
