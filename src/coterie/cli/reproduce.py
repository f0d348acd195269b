"""`coterie reproduce`: the papers' tables and figures, computed anew."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.errors import ConfigError, CoterieError

if TYPE_CHECKING:
    from rich.table import Table

    from coterie.experiments.papers.definition import Definition


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Such as fedpa/table2; without a name, list all.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings in place of every run's, such as rounds=5."),
    ] = None,
    scale: Annotated[str, typer.Option(help="small (minutes on two cores) or paper (the paper's own setting).")] = (
        "small"
    ),
    seeds: Annotated[str | None, typer.Option(help="Seeds, with commas; by default those of the scale.")] = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods, with commas, in place of the paper's; coterie list shows all.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, each in a process of one thread.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write; by default reproductions/<name>-<scale>.")
    ] = None,
) -> None:
    """Compute a table or figure of a paper anew and put it beside what the paper reports.

    Finished runs are taken as they are, half-done ones are resumed. Writes result.json, result.md and, of a figure,
    figure.svg and figure.png: what differs from the paper, line by line, and which of its statements hold here.
    """
    from rich.console import Console

    if name is None:
        from coterie.experiments.papers.definition import definition, names

        Console().print(_listing({each: definition(each) for each in names()}))
        return
    from coterie.cli.compress import stage_watcher
    from coterie.cli.endings import ends_when_told, resumable
    from coterie.cli.progress import comparison_watcher
    from coterie.experiments.compare import read_list, read_seeds
    from coterie.experiments.papers.writing import claims, tables
    from coterie.experiments.reproduce import reproduce as compute
    from coterie.experiments.reproduce import reproduction_folder

    if "=" in name:
        raise ConfigError(f"{name!r} is a setting; the name comes first, such as coterie reproduce fedpa/table2 {name}")
    place = out or reproduction_folder(name, scale)
    stages = stage_watcher()
    with resumable(place, "coterie reproduce with the same arguments"), ends_when_told(), ExitStack() as leaving:
        leaving.callback(stages.end)
        found = compute(
            name,
            scale=scale,
            seeds=None if seeds is None else read_seeds(seeds),
            methods=None if methods is None else read_list(methods, "--methods"),
            settings=settings or [],
            folder=place,
            workers=workers,
            watcher=comparison_watcher(),
            say=lambda text: print(text, file=sys.stderr, flush=True),
            advance=stages.at,
        )
    print("\n".join([f"{found.result['title']} ({found.result['paper']})", "", *tables(found.result)]))
    print("\n".join(claims(found.result)))
    print(f"\n{place}: result.md, result.json" + (", figure.svg, figure.png" if "picture" in found.result else ""))
    if found.failed:
        raise CoterieError("; ".join(f"{run} failed: {reason}" for run, reason in found.failed.items()))


def _listing(definitions: Mapping[str, Definition]) -> Table:
    """Every reproduction: what it shows, how it stands with its time at small scale."""
    from rich.table import Table

    made = Table(title="coterie reproduce NAME", caption="time: at small scale with two workers on two cores")
    for heading in ("name", "what", "time"):
        made.add_column(heading)
    for name, whole in definitions.items():
        minutes = whole.scales["small"].minutes
        time = "not measured" if minutes is None else f"{minutes:g} min"
        made.add_row(name, f"{whole.title} ({whole.paper}): {whole.shows}", time)
    return made
