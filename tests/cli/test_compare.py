"""coterie compare: what it plays, chooses and writes, and what it takes over from an earlier start."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest
import yaml

from coterie.experiments.config import load
from coterie.experiments.folders import write_config
from coterie.experiments.workers import Job
from coterie.training.asks import Plan

Coterie = Callable[..., Any]

WRITTEN = ("comparison.json", "comparison.md")

DIES = """
import os, signal
from dataclasses import dataclass, replace
from pathlib import Path
from coterie.algorithms import FedIT

@dataclass(frozen=True)
class Dies(FedIT):
    traits = replace(FedIT.traits, title="Dies")
    times = 9

    def aggregate(self, state, uploads, server):
        deaths = Path(os.environ["DEATHS"]) / type(self).__name__
        before = len(deaths.read_text()) if deaths.exists() else 0
        if server.round == 2 and before < self.times:
            deaths.write_text("x" * (before + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().aggregate(state, uploads, server)

@dataclass(frozen=True)
class DiesOnce(Dies):
    times = 1
"""


def made(folder: Path, name: str, method: str, seed: int, validation: float | None, pooled: float = 0.5) -> None:
    """A finished run that was never played."""
    scores = {"score": pooled, "accuracy": pooled}
    summary = {
        "method": method,
        "title": method.upper(),
        "metric": "accuracy",
        "seed": seed,
        "rounds": 1,
        "clients": {"a": {}},
        "task": {"test": 100},
        "majority": {"pooled": 0.5, "own": 0.5},
        "global": {"pooled": scores},
        "personal": {"clients": {"mean": pooled, "worst_50": pooled, "worst_25": pooled}, "pooled": scores},
        "validation": None if validation is None else {"score": validation, "loss": 1.0, "examples": 9},
        "mismatch": None,
        "init_mismatch": None,
        "bytes": {"up": 1, "down": 1, "up_per_client": 1.0, "down_per_client": 1.0},
        "seconds": {"clients": 1.0},
    }
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def read(place: Path) -> Any:
    return json.loads(place.read_text(encoding="utf-8"))


def started(small: Path, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A comparison in a process of its own."""
    command = [sys.executable, "-m", "coterie", "compare", str(small), "--out", str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def wait(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    """Until the condition holds; fails when the process ends before."""
    while not condition():
        assert process.poll() is None, "the comparison ended too early"
        time.sleep(0.01)


def is_free(folder: Path) -> bool:
    """Whether no process works on a run within ten seconds."""
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=10)
    except filelock.Timeout:
        return False
    lock.release()
    return True


def test_it_plays_all_writes_the_tables_and_takes_finished_runs_as_they_are(
    coterie: Coterie, small: Path, tmp_path: Path
) -> None:
    arguments = ("compare", small, "rounds=2", "--workers", 2, "--out", "c", "--methods")
    told = coterie(*arguments, "fedit,local-only")
    assert told.code == 0, told
    found = read(tmp_path / "c/comparison.json")
    assert list(found["methods"]) == ["fedit", "local-only"] and found["missing"] == []
    assert found["methods"]["local-only"]["figures"]["pooled"]["mean"] is None
    assert found["methods"]["fedit"]["figures"]["total"]["mean"] > 0
    assert found["methods"]["fedit"]["reached"]["pooled"]["rounds"]["mean"] in (1, 2)
    assert found["paired"]["methods"]["local-only"]["own_mean"]["n"] == 1
    assert "seconds" not in json.dumps(found) and list(read(tmp_path / "c/timing.json")["seconds"]) == list(
        found["methods"]
    )
    assert found["sentence"] in (tmp_path / "c/comparison.md").read_text(encoding="utf-8")
    assert "Local only" in told.out and "one seed: no spread is known" in told.out
    assert max(map(len, told.out.splitlines())) <= 100
    runs = [tmp_path / "c" / f"{name}-seed0" for name in ("fedit", "local-only")]
    assert (runs[0] / "partition.json").read_bytes() == (runs[1] / "partition.json").read_bytes()
    stamps = [(run / "summary.json").stat().st_mtime_ns for run in runs]
    written = [(tmp_path / "c" / name).read_bytes() for name in WRITTEN]
    again = coterie(*arguments, "fedit,local-only")
    assert again.code == 0 and "2 of them finished before" in again.err
    assert [(tmp_path / "c" / name).read_bytes() for name in WRITTEN] == written
    more = coterie(*arguments, "flexlora,fedit,local-only", "--against", "local-only")
    assert more.code == 0 and "3 runs, 2 of them finished before" in more.err
    assert [(run / "summary.json").stat().st_mtime_ns for run in runs] == stamps
    found = read(tmp_path / "c/comparison.json")
    assert list(found["methods"]) == ["flexlora", "fedit", "local-only"]
    assert list(found["paired"]["methods"]) == ["flexlora", "fedit"] and found["paired"]["against"] == "local-only"


def test_other_settings_than_those_of_its_folder_are_refused_by_name(
    coterie: Coterie, small: Path, tmp_path: Path
) -> None:
    arguments = ("compare", small, "--out", "c", "--methods")
    made(tmp_path / "c", "fedit-seed0", "fedit", 0, None)
    assert coterie(*arguments, "fedit").code == 0
    (tmp_path / "c/fedit-seed0/config.yaml").touch()  # a run was begun: from here on settings are settled
    assert "c holds a comparison with train.lr: 0.01, not 1.0" in coterie(*arguments, "fedit", "train.lr=1").complaint
    assert "train.steps: 3, not None" in coterie(*arguments, "flexlora", "train.epochs=1", "train.steps=null").complaint
    assert "partition.validation_fraction: 0.0, not 0.1" in coterie(*arguments, "fedit", "--lrs", "1,2").complaint


def test_settings_of_comparisons_of_which_no_run_was_begun_may_change(
    coterie: Coterie, small: Path, tmp_path: Path
) -> None:
    assert "no run" not in coterie("compare", small, "task.path=none.csv", "--out", "c", "--methods", "fedit").err
    made(tmp_path / "c", "fedit-seed0", "fedit", 0, None)
    assert coterie("compare", small, "--out", "c", "--methods", "fedit").code == 0


def test_seeds_can_be_added(coterie: Coterie, small: Path, tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        made(tmp_path / "c", f"fedit-seed{seed}", "fedit", seed, None, seed / 4)
        seeds = ",".join(map(str, range(seed + 1)))
        assert coterie("compare", small, "--methods", "fedit", "--seeds", seeds, "--out", "c").code == 0
        found = read(tmp_path / "c/comparison.json")
        assert found["seeds"] == list(range(seed + 1))
    assert found["methods"]["fedit"]["figures"]["pooled"]["std"] == 0.25


def test_options_of_a_method_that_differ_are_refused_by_name(coterie: Coterie, small: Path, tmp_path: Path) -> None:
    made(tmp_path / "c", "fedpa-lora-seed0", "fedpa-lora", 0, None)
    config = load(small, ["name=small", "method=fedpa-lora", "options.lam=1.0"])
    write_config(tmp_path / "c/fedpa-lora-seed0", config, Plan(), {})
    arguments = ("compare", small, "--methods", "fedpa-lora", "--out", "c")
    assert coterie(*arguments, "options.lam=1.0").code == 0
    complaint = coterie(*arguments, "options.lam=0.5").complaint
    assert "fedpa-lora-seed0 holds a run with options.lam: 1.0, not 0.5" in complaint


def test_settings_are_chosen_on_validation_shares_whatever_the_tests_say(
    coterie: Coterie, small: Path, tmp_path: Path
) -> None:
    for name, seed, validation, pooled in (
        ("fedit-seed0-lr0.1", 0, 0.7, 0.1),
        ("fedit-seed0-lr0.2", 0, 0.6, 0.9),
        ("fedit-seed1-lr0.1", 1, None, 0.2),
        ("flexlora-seed0-lr0.1", 0, 0.3, 0.9),
        ("flexlora-seed0-lr0.2", 0, 0.4, 0.1),
        ("flexlora-seed1-lr0.2", 1, None, 0.2),
    ):
        made(tmp_path / "c", name, name.partition("-")[0], seed, validation, pooled)
    told = coterie("compare", small, "--methods", "fedit,flexlora", "--seeds", "0,1", "--lrs", "0.1,0.2", "--out", "c")
    assert told.code == 0, told
    found = read(tmp_path / "c/comparison.json")
    tuning = found["tuning"]["methods"]
    assert tuning["fedit"]["chosen"] == {"train.lr": 0.1} and tuning["flexlora"]["chosen"] == {"train.lr": 0.2}
    assert [one["score"] for one in tuning["fedit"]["tried"]] == [0.7, 0.6] and found["tuning"]["seeds"] == [0]
    assert found["methods"]["fedit"]["figures"]["pooled"]["values"] == {"0": 0.1, "1": 0.2}
    text = (tmp_path / "c/comparison.md").read_text(encoding="utf-8")
    assert "| FEDIT | train.lr=0.1 | 70.0 | 1.000 | chosen |" in text and "tests were not looked at" in text


def test_a_method_of_which_nothing_has_a_validation_score_is_named_and_the_others_are_kept(
    coterie: Coterie, small: Path, tmp_path: Path
) -> None:
    made(tmp_path / "c", "fedit-seed0-lr0.1", "fedit", 0, None)
    made(tmp_path / "c", "flexlora-seed0-lr0.1", "flexlora", 0, 0.5)
    told = coterie("compare", small, "--methods", "fedit,flexlora", "--lrs", "0.1", "--out", "c")
    assert told.code == 2 and "fedit failed: none of its runs has a finite validation score" in told.err
    found = read(tmp_path / "c/comparison.json")
    assert list(found["methods"]) == ["flexlora"] and found["missing"] == ["fedit-seed0"]


def test_rates_are_tried_on_a_validation_share_and_the_chosen_one_is_played_with_all_seeds(
    coterie: Coterie, small: Path, tmp_path: Path
) -> None:
    arguments = ("compare", small, "rounds=2", "--methods", "fedit", "--seeds", "0,1", "--lrs", "1e-3,1e-2")
    told = coterie(*arguments, "--workers", 2, "--out", "c")
    assert told.code == 0, told
    found = read(tmp_path / "c/comparison.json")["tuning"]["methods"]["fedit"]
    validations = {
        lr: read(tmp_path / "c" / f"fedit-seed0-lr{lr}" / "summary.json")["validation"] for lr in (0.001, 0.01)
    }
    assert {one["settings"]["train.lr"]: one["by_seed"]["0"] for one in found["tried"]} == {
        lr: {name: one[name] for name in ("score", "loss", "examples")} for lr, one in validations.items()
    }
    best = min(validations, key=lambda lr: (-validations[lr]["score"], validations[lr]["loss"], lr))
    assert found["chosen"] == {"train.lr": best}
    assert sorted(path.name for path in (tmp_path / "c").glob("*-seed1*") if path.is_dir()) == [f"fedit-seed1-lr{best}"]
    recorded = yaml.safe_load((tmp_path / "c" / f"fedit-seed1-lr{best}" / "config.yaml").read_text(encoding="utf-8"))
    assert recorded["train"]["lr"] == best and recorded["partition"]["validation_fraction"] == 0.1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--lrs", "1,2", "partition.validation_fraction=0"), "set partition.validation_fraction above 0"),
        (("--tune", "options.lam=1,2"), "none of the methods has an option 'lam'"),
        (("--tune", "rounds=1,2"), "cannot be tuned"),
        (("--lrs", "0,1"), "train.lr: must be greater than 0"),
        (("--tune-seeds", "1"), "--tune-seeds needs something to tune"),
        (("--against", "flexlor"), "--against 'flexlor' is none of the methods"),
        (("--target", "70"), "--target is a score of at most 1, such as 0.7, not 70"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    coterie: Coterie, small: Path, tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    assert told in coterie("compare", small, "--methods", "fedit", "--out", "c", *arguments).complaint
    assert not (tmp_path / "c").exists()


def test_methods_that_would_get_other_shares_are_refused(coterie: Coterie, small: Path, tmp_path: Path) -> None:
    raw = yaml.safe_load(small.read_text(encoding="utf-8"))
    raw["per_method"] = {"flexlora": {"partition": {"beta": 7.0}}}
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(raw), encoding="utf-8")
    said = coterie("compare", other, "--methods", "fedit,flexlora", "--out", "c").complaint
    assert "flexlora would have partition.beta: 7.0, but fedit" in said and "outside per_method" in said
    assert not (tmp_path / "c").exists()


def test_a_run_that_fails_is_named_and_the_others_are_kept(coterie: Coterie, small: Path, tmp_path: Path) -> None:
    # FedPA-LoRA refuses unequal scales as it starts, in its own process; local training does not mind them.
    told = coterie(
        "compare", small, "rounds=1", "lora.scaling=standard", "--methods", "fedpa-lora,local-only", "--out", "c"
    )
    assert told.code == 2
    assert "fedpa-lora-seed0 failed: " in told.err and "one scale for all clients" in told.err
    found = read(tmp_path / "c/comparison.json")
    assert list(found["methods"]) == ["local-only"] and found["missing"] == ["fedpa-lora-seed0"]


def test_one_plan_is_chosen_once_for_all_runs(
    coterie: Coterie, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = []
    played: list[Job] = []

    def build(config: Any) -> Any:
        probed.append(config)
        return SimpleNamespace(plan=Plan(dtype="bfloat16", attention="eager", clients_per_step=2))

    def play(jobs: Sequence[Job], workers: int, watcher: Any) -> dict[str, str]:
        played.extend(jobs)
        for job in jobs:
            if not job.finished:
                made(tmp_path / "c", job.name, job.config.method, job.config.seed, None)
                write_config(job.folder, job.config, Plan(), {})
        return {}

    monkeypatch.setattr("coterie.experiments.compare.build", build)
    monkeypatch.setattr("coterie.experiments.compare.play", play)
    for methods in ("fedit,local-only", "fedit,local-only,flexlora"):
        told = coterie("compare", small, "execution.dtype=auto", "--methods", methods, "--seeds", "0,1", "--out", "c")
        assert told.code == 0, told
    assert len(probed) == 1 and len(played) == 4 + 6
    assert {job.config.execution.dtype for job in played} == {"bfloat16"}


def test_a_worker_that_is_killed_is_started_once_more_then_told_and_the_others_go_on(
    coterie: Coterie, small: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dies.py").write_text(DIES, encoding="utf-8")
    monkeypatch.setenv("DEATHS", str(tmp_path))
    told = coterie("compare", small, "--methods", "dies.py:Dies,dies.py:DiesOnce", "--out", "c")
    assert told.code == 2
    assert told.err.count("will be started once more") == 2
    assert told.err.splitlines()[-1].startswith("coterie: error: Dies-seed0 failed: its process was killed (SIGKILL)")
    assert told.err.index("Dies-seed0  failed") < told.err.index("DiesOnce-seed0  finished")
    assert ((tmp_path / "Dies").read_text(), (tmp_path / "DiesOnce").read_text()) == ("xx", "x")
    assert read(tmp_path / "c/comparison.json")["missing"] == ["Dies-seed0"]
    assert (tmp_path / "c/DiesOnce-seed0/metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_a_second_comparison_in_one_folder_is_refused_and_a_terminated_one_leaves_no_worker(
    coterie: Coterie, small: Path, tmp_path: Path
) -> None:
    arguments = ("rounds=999", "--methods", "fedit")
    first = started(small, tmp_path / "c", *arguments)
    try:
        wait((tmp_path / "c/fedit-seed0/config.yaml").is_file, first)
        complaint = coterie("compare", small, "--out", "c", *arguments).complaint
        assert "another process is at work" in complaint
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=60) == 143
        assert is_free(tmp_path / "c/fedit-seed0")
    finally:
        first.kill()
        first.wait()


def killed_and_whole(
    small: Path, tmp_path: Path, arguments: tuple[str, ...], moments: list[Callable[[Path], Any]]
) -> None:
    """Kills a comparison at each of these moments, lets it end, and compares what it wrote with one never killed."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for moment in moments:
        process = started(small, killed, *arguments)
        try:
            wait(partial(moment, killed), process)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert not (killed / "comparison.json").exists()
    for folder in (killed, whole):
        assert started(small, folder, *arguments).wait() == 0
    for name in WRITTEN:
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert read(whole / "comparison.json")["missing"] == []


def test_a_comparison_killed_while_it_tunes_and_while_it_plays_ends_with_the_same_bytes(
    small: Path, tmp_path: Path
) -> None:
    def of_seed(seed: int, rounds: int) -> Callable[[Path], bool]:
        return lambda folder: any(
            path.read_bytes().count(b"\n") >= rounds for path in folder.glob(f"fedit-seed{seed}-*/metrics.jsonl")
        )

    arguments = ("rounds=6", "--methods", "fedit", "--seeds", "0,1", "--lrs", "1e-2")
    killed_and_whole(small, tmp_path, arguments, [of_seed(0, 2), of_seed(1, 1)])


@pytest.mark.slow
def test_ten_kills_at_random_moments_leave_no_trace_in_a_comparison(small: Path, tmp_path: Path) -> None:
    draw = random.Random(0)

    def after(seconds: float) -> Callable[[Path], bool]:
        began: list[float] = []

        def over(folder: Path) -> bool:
            began.append(time.monotonic())
            return began[-1] - began[0] > seconds

        return over

    arguments = ("rounds=60", "--methods", "fedit,local-only", "--seeds", "0,1", "--lrs", "1e-3,1e-2")
    moments = [after(draw.uniform(0.5, 12)) for _ in range(10)]
    killed_and_whole(small, tmp_path, (*arguments, "--workers", "2"), moments)
