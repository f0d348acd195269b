"""coterie bench: what it measures, and which rows it does not count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie.cli import contest as module
from coterie.cli import processes
from coterie.cli.processes import Watch, busy_cores, descendants

LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")

# By hand, since imports would take longer than all that they do.
SAVE = """
import json, pathlib, struct, sys, time

def save(value, place):
    header = json.dumps({"head": {"dtype": "F64", "shape": [3], "data_offsets": [0, 24]}}).encode()
    pathlib.Path(place).write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<3d", *[value] * 3))
"""
PREPARE = f"""
{SAVE}
folder = pathlib.Path(sys.argv[1])
(folder / "work.json").write_text(json.dumps(json.load(sys.stdin)))
save(0.0, folder / "start.safetensors")
"""
CONTENDER = f"""
{SAVE}
folder, out, off = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
rounds = json.loads((folder / "work.json").read_text())["rounds"]
print("mark: ready", flush=True)
time.sleep(0.05 * rounds)
print("mark: done", flush=True)
time.sleep(0.3)
save(1.0 + off, out)
print('versions: {{"torch": "any"}}', flush=True)
"""
CONTENDERS = [
    {"name": "near", "script": "contender.py", "arguments": ["1e-6"]},
    {"name": "reference", "script": "contender.py", "arguments": ["0"]},
    {"name": "far", "script": "contender.py", "arguments": ["1e-3"]},
    {"name": "coarse", "script": "contender.py", "arguments": ["2e-2"], "twin": "near"},
    {"name": "too coarse", "script": "contender.py", "arguments": ["8e-2"], "twin": "near"},
    {"name": "unproven", "script": "contender.py", "arguments": ["2e-2"], "twin": "far"},
    {"name": "broken", "script": "broken.py"},
    {"name": "silent", "script": "silent.py"},
    {"name": "endless", "script": "endless.py"},
    {"name": "absent", "script": "contender.py", "arguments": ["0"], "needs": ["json", "no_such_module"]},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "contest"
    folder.mkdir()
    scripts = {
        "prepare.py": PREPARE,
        "contender.py": CONTENDER,
        "broken.py": "raise ValueError('no such weather')",
        "silent.py": "pass",
        "endless.py": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])",
    }
    for name, text in scripts.items():
        (folder / name).write_text(text, encoding="utf-8")
    content = {
        "prepare": "prepare.py",
        "reference": "reference",
        "tolerance": 1e-5,
        "change": 0.05,
        "workload": {"rounds": 4, "cores": 1},
        "contenders": CONTENDERS,
    }
    place = folder / "contest.yaml"
    place.write_text(yaml.safe_dump(content), encoding="utf-8")
    return place


def test_only_rows_that_end_where_the_reference_does_count(
    coterie: Callable[..., Any], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "busy_cores", lambda: 0.1)  # which looks for a second before every process
    told = coterie("bench", file, "--loaded", "--repeats", 2, "--limit", 5, "--json", tmp_path / "out.json")
    assert told.code == 0
    content = json.loads((tmp_path / "out.json").read_text())
    rows = content["rows"]
    assert {name for name, row in rows.items() if row["valid"]} == {"near", "reference", "coarse"}
    assert rows["near"]["apart"] == pytest.approx(1e-6, rel=0.2) and rows["reference"]["apart"] == 0
    assert len(rows["near"]["seconds"]) == 2 and len(rows["far"]["seconds"]) == 1
    assert 0.2 <= rows["near"]["best"] <= rows["near"]["median"]
    assert rows["near"]["versions"] == {"torch": "any"}
    assert rows["coarse"]["drift"] == pytest.approx(2e-2) and rows["near"]["drift"] is None
    assert "2.0% of change" in told.out
    reasons = {name: row["why"] for name, row in rows.items() if row["why"]}
    assert reasons["far"].startswith("void: its end is 1.0e-03 from that of reference")
    assert reasons["too coarse"] == "void: its change from the start is 8.0% off that of reference"
    assert reasons["unproven"] == "void: its twin 'far' has no valid figures"
    assert reasons["broken"] == "ended with code 1: ValueError: no such weather"
    assert reasons["silent"] == "ended with code 0: it said nothing"
    assert reasons["endless"].startswith("ended with code -9")
    assert reasons["absent"] == "not installed: no_such_module"
    assert all(f"{name}: {reason}" in told.out for name, reason in reasons.items())
    line = next(line for line in told.out.splitlines() if "far" in line and "│" in line)
    assert line.count(" - ") == 6 and "1e-03" in line
    assert content["workload"]["rounds"] == 4 and content["machine"]["cores"] >= 1


def test_a_busy_machine_is_refused_unless_told(
    coterie: Callable[..., Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "busy_cores", lambda: 1.3)
    told = coterie("bench", file, "--only", "near", "--repeats", 1)
    assert "keep 1.3 cores busy" in told.complaint and "--loaded" in told.complaint
    monkeypatch.setattr(module, "busy_cores", lambda: 0.1)
    told = coterie("bench", file, "--only", "near", "--repeats", 1)
    assert told.code == 0 and "near" in told.out and "reference" in told.out and "broken" not in told.out
    told = coterie("bench", file, "--only", "coarse", "--repeats", 1)
    assert told.code == 0 and "near" in told.out and "void" not in told.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nea"], "there is no contender 'nea'; did you mean 'near'?"),
        (["--python", "pfl=/nowhere/python"], "no environment 'pfl'"),
    ],
)
def test_what_cannot_be_meant_is_told(coterie: Callable[..., Any], file: Path, arguments: list[str], said: str) -> None:
    assert said in coterie("bench", file, "--loaded", *arguments).complaint


def test_a_file_that_is_no_contest_is_told(coterie: Callable[..., Any], file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(content | {"reference": "far away"}))
    assert "the reference 'far away' is no contender" in coterie("bench", file).complaint
    file.write_text(yaml.safe_dump(content | {"change": None}))
    assert "'coarse' has a twin, but there is no `change` to judge it by" in coterie("bench", file).complaint
    file.write_text(yaml.safe_dump(content | {"contenders": [*CONTENDERS, CONTENDERS[3] | {"twin": "nobody"}]}))
    assert "'coarse' has a twin, but 'nobody' is no contender" in coterie("bench", file).complaint
    file.write_text(yaml.safe_dump({"prepare": "x"}))
    assert "reference: Field required" in coterie("bench", file).complaint
    assert "cannot be read" in coterie("bench", file.with_name("absent.yaml")).complaint


@LINUX
def test_a_watch_counts_cpu_and_memory_of_grandchildren() -> None:
    work = (
        "x = bytearray(60_000_000)\nimport time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    )
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {work!r}])\nimport time\ntime.sleep(0.5)"
    process = subprocess.Popen([sys.executable, "-c", child])
    with Watch(process.pid, every=0.02) as watch:
        process.wait()
    assert watch.peak > 60_000_000
    assert watch.cpu() > 0.3


@LINUX
def test_a_watch_walks_the_pages_of_processes_only_when_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def look(pid: int) -> int:
        looks.append(pid)
        return 1

    monkeypatch.setattr(processes, "_memory", look)
    work = "import time\ntime.sleep(0.4)\nx = bytearray(60_000_000)\ntime.sleep(0.6)"
    process = subprocess.Popen([sys.executable, "-c", work])
    with Watch(process.pid, every=0.01):
        process.wait()
    assert 2 <= len(looks) <= 25  # of a hundred samples


@LINUX
def test_descendants_are_those_that_still_run() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert process.pid in descendants(os.getpid())
    finally:
        process.kill()
        process.wait()
    assert process.pid not in descendants(os.getpid())


@LINUX
def test_a_core_that_works_is_seen() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        busy = busy_cores(0.5)
    finally:
        process.kill()
        process.wait()
    assert busy is not None and busy > 0.3
