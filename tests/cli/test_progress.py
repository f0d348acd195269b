"""The time left of a comparison follows from the rounds that this session has played."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from coterie.cli.progress import JobBars, Pace


@dataclass
class Run:
    """A run of a comparison, as far as its progress is concerned."""

    name: str
    rounds: int
    done: int = 0

    @property
    def finished(self) -> bool:
        return self.done == self.rounds

    def played(self) -> int:
        return self.done

    def metrics(self) -> list[dict[str, Any]]:
        return [{"global": {"pooled": {"score": 0.5}}}] * self.done


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_rounds_of_an_earlier_session_and_the_time_to_get_ready_do_not_count() -> None:
    clock = Clock()
    finished, begun, fresh = Run("a", 10, 10), Run("b", 10, 6), Run("c", 10)
    pace = Pace(clock)
    pace.plan([finished, begun, fresh], 0)
    clock.now += 50  # processes get ready
    pace.look([begun])
    assert pace.left() is None
    begun.done = 5  # the run goes on from its last checkpoint
    pace.look([begun])
    begun.done = 6
    assert pace.look([begun]) == [begun] and pace.left() is None
    clock.now += 2
    begun.done = 7
    pace.look([begun])
    assert (pace.played, pace.total) == (17, 30)
    assert pace.left() == pytest.approx(2 * 13)
    clock.now += 2
    begun.done = 8
    pace.look([begun])
    assert pace.left() == pytest.approx(2 * 12)


def test_rounds_seen_at_once_with_the_first_do_not_make_it_look_fast() -> None:
    clock = Clock()
    runs = [Run("a", 4), Run("b", 4)]
    pace = Pace(clock)
    pace.plan(runs, 0)
    for run in runs:
        run.done = 2
    assert pace.look(runs) == runs
    assert pace.left() is None
    clock.now += 3
    runs[0].done = 3
    assert pace.look(runs) == runs[:1]
    assert pace.left() == pytest.approx(3 * 3)


def test_runs_that_tuning_has_yet_to_settle_count_and_failed_ones_are_over() -> None:
    pace = Pace(Clock())
    tried, chosen = [Run("a", 4), Run("b", 4)], Run("c", 4, 1)
    pace.plan(tried, 4)
    assert pace.total == 12
    tried[0].done = 4
    pace.close(tried[0])
    pace.close(tried[1])
    assert (pace.played, pace.ended) == (8, 2)
    pace.plan([tried[0], chosen], 0)
    assert (pace.total, pace.played, pace.runs, pace.told()) == (12, 9, 3, "all: round 9/12")


def test_equal_runs_of_two_comparisons_are_told_apart_and_counted_together() -> None:
    pace = Pace(Clock())
    first, second = Run("a/fedit-seed0", 4, 4), Run("b/fedit-seed0", 4, 1)
    pace.plan([first, second], 0)
    assert (pace.runs, pace.ended, pace.played, pace.total) == (2, 1, 5, 8)


def test_runs_that_ended_leave_a_line_and_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [Run("a/fedit-seed0", 2), Run("b/fedit-seed0", 2), Run("b/fedit-seed1", 2)]
    bars = JobBars()
    bars.plan(runs, 0)
    bars.look(runs)
    runs[0].done = 2
    bars.finished(runs[0], None)
    bars.finished(runs[1], "out of [memory]")
    bars.end()
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("a/fedit-seed0")] == ["a/fedit-seed0  finished  pooled 50.0 %"]
    assert [line for line in lines if line.startswith("b/fedit-seed0")] == ["b/fedit-seed0  failed: out of [memory]"]
    assert len([line for line in lines if line.startswith("b/fedit-seed1")]) == 1
    assert any(line.startswith("all runs") and "4/6" in line and "2 of 3 runs" in line for line in lines)
