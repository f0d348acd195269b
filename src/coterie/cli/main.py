"""The command line: run, resume, compare, export, list, assets.

What takes long to import (torch, transformers) is imported by the commands that need it, so that help comes at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from coterie.errors import CoterieError

app = typer.Typer(
    name="coterie",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Federated fine-tuning of foundation models among unequal clients.",
    epilog=(
        "[bold]A first run[/bold]: coterie run configs/demo.yaml rounds=2\n\n"
        "[bold]Any setting by its dotted name[/bold]: coterie run configs/demo.yaml method=fedit train.lr=1e-3 "
        r"'clients.ranks=\[2,4,16]'" + "\n\n"
        "[bold]Broken off?[/bold] coterie resume runs/demo-fedpa-lora-seed0 ends with the same bytes.\n\n"
        "[bold]Which method is best here?[/bold] coterie compare configs/demo.yaml --methods fedit,flexlora --seeds 0,1"
    ),
)
assets_app = typer.Typer(help="Models and data that come inside registry packages.", no_args_is_help=False)
app.add_typer(assets_app, name="assets")

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings in place of the file's, such as train.lr=1e-3."),
]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file; see configs/.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: what a user can cause is told in one line, with exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app(arguments)
    except CoterieError as error:
        print(f"coterie: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@app.command()
def run(
    config: ConfigFile,
    settings: Settings = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", "-f", help="Where to write; by default runs/<name>-<method>-seed<seed>."),
    ] = None,
) -> None:
    """Play a whole run in a new folder.

    The folder then holds config.yaml (all settings, versions, plan), partition.json (who holds what), metrics.jsonl
    (a line a round), ledger.jsonl (every message in bytes), checkpoints/, adapters/ (PEFT folders) and summary.json.
    """
    from coterie.experiments.config import load

    chosen = load(config, settings or [])
    from coterie.cli.progress import watcher
    from coterie.experiments.runs import default_folder
    from coterie.experiments.runs import run as play

    place = folder or default_folder(chosen)
    with _resumable(place):
        result = play(chosen, place, watcher())
    _show(result.folder, result.summary)


@app.command()
def resume(
    run: RunFolder,
    round: Annotated[int | None, typer.Option("--round", help="Go back to the checkpoint of this round.")] = None,
) -> None:
    """Go on with a run that was broken off; it ends with the same bytes as one that was not."""
    from coterie.cli.progress import watcher
    from coterie.experiments.runs import resume as play

    with _resumable(run):
        result = play(run, watcher(), round)
    if result.resumed_finished:
        print(f"{run} is finished; nothing was left to do")
    _show(result.folder, result.summary)


@app.command()
def compare(
    config: ConfigFile,
    settings: Settings = None,
    methods: Annotated[str, typer.Option(help="Names, with commas; coterie list shows all.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas; each is a partition and a set of random keys.")] = "0",
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, each in a process of one thread.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write; by default comparisons/<name>.")
    ] = None,
) -> None:
    """Play several methods on the same partitions and compare them.

    Runs that are finished are taken as they are, half-done ones are resumed. Writes comparison.json and comparison.md.
    """
    from coterie.cli.progress import comparison_watcher
    from coterie.experiments.compare import compare as play
    from coterie.experiments.compare import comparison_folder, read_list, read_seeds
    from coterie.experiments.config import read_mapping

    raw = read_mapping(config)
    raw.setdefault("name", config.stem)
    place = out or comparison_folder(str(raw["name"]))
    with _resumable(place, "coterie compare with the same arguments"), _ends_when_told():
        outcome = play(
            raw,
            settings or [],
            read_list(methods, "--methods"),
            read_seeds(seeds),
            place,
            workers=workers,
            watcher=comparison_watcher(),
        )
    from rich.console import Console

    from coterie.report.comparison import table

    console = Console()
    console.print(table(outcome.comparison))
    console.print(outcome.comparison["sentence"], highlight=False)
    print(f"{place}/comparison.md, comparison.json; one folder a run beside them")
    if outcome.failed:
        raise CoterieError("; ".join(f"{name} failed: {reason}" for name, reason in outcome.failed.items()))


@app.command()
def export(
    run: RunFolder,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="A new folder.")],
    client: Annotated[str | None, typer.Option(help="The model of this client.")] = None,
    global_: Annotated[bool, typer.Option("--global", help="The model of all clients together (the default).")] = False,
    merged: Annotated[bool, typer.Option(help="A plain model with the adapter added to its weights.")] = False,
) -> None:
    """Copy a finished run's adapter, as PEFT reads it, or a whole model with --merged."""
    from coterie.errors import ConfigError
    from coterie.experiments.exports import export as copy

    if client is not None and global_:
        raise ConfigError("--client and --global exclude each other; leave one out")
    copy(run, destination, client=client, merged=merged)
    print(f"{destination}: {'a whole model' if merged else 'an adapter for PEFT'}")


@app.command(name="list")
def list_methods() -> None:
    """Show all methods: which ranks they take, whether they aggregate exactly, what travels, which paper."""
    from rich.console import Console

    from coterie.algorithms import METHODS
    from coterie.report.tables import methods_table

    Console().print(methods_table({name: kind.traits for name, kind in METHODS.items()}))


@assets_app.callback(invoke_without_command=True)
def assets(context: typer.Context) -> None:
    """Models and data that come inside registry packages; without a command, list them."""
    if context.invoked_subcommand is None:
        list_assets()


@assets_app.command(name="list")
def list_assets() -> None:
    """Show what there is and what has been fetched."""
    from rich.console import Console

    from coterie.assets import listing
    from coterie.report.tables import assets_table

    Console().print(assets_table(listing()))


@assets_app.command(name="fetch")
def fetch_asset(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Download an asset into the cache of this user."""
    from coterie.assets import fetch

    print(fetch(name))


@assets_app.command(name="remove")
def remove_asset(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Delete an asset from the cache of this user."""
    from coterie.assets import remove

    print(f"{name} was removed" if remove(name) else f"{name} was not there")


def _show(folder: Path, summary: dict[str, object]) -> None:
    from rich.console import Console

    from coterie.report.tables import run_table

    Console().print(run_table(summary))
    print(f"{folder}: metrics.jsonl, ledger.jsonl, adapters/ (load them with PEFT, or coterie export {folder} DEST)")


@contextmanager
def _resumable(folder: Path, way: str = "") -> Iterator[None]:
    """An interruption ends in one line that says how to go on, with exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        begun = bool(way) or (folder / "config.yaml").is_file()
        told = f"what was computed is kept; to go on: {way or f'coterie resume {folder}'}"
        print(f"coterie: interrupted; {told if begun else 'nothing had been computed'}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def _ends_when_told() -> Iterator[None]:
    """A termination signal unwinds this process, which ends its workers, instead of leaving them behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
