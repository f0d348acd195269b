"""coterie bench: programs for the same federation side by side, in time, CPU time and memory."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from coterie.cli.contest import Contest, Row


def bench(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A contest, such as benchmarks/peers/small.yaml.")],
    repeats: Annotated[int, typer.Option(min=1, help="How often each plays, in turn and in a new process.")] = 5,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="This contender; repeatable. The reference and its twin play too."),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(metavar="ENVIRONMENT=PATH", help="The interpreter of an environment of the file; repeatable."),
    ] = None,
    limit: Annotated[float, typer.Option(help="Seconds after which a process is ended.")] = 1800.0,
    loaded: Annotated[bool, typer.Option("--loaded", help="Measure although other programs are at work.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Play one workload with several programs and compare their times.

    All get the same model, data, cohorts, mini-batches and optimiser, and one thread a process. A row counts only if
    the adapter that it ends with is that of the reference, but for rounding (of bf16, where it has a twin in fp32).
    Start-up is apart.
    """
    from rich.console import Console

    from coterie.cli.contest import contend, prepare, read_contest, require_quiet

    contest = _chosen(read_contest(file), only or [])
    interpreters = _interpreters(contest, python or [])
    if not loaded:
        require_quiet()
    console = Console(width=None if Console().is_terminal else 120)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="coterie-bench-") as name, console.status("preparing") as status:
        prepare(contest, file, Path(name))
        for rows, ended in contend(contest, file, Path(name), interpreters, repeats, limit):
            status.update(f"{ended} has ended, repeat {max(len(row.played) for row in rows)} of {repeats}")
    console.print(_table(contest, rows))
    for row in rows:
        if row.why is not None:
            print(f"{row.contender.name}: {row.why}")
    if json_file is not None:
        content = {
            "contest": file.name,
            "workload": contest.workload,
            "tolerance": contest.tolerance,
            "change": contest.change,
            "machine": {
                "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
                "system": platform.platform(),
                "python": platform.python_version(),
                "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
            },
            "rows": {row.contender.name: row.figures() for row in rows},
        }
        json_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _chosen(contest: Contest, only: Sequence[str]) -> Contest:
    from coterie.errors import nearest

    names = [contender.name for contender in contest.contenders]
    for name in only:
        if name not in names:
            raise ConfigError(f"there is no contender {name!r}{nearest(name, names)}")
    twins = [one.twin for one in contest.contenders if one.name in only]
    kept = [one for one in contest.contenders if not only or one.name in (*only, *twins, contest.reference)]
    return contest.model_copy(update={"contenders": tuple(kept)})


def _interpreters(contest: Contest, given: Sequence[str]) -> dict[str, str]:
    known = {contender.environment for contender in contest.contenders} - {None}
    found = {}
    for text in given:
        name, _, path = text.partition("=")
        if name not in known:
            raise ConfigError(
                f"--python {text}: the file has no environment {name!r}; it has {sorted(map(str, known))}"
            )
        if not Path(path).is_file():
            raise ConfigError(f"--python {text}: there is no file {path!r}")
        found[name] = str(Path(path).absolute())
    return found


def _table(contest: Contest, rows: Sequence[Row]) -> Table:
    from rich.table import Table

    figures = {row.contender.name: row.figures() for row in rows}
    reference = figures[contest.reference]
    table = Table(title=f"{contest.workload.get('rounds')} rounds; times of valid rows against {contest.reference}")
    for title in ("contender", "best s", "median s", "faster", "CPU s", "start s", "peak MiB", "apart"):
        table.add_column(title, justify="left" if title == "contender" else "right")
    for name, row in figures.items():
        apart = "" if row["apart"] is None else f"{row['apart']:.0e}"
        apart = apart if row["drift"] is None else f"{row['drift']:.1%} of change"
        if not row["valid"]:
            table.add_row(name, *["-"] * 6, apart)
            continue
        times = f"{reference['median'] / row['median']:.2f}×" if reference["valid"] else "-"
        numbers = [f"{row['best']:.3f}", f"{row['median']:.3f}", times, f"{row['cpu']:.2f}", f"{row['start']:.1f}"]
        table.add_row(name, *numbers, f"{row['peak_mib']:.0f}", apart)
    return table
