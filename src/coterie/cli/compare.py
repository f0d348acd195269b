"""coterie compare: several methods on the same partitions, and which is best."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.endings import ends_when_told, resumable
from coterie.cli.report import page_after
from coterie.errors import ConfigError, CoterieError

WIDTH = 100
"""Columns of the tables where standard output is no terminal."""


def compare(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file; see configs/.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings in place of the file's, such as train.steps=4."),
    ] = None,
    methods: Annotated[str, typer.Option(help="Names, with commas; coterie list shows all.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas; each is a partition and a set of random keys.")] = "0",
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, each in a process of one thread.")] = 1,
    lrs: Annotated[
        str | None, typer.Option(metavar="RATES", help="Learning rates to choose from for each method, with commas.")
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="Other settings to choose, such as options.lam=0.1,1; repeatable."),
    ] = None,
    tune_seeds: Annotated[
        str | None, typer.Option(metavar="SEEDS", help="Seeds to choose with; by default the first of --seeds.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="METHOD", help="Whom the others are compared with; by default the first.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Count rounds until this score; by default 95 % of the best method's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write; by default comparisons/<name>.")
    ] = None,
) -> None:
    """Play several methods on the same partitions and compare them.

    Runs that are finished are taken as they are, half-done ones are resumed; methods, seeds and rates can be added
    later. What is to be chosen is chosen for each method on clients' validation shares, never on a test. Writes
    comparison.json, comparison.md, timing.json and, with the extra `report`, report.html.
    """
    from coterie.cli.progress import comparison_watcher
    from coterie.experiments.compare import compare as play
    from coterie.experiments.compare import comparison_folder, read_list, read_seeds
    from coterie.experiments.config import read_mapping
    from coterie.experiments.tuning import read_tuning

    if target is not None and not -1 <= target <= 1:
        raise ConfigError(f"--target is a score of at most 1, such as 0.7, not {target:g}")
    raw = read_mapping(config)
    raw.setdefault("name", config.stem)
    place = out or comparison_folder(str(raw["name"]))
    tuning = read_tuning(lrs, tune or [], None if tune_seeds is None else read_seeds(tune_seeds, "--tune-seeds"))
    with resumable(place, "coterie compare with the same arguments"), ends_when_told():
        outcome = play(
            raw,
            settings or [],
            read_list(methods, "--methods"),
            read_seeds(seeds),
            place,
            workers=workers,
            watcher=comparison_watcher(),
            tuning=tuning,
            target=target,
            against=against,
        )
    from rich.console import Console

    from coterie.report.comparison import tables, times

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=WIDTH)
    for table in tables(outcome.comparison):
        console.print(table)
    console.print(outcome.comparison["sentence"], highlight=False, markup=False)
    console.print(times(outcome.timing, outcome.comparison), highlight=False, markup=False)
    print(f"{place}/comparison.md, comparison.json, timing.json; one folder a run beside them")
    page_after(place)
    if outcome.failed:
        raise CoterieError("; ".join(f"{name} failed: {reason}" for name, reason in outcome.failed.items()))
