"""Run folders are read as far as they go, and what is missing is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError, RunError
from coterie.report.reading import client_ranks, collect, read_run, sent_by_client, shown


def test_a_damaged_line_is_left_out_and_named(records: Any) -> None:
    folder = records("r", scores=(0.5, 0.6, 0.7))
    place = folder / "metrics.jsonl"
    lines = place.read_text(encoding="utf-8").splitlines()
    place.write_text("\n".join([lines[0], lines[1][:40], '{"no": "round"}', lines[2]]), encoding="utf-8")
    run = read_run(folder)
    assert [row["round"] for row in run.metrics] == [1, 3]
    assert len(run.gaps) == 1 and "metrics.jsonl: lines 2, 3 damaged" in run.gaps[0]


def test_bytes_that_are_no_text_are_a_damaged_line(records: Any) -> None:
    folder = records("r")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\x00half")
    run = read_run(folder)
    assert len(run.metrics) == 2 and "line 3 damaged" in run.gaps[0]


@pytest.mark.parametrize("name", ["summary.json", "partition.json"])
@pytest.mark.parametrize("content", ["{", "[1, 2]", ""])
def test_other_damaged_records_are_gaps_too(records: Any, name: str, content: str) -> None:
    folder = records("r")
    (folder / name).write_text(content, encoding="utf-8")
    run = read_run(folder)
    assert len(run.gaps) == 1 and name in run.gaps[0] and len(run.metrics) == 2


def test_a_run_without_summary_is_not_finished_and_has_the_title_of_its_method(records: Any) -> None:
    run = read_run(records("r", method="fedpa-lora", summary=None))
    assert not run.finished and run.title == "FedPA-LoRA"
    assert read_run(records("own", method="a/b.py:Mine", summary=None)).title == "Mine"


def test_ranks_of_an_unfinished_run_are_dealt_as_its_settings_say(records: Any) -> None:
    assert client_ranks(read_run(records("r", summary=None))) == {"north": 2, "south": 4}
    many = {"clients": {"count": 5, "ranks": [2, 4], "ids": None}}
    assert client_ranks(read_run(records("n", summary=None, settings=many))) == {
        "00": 2,
        "01": 4,
        "02": 2,
        "03": 4,
        "04": 2,
    }


@pytest.mark.parametrize(
    ("content", "told"),
    [("a: [", "not YAML"), ("- 1", "names no method"), ("rounds: 3", "names no method")],
)
def test_a_config_that_is_none_is_told_in_one_line(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "config.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        collect([tmp_path])


def test_a_place_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run here"):
        collect([tmp_path])
    with pytest.raises(ConfigError, match="there is no such folder"):
        collect([tmp_path / "nowhere"])


def test_a_run_that_played_no_round_is_left_out_or_an_error_when_alone(records: Any) -> None:
    empty, other = records("empty", scores=(), summary=None), records("other")
    with pytest.raises(RunError, match="no round has been played"):
        collect([empty])
    found = collect([empty, other])
    assert [run.folder for run in found.runs] == [other] and "empty: no round has been played" in found.notes[0]


def test_a_folder_of_runs_stands_for_them_each_once_and_in_the_comparisons_order(records: Any, tmp_path: Path) -> None:
    for name, method in (("a", "fedit"), ("b", "flexlora")):
        records(f"c/{name}", method=method)
    comparison = {"methods": {"flexlora": {}, "fedit": {}}}
    (tmp_path / "c/comparison.json").write_text(json.dumps(comparison), encoding="utf-8")
    found = collect([tmp_path / "c"])
    assert [run.method for run in found.runs] == ["flexlora", "fedit"] and found.comparison == comparison
    assert len(collect([tmp_path / "c", tmp_path / "c/a"]).runs) == 2


def test_the_ledger_gives_each_client_its_bytes_without_evaluation(records: Any) -> None:
    folder = records("r")
    rows = [
        {"round": 1, "client": "north", "direction": "up", "kind": "message", "payload": 10, "overhead": 1},
        {"round": 1, "client": "north", "direction": "down", "kind": "evaluation", "payload": 99, "overhead": 1},
        {"round": 2, "client": "south", "direction": "down", "kind": "setup", "payload": 5, "overhead": 0},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "ledger.jsonl").write_text(text, encoding="utf-8")
    assert sent_by_client(read_run(folder)) == {"north": {"up": 11, "down": 0}, "south": {"up": 0, "down": 5}}
    (folder / "ledger.jsonl").unlink()
    assert sent_by_client(read_run(folder)) is None


def test_paths_inside_of_the_home_folder_name_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert shown(Path("/home/someone/runs/a")) == "~/runs/a"
    assert shown(Path("/home/someone-else/runs")) == "/home/someone-else/runs"
    monkeypatch.setenv("HOME", "/")
    assert shown(Path("/data")) == "/data"
