"""The command line: run, resume, compare, report, export, predict and the rest of what `coterie --help` lists.

What takes long to import (torch, transformers) is imported by the commands that need it, so that help comes at once.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.bench import bench
from coterie.cli.compare import compare
from coterie.cli.compress import compress
from coterie.cli.endings import resumable
from coterie.cli.partition import partition
from coterie.cli.predict import predict
from coterie.cli.report import page_after, report
from coterie.cli.reproduce import reproduce
from coterie.cli.score import score
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
        "[bold]Which method is best here?[/bold] coterie compare configs/demo.yaml --methods fedit,flexlora "
        "--seeds 0,1\n\n"
        "[bold]New texts?[/bold] coterie predict runs/demo-fedpa-lora-seed0 new.csv"
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


app.command()(partition)


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
    (a line a round), ledger.jsonl (every message in bytes), checkpoints/, adapters/ (PEFT folders), summary.json and,
    with the extra `report`, report.html.
    """
    from coterie.experiments.config import load

    chosen = load(config, settings or [])
    from coterie.cli.progress import watcher
    from coterie.experiments.runs import default_folder
    from coterie.experiments.runs import run as play

    place = folder or default_folder(chosen)
    with resumable(place):
        result = play(chosen, place, watcher())
    _show(result.folder, result.summary)
    page_after(result.folder)


@app.command()
def resume(
    run: RunFolder,
    round: Annotated[int | None, typer.Option("--round", help="Go back to the checkpoint of this round.")] = None,
) -> None:
    """Go on with a run that was broken off; it ends with the same bytes as one that was not."""
    from coterie.cli.progress import watcher
    from coterie.experiments.runs import resume as play

    with resumable(run):
        result = play(run, watcher(), round)
    if result.resumed_finished:
        print(f"{run} is finished; nothing was left to do")
    _show(result.folder, result.summary)
    if not result.resumed_finished:
        page_after(result.folder)


app.command()(compare)
app.command()(report)
app.command()(reproduce)


@app.command()
def export(
    run: RunFolder,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="A new folder.")],
    client: Annotated[str | None, typer.Option(help="The model of this client.")] = None,
    global_: Annotated[bool, typer.Option("--global", help="The model of all clients together (the default).")] = False,
    merged: Annotated[bool, typer.Option(help="A plain model with the adapter added to its weights.")] = False,
    static: Annotated[
        bool, typer.Option(help="Of routed experts, one adapter with them in the client's own shares.")
    ] = False,
) -> None:
    """Copy a finished run's adapter, as PEFT reads it, or a whole model with --merged."""
    from coterie.errors import ConfigError
    from coterie.experiments.exports import export as copy

    if client is not None and global_:
        raise ConfigError("--client and --global exclude each other; leave one out")
    copy(run, destination, client=client, merged=merged, static=static)
    print(f"{destination}: {'a whole model' if merged else 'an adapter for PEFT'}")


app.command()(predict)
app.command()(compress)
app.command()(score)
app.command()(bench)


@app.command(name="list")
def list_methods(
    name: Annotated[str | None, typer.Argument(metavar="[METHOD]", help="Tell all about this one.")] = None,
) -> None:
    """Show all methods: which ranks they take, whether they aggregate exactly, what travels, which paper."""
    from rich.console import Console

    from coterie.algorithms import METHODS
    from coterie.experiments.methods import method_class, options_of
    from coterie.report.catalogue import catalogue, facts
    from coterie.report.tables import method_table, methods_table

    if name is None:
        Console().print(methods_table(catalogue(METHODS)))
        return
    kind = method_class(name)
    Console().print(method_table(facts(name, kind), options_of(kind)))
    Console().print(inspect.getdoc(kind), highlight=False, markup=False)


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


for command in app.registered_commands:  # a docstring's lines are as long as the file's, not the terminal's
    paragraphs = inspect.getdoc(command.callback) or ""
    command.help = "\n\n".join(" ".join(part.split()) for part in paragraphs.split("\n\n"))


def _show(folder: Path, summary: dict[str, object]) -> None:
    from rich.console import Console

    from coterie.report.tables import run_table

    Console().print(run_table(summary))
    print(f"{folder}: metrics.jsonl, ledger.jsonl, adapters/")
    print(f"to use it: coterie predict {folder} FILE, or coterie export {folder} DEST for PEFT")
