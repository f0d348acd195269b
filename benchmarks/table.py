"""How fast coterie is, in one table: ten workloads, each by its own command, one after the other.

    python benchmarks/table.py --json table.json
    python benchmarks/table.py --json table.json --python flower=envs/flower/bin/python --python pfl=envs/pfl/bin/python

Every row runs the command that stands beside it and reads the figures that this writes; all are kept in the file, with
what is wanted, what was seen and for how long it ran. A row that is in the file already is not run again unless it is
named with --again; one whose command failed is. Times mean something on a quiet machine only, so on a busy one nothing
starts, unless --loaded says so, and then the file does too. COTERIE_DATA names the folder with the questions of row 5.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from standin import machine, versions

from coterie.cli.contest import require_quiet
from coterie.cli.processes import busy_cores
from coterie.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PATIENCE, PAUSE = 60.0, 5.0
"""Seconds for which a busy machine is waited for, since what a row leaves behind may take a while to end."""


@dataclass(frozen=True)
class Figure:
    """What was seen of a row against something; None where its command gave no valid figure, with the reason."""

    against: str
    wanted: float
    seen: float | None
    at_most: bool = False
    unit: str = "×"
    why: str | None = None

    @property
    def reached(self) -> bool:
        """Whether what is wanted was seen."""
        if self.seen is None:
            return False
        return self.seen <= self.wanted if self.at_most else self.seen >= self.wanted

    def told(self, value: float | None) -> str:
        """A number with its unit."""
        if value is None:
            return "-"
        return f"{100 * value:.1f} %" if self.unit == "%" else f"{value:.3g} {self.unit}"


@dataclass(frozen=True)
class Row:
    """One line. command: from the repository's folder, `coterie` or `python` first, without --json. A contest takes
    --loaded too, and interpreters of `environments`; note: what else is told of the figures."""

    workload: str
    command: str
    judged: Callable[[Mapping[str, Any]], list[Figure]]
    environments: tuple[str, ...] = ()
    note: Callable[[Mapping[str, Any]], str] = lambda figures: ""

    @property
    def bench(self) -> bool:
        """Whether it is a contest of `coterie bench`."""
        return self.command.startswith("coterie bench ")


def contest(ours: str, wanted: Mapping[str, float]) -> Callable[[Mapping[str, Any]], list[Figure]]:
    """By how many times `ours` is faster than each of these, of the medians of valid rows."""

    def judged(figures: Mapping[str, Any]) -> list[Figure]:
        rows, found = figures["rows"], []
        for name, least in wanted.items():
            void = next((one for one in (ours, name) if not rows[one]["valid"]), None)
            if void is None:
                found.append(Figure(name, least, rows[name]["median"] / rows[ours]["median"]))
            else:
                found.append(Figure(name, least, None, why=f"{void}: {rows[void]['why']}"))
        return found

    return judged


def drift(figures: Mapping[str, Any]) -> str:
    """How far the row in lower precision ends from the reference."""
    far = figures["rows"]["coterie"]["drift"]
    return (
        ""
        if far is None
        else f"the change of its weights is {far:.1%} off the reference's ({figures['change']:.0%} allowed)"
    )


def growth(figures: Mapping[str, Any]) -> list[Figure]:
    """Of memory.py --many."""
    few, many = (row["growth_mib"] for row in figures["rows"])
    return [Figure("100 clients", 1.2, many / few, at_most=True)]


def shares(figures: Mapping[str, Any]) -> str:
    """Of server_round.py."""
    told = [f"{name} {row['times']:.0f}× and {row['share']:.2%} of a round" for name, row in figures["rows"].items()]
    return "; ".join(told)


PEERS = "coterie bench benchmarks/peers"
ROWS: dict[int, Row] = {
    1: Row(
        "small model (2 layers, width 64, batch 4, 20 clients, 10 a round), one core for all",
        f"{PEERS}/small.yaml --repeats 3 --only 'coterie, stacked' --only pfl --only 'Flower, model cached'",
        contest("coterie, stacked", {"PEFT loop": 3.0, "pfl": 3.0, "Flower, model cached": 5.5}),
        environments=("flower", "pfl"),
    ),
    2: Row(
        "MiniLM, film reviews, 20 clients, batch 32, everybody at their defaults, both cores",
        f"{PEERS}/minilm_defaults.yaml --repeats 2",
        contest("coterie", {"PEFT loop": 12.0, "pfl": 12.0}),
        environments=("pfl",),
        note=drift,
    ),
    3: Row(
        "the same with dynamic padding and fp32 for everybody",
        f"{PEERS}/minilm.yaml --repeats 1 --only 'coterie, pool of 2'",
        contest("coterie, pool of 2", {"PEFT loop": 1.8}),
    ),
    4: Row(
        "MiniLM, a step of 32 × 64 tokens, one core",
        "python benchmarks/peak.py",
        lambda figures: [Figure("a bf16 product's rate", 0.65, figures["share"], unit="%")],
    ),
    5: Row(
        "SmolLM2-135M, multiple choice, all projections, both cores",
        f"{PEERS}/smollm2.yaml --repeats 1",
        contest("coterie", {"PEFT loop": 5.0}),
        note=drift,
    ),
    6: Row(
        "a round of 50 clients, MiniLM, the plan that is chosen",
        "python benchmarks/centralised.py",
        lambda figures: [Figure("central training on the same tokens", 1.05, figures["ratio"], at_most=True)],
    ),
    7: Row(
        "ranks 2 to 16 in one stack",
        "python benchmarks/ranks.py",
        lambda figures: [
            Figure(f"all of rank 16, {name}", 1.1, row["ratio"], at_most=True) for name, row in figures["rows"].items()
        ],
    ),
    8: Row(
        "memory above the loaded process with 10,000 clients",
        "python benchmarks/memory.py --many",
        growth,
    ),
    9: Row(
        "server, 48 layers of 1024², 40 clients of rank 16: SeFoRA",
        "python benchmarks/server_round.py",
        lambda figures: [Figure("SVD of the dense mean", 20.0, figures["rows"]["SeFoRA"]["times"])],
        note=shares,
    ),
    10: Row(
        "import of every public name",
        "python benchmarks/imports.py",
        lambda figures: [
            Figure("beyond import torch", 1.5, figures["rows"]["all public names"]["more"], at_most=True, unit="s")
        ],
    ),
}


def arguments(row: Row, interpreters: Mapping[str, str], loaded: bool) -> list[str]:
    """The command as it is run, without --json."""
    asked = shlex.split(row.command)
    if row.bench:
        asked += ["--loaded"] if loaded else []
        for name in row.environments:
            asked += ["--python", f"{name}={interpreters[name]}"] if name in interpreters else []
    first = [sys.executable, "-m", "coterie"] if asked[0] == "coterie" else [sys.executable]
    return first + asked[1:]


def played(row: Row, interpreters: Mapping[str, str], loaded: bool) -> dict[str, Any]:
    """Runs one row and judges it; `error` in place of figures where its command failed."""
    before, began = busy_cores(), time.perf_counter()
    content: dict[str, Any] = {"workload": row.workload, "command": row.command, "busy_before": before}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        done = subprocess.run(
            [*arguments(row, interpreters, loaded), "--json", str(out)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        content |= {"seconds": time.perf_counter() - began, "said": done.stdout.splitlines()[-20:]}
        if done.returncode or not out.is_file():
            lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            return content | {"error": lines[-1].strip() if lines else f"it ended with code {done.returncode}"}
        figures = json.loads(out.read_text(encoding="utf-8"))
    seen = [asdict(one) | {"reached": one.reached} for one in row.judged(figures)]
    return content | {"figures": seen, "note": row.note(figures), "details": figures}


def lines(number: int, content: Mapping[str, Any]) -> list[str]:
    """A row as it is printed."""
    if "error" in content:
        return [f"{number:2d}  {content['workload']}: {content['error']}", f"    {content['command']}"]
    told = [f"{number:2d}  {content['workload']}"]
    for given in content["figures"]:
        one = Figure(**{name: value for name, value in given.items() if name != "reached"})
        sense = "at most" if one.at_most else "at least"
        reached = "reached" if one.reached else "not reached" if one.seen is not None else f"no figure ({one.why})"
        told.append(
            f"      {one.against:36s} {sense} {one.told(one.wanted):>8s}   {one.told(one.seen):>8s}   {reached}"
        )
    note = [f"      {content['note']}"] if content["note"] else []
    return [*told, *note, f"      {content['seconds']:.0f} s: {content['command']}"]


def wait_until_quiet() -> None:
    """Raises ConfigError where other programs keep the machine busy for longer than PATIENCE."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return require_quiet()
        except ConfigError:
            if time.monotonic() >= end:
                raise
        time.sleep(PAUSE)


def read(place: Path) -> dict[str, Any]:
    """What an earlier run left in the file."""
    if not place.is_file():
        return {"rows": {}}
    found: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    return found


def run(place: Path, numbers: Sequence[int], again: bool, interpreters: Mapping[str, str], loaded: bool) -> int:
    """Plays what is to be played, writes after each row, and prints the table; 1 where a command failed."""
    kept = read(place)
    for number in numbers:
        held = kept["rows"].get(str(number))
        if held is not None and "error" not in held and not again:
            continue
        if not loaded:
            wait_until_quiet()
        print(f"row {number}: {ROWS[number].command}", file=sys.stderr, flush=True)
        made = played(ROWS[number], interpreters, loaded)
        kept["rows"][str(number)] = made | {"loaded": loaded}
        kept |= {"machine": machine(), "versions": versions()}
        place.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    shown = {number: kept["rows"][str(number)] for number in ROWS if str(number) in kept["rows"]}
    for number, content in shown.items():
        print("\n".join(lines(number, content)))
    figures = [one for content in shown.values() for one in content.get("figures", [])]
    print(f"{sum(one['reached'] for one in figures)} of {len(figures)} figures reached")
    return int(any("error" in kept["rows"][str(number)] for number in numbers))


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the file of the table, which is completed")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers with commas between; all by default")
    parser.add_argument("--again", action="store_true", help="run these rows also where the file has them")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="as of coterie bench")
    parser.add_argument("--loaded", action="store_true", help="measure although other programs are at work")
    options = parser.parse_args()
    try:
        numbers = [int(text) for text in options.rows.split(",")]
        interpreters = dict(text.split("=", 1) for text in options.python)
    except ValueError as error:
        parser.error(f"--rows takes numbers, --python NAME=PATH ({error})")
    if unknown := [number for number in numbers if number not in ROWS]:
        parser.error(f"there is no row {unknown[0]}; rows are 1 to {max(ROWS)}")
    try:
        return run(options.json, numbers, options.again, interpreters, options.loaded)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
