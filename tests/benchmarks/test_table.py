"""The table of all benchmarks: it runs each command once, keeps what was seen, and says what was reached."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coterie.cli.contest import read_contest
from coterie.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, pathlib, sys
name, seen, out = sys.argv[1], float(sys.argv[2]), pathlib.Path(sys.argv[4])
with open(name, "a") as file:
    file.write("played ")
if seen < 0:
    raise SystemExit("it rains")
out.write_text(json.dumps({"seen": seen}))
"""


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("table")


def rows_of(table: ModuleType, folder: Path, **seen: float) -> dict[int, Any]:
    """Rows 1, 2, … by name, whose script tells these numbers; at least 2 is wanted, of "less" at most 2."""
    script = folder / "script.py"
    script.write_text(SCRIPT)

    def row(name: str, value: float) -> Any:
        def judged(figures: Any) -> list[Any]:
            return [table.Figure("another", 2.0, figures["seen"], at_most=name == "less")]

        command = f"python {shlex.quote(str(script))} {shlex.quote(str(folder / name))} {value}"
        return table.Row(name, command, judged, note=lambda figures: f"noted {figures['seen']}")

    return {number: row(name, value) for number, (name, value) in enumerate(seen.items(), start=1)}


def test_every_row_is_judged_and_kept_with_its_command(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "ROWS", rows_of(table, tmp_path, more=3.0, less=3.0))
    place = tmp_path / "table.json"
    assert table.run(place, [1, 2], again=False, interpreters={}, loaded=True) == 0
    told = capsys.readouterr().out
    assert "at least      2 ×        3 ×   reached" in told and "at most      2 ×        3 ×   not reached" in told
    assert "noted 3.0" in told and "1 of 2 figures reached" in told
    kept = json.loads(place.read_text())
    assert kept["rows"]["1"]["details"] == {"seen": 3.0} and kept["rows"]["1"]["loaded"] is True
    assert kept["rows"]["1"]["figures"][0]["reached"] and not kept["rows"]["2"]["figures"][0]["reached"]
    assert kept["rows"]["1"]["command"] == table.ROWS[1].command and kept["rows"]["1"]["seconds"] > 0
    assert {"machine", "versions"} <= kept.keys()


def test_rows_that_the_file_has_are_not_played_again_but_failed_ones_are(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "ROWS", rows_of(table, tmp_path, wet=-1.0, dry=3.0))
    place = tmp_path / "table.json"
    assert table.run(place, [1, 2], again=False, interpreters={}, loaded=True) == 1
    assert "1  wet: it rains" in capsys.readouterr().out
    assert table.run(place, [1, 2], again=False, interpreters={}, loaded=True) == 1
    assert (tmp_path / "wet").read_text().split() == ["played"] * 2
    assert (tmp_path / "dry").read_text().split() == ["played"]
    table.run(place, [2], again=True, interpreters={}, loaded=True)
    assert (tmp_path / "dry").read_text().split() == ["played"] * 2


@pytest.mark.parametrize("busy_for", [2, 1000])
def test_a_busy_machine_is_waited_for_but_not_for_ever(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy_for: int
) -> None:
    asked: list[int] = []

    def quiet() -> None:
        asked.append(len(asked))
        if len(asked) <= busy_for:
            raise ConfigError("other programs keep 1.3 cores busy")

    monkeypatch.setattr(table, "ROWS", rows_of(table, tmp_path, more=3.0))
    monkeypatch.setattr(table, "require_quiet", quiet)
    monkeypatch.setattr(table, "PATIENCE", 0.5)
    monkeypatch.setattr(table, "PAUSE", 0.1)
    if busy_for > 100:
        with pytest.raises(ConfigError):
            table.run(tmp_path / "table.json", [1], again=False, interpreters={}, loaded=False)
    else:
        assert table.run(tmp_path / "table.json", [1], again=False, interpreters={}, loaded=False) == 0
    assert (tmp_path / "more").exists() == (busy_for < 100) and len(asked) > 2


def test_a_contest_gives_ratios_of_medians_and_no_figure_for_void_rows(table: ModuleType) -> None:
    valid = {"valid": True, "why": None}
    rows = {
        "ours": valid | {"median": 2.0},
        "loop": valid | {"median": 8.0},
        "other": {"valid": False, "why": "not installed: x"},
    }
    fast, absent = table.contest("ours", {"loop": 3.0, "other": 5.0})({"rows": rows})
    assert (fast.seen, fast.reached) == (4.0, True)
    assert (absent.seen, absent.reached, absent.why) == (None, False, "other: not installed: x")
    rows["ours"] = {"valid": False, "why": "void"}
    assert [one.seen for one in table.contest("ours", {"loop": 3.0})({"rows": rows})] == [None]


def test_interpreters_and_loaded_reach_the_contests_alone(table: ModuleType) -> None:
    known = {"flower": "a/python", "pfl": "b/python"}
    first = table.arguments(table.ROWS[1], known, loaded=True)
    assert first[:4] == [sys.executable, "-m", "coterie", "bench"]
    assert "--loaded" in first and "flower=a/python" in first and "pfl=b/python" in first
    assert "coterie, stacked" in first
    assert table.arguments(table.ROWS[4], known, loaded=True)[1:] == ["benchmarks/peak.py"]
    assert "flower=a/python" not in table.arguments(table.ROWS[2], known, loaded=False)


def test_the_ten_rows_name_scripts_and_contenders_that_exist(table: ModuleType) -> None:
    assert list(table.ROWS) == list(range(1, 11))
    for row in table.ROWS.values():
        asked = shlex.split(row.command)
        if not row.bench:
            assert asked[0] == "python" and (ROOT / asked[1]).is_file()
            continue
        contest = read_contest(ROOT / asked[2])
        names = {one.name for one in contest.contenders}
        played = {asked[i + 1] for i, word in enumerate(asked) if word == "--only"}
        assert played <= names
        assert {one.environment for one in contest.contenders if one.name in (played or names)} - {None} == set(
            row.environments
        )
        everyone = {name: {"valid": True, "why": None, "median": 1.0, "drift": None} for name in names}
        against = {one.against for one in row.judged({"rows": everyone})}
        assert against <= names and (not played or against <= played | {contest.reference})
