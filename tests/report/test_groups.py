"""Runs that differ in their seed alone are one curve with its spread; all else keeps apart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coterie.report.groups import POOLED, grouped, metric_of, sent
from coterie.report.reading import read_run


def test_seeds_are_one_group_whose_band_is_the_lowest_and_highest(records: Any) -> None:
    folders = [records(f"s{seed}", seed=seed, scores=(0.5, 0.6 + seed / 10)) for seed in (2, 0, 1)]
    (group,), notes = grouped([read_run(folder) for folder in folders])
    curve = group.curve(POOLED)
    assert curve is not None and not notes
    assert group.label == "FedIT" and group.seeds == [0, 1, 2]
    assert curve.rounds == (1, 2) and curve.seeds == 3
    assert curve.mean == pytest.approx((0.5, 0.7))
    assert curve.low == pytest.approx((0.5, 0.6)) and curve.high == pytest.approx((0.5, 0.8))


def test_a_curve_has_the_rounds_that_all_its_runs_have(records: Any) -> None:
    a, b = records("a", scores=(0.1, 0.2, 0.3)), records("b", seed=1, scores=(0.1, 0.2, 0.3))
    lines = (b / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    middle = json.loads(lines[1])
    del middle["global"]
    (b / "metrics.jsonl").write_text("\n".join([lines[0], json.dumps(middle), lines[2]]), encoding="utf-8")
    (group,), _ = grouped([read_run(a), read_run(b)])
    curve = group.curve(POOLED)
    assert curve is not None and curve.rounds == (1, 3)


def test_settings_that_differ_make_groups_and_name_them(records: Any) -> None:
    runs = [read_run(records(f"lr{lr}", settings={"train": {"lr": lr}})) for lr in (0.001, 0.01)]
    groups, _ = grouped(runs)
    assert [group.label for group in groups] == ["FedIT, lr 0.001", "FedIT, lr 0.01"]
    assert [group.place for group in groups] == [0, 1]


def test_names_and_checkpoints_make_no_difference(records: Any) -> None:
    settings = ({"name": "x", "checkpoint": {"every": 1}}, {"name": "y", "checkpoint": {"every": 5}})
    runs = [read_run(records(f"n{seed}", seed=seed, settings=one)) for seed, one in enumerate(settings)]
    assert len(grouped(runs)[0]) == 1


def test_an_unfinished_seed_is_left_out_of_means_and_named(records: Any) -> None:
    done, half = records("done"), records("half", seed=1, scores=(0.9,), summary=None, settings={"rounds": 2})
    (group,), notes = grouped([read_run(half), read_run(done)])
    assert group.seeds == [0] and len(notes) == 1 and notes[0].startswith("half is left out")


def test_unfinished_runs_alone_are_shown(records: Any) -> None:
    (group,), notes = grouped([read_run(records("half", summary=None))])
    assert group.mean("pooled") == 0.7 and group.mean("majority") is None and not notes


def test_a_second_run_of_the_same_settings_and_seed_does_not_count_twice(records: Any) -> None:
    runs = [read_run(records(name)) for name in ("one", "again")]
    (group,), notes = grouped(runs)
    assert len(group.runs) == 1 and "settings and seed" in notes[0]


def test_bytes_are_of_a_client_and_without_evaluation(records: Any) -> None:
    run = read_run(records("r"))
    assert sent(run, "up") == sent(run, "down") == {1: 512.0, 2: 1024.0}


def test_older_records_have_their_accuracy_as_score(records: Any) -> None:
    pooled = {"pooled": {"loss": 0.4, "accuracy": 0.61, "examples": 400}}
    shares = {"clients": {"accuracy": {"north": 0.5, "south": 0.7}, "mean": 0.6, "worst_25": 0.5}}
    run = read_run(records("r", rows={"global": pooled, "personal": shares}, summary={"metric": None}))
    (group,), _ = grouped([run])
    assert (group.mean("pooled"), group.mean("own"), metric_of(run)) == (0.61, 0.6, "accuracy")


def test_a_baseline_of_answers_is_none_for_another_metric(records: Any) -> None:
    (group,), _ = grouped([read_run(records("r", summary={"metric": "matthews"}))])
    assert group.mean("majority") is None and group.mean("majority_own") is None


def test_what_is_no_finite_number_is_missing(records: Any) -> None:
    rows = {"global": {"pooled": {"score": float("nan")}}, "train": {"loss": "much"}, "mismatch": None}
    (group,), _ = grouped([read_run(records("r", rows=rows))])
    assert group.curve(POOLED) is None
    assert (group.mean("pooled"), group.mean("loss"), group.mean("mismatch")) == (None, None, None)
