"""`coterie predict`: a column of predictions beside the rows of a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE = 2.0
"""Seconds after which one is told how far it is."""

_LINES = 10.0
"""Seconds between two lines where there is no terminal to draw a bar in."""


def predict(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A finished run, a PEFT adapter, or a model from export --merged.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Rows in .csv, .tsv or .jsonl, or lines in .txt.")],
    client: Annotated[str | None, typer.Option(help="The model of this client of the run.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A new .csv or .jsonl file; by default standard output.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="The column of the texts; by default the run's, or text.")] = None,
    pair: Annotated[str | None, typer.Option(help="The column of second texts; by default the run's, if any.")] = None,
    choices: Annotated[
        str | None, typer.Option(help="Of a language model: answers to choose among, with commas.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of a language model: the longest answer.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time; the predictions are the same.")] = 32,
    base: Annotated[
        str | None, typer.Option(help="The base model, where the adapter's own is not on this machine.")
    ] = None,
    device: Annotated[str, typer.Option(help="As torch names it, such as cuda.")] = "cpu",
) -> None:
    """Put a prediction beside each row of a file, with a run, an adapter or a merged model.

    FOLDER is a finished run, a PEFT adapter, or a model from export --merged; FILE is .csv, .tsv, .jsonl or .txt.

    All columns of FILE come out, and two more: prediction, and its probability.

    A language model goes on with each text, without a probability, or chooses among --choices.
    """
    from coterie.serve.loading import find, open_found
    from coterie.serve.rows import answer
    from coterie.serve.tables import check_out, read_table, write_table

    # What is quickly told comes before the model is loaded.
    if out is not None:
        check_out(out)
    found = find(folder, client)
    table = read_table(file, text or found.form.text, pair or found.form.pair)
    console = _terminal()
    with nullcontext() if console is None else console.status("loading the model"):
        predictor = open_found(found, base, device)
    offered = None if choices is None else [choice.strip() for choice in choices.split(",") if choice.strip()]
    with _watched(len(table)) as advance:
        added = answer(
            predictor,
            table,
            replace(found.form, text=text or found.form.text),
            choices=offered,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            advance=advance,
        )
    kind = (file if out is None else out).suffix.lower().removeprefix(".")
    write_table(table, added, out, "jsonl" if kind in ("jsonl", "ndjson") else "csv")
    if out is not None:
        print(f"{out}: {len(table)} rows with a prediction")


def _terminal() -> Any:
    """A console on stderr where that is a terminal."""
    from rich.console import Console

    return Console(stderr=True) if sys.stderr.isatty() else None


@contextmanager
def _watched(total: int) -> Iterator[Any]:
    """Gives what is to be called with the rows done since; a bar, or now and then a line, once it takes long."""
    started = time.monotonic()
    watch = _Bar(total) if sys.stderr.isatty() else _Lines(total)
    done = 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        seconds = time.monotonic() - started
        if seconds > PATIENCE:
            watch.at(done, seconds)

    try:
        yield advance
    finally:
        watch.end()


class _Bar:
    """A bar with the time left."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.progress: Progress | None = None

    def at(self, done: int, seconds: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if self.progress is None:
            self.progress = Progress(
                TextColumn("predicting"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.progress.start()
            self.task = self.progress.add_task("", total=self.total)
        self.progress.update(self.task, completed=done)

    def end(self) -> None:
        if self.progress is not None:
            self.progress.stop()


class _Lines:
    """A plain line every ten seconds."""

    def __init__(self, total: int) -> None:
        self.total, self.told = total, 0.0

    def at(self, done: int, seconds: float) -> None:
        from coterie.report.numbers import duration

        if not self.told or seconds - self.told >= _LINES:
            self.told = seconds
            left = duration(seconds / done * (self.total - done))
            print(f"predicted {done}/{self.total} rows, left {left}", file=sys.stderr, flush=True)

    def end(self) -> None:
        pass
