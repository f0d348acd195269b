"""`coterie compress`: a smaller model in the place of a large one."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

PATIENCE = 2.0
"""Seconds after which one is told how far it is."""

_LINES = 10.0
"""Seconds between two lines where there is no terminal to draw a bar in."""


def compress(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, an asset's name or a hub name.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Options of the method, such as update=true or alpha=0.4."),
    ] = None,
    ratio: Annotated[float, typer.Option(help="The share of the layers' parameters to keep, in (0, 1].")] = 0.6,
    method: Annotated[str, typer.Option(help="svd, asvd, svd-llm, svd-llm-v2, dobi or qsvd.")] = "svd-llm",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A new folder; by default <model>-<method>-<ratio>.")
    ] = None,
    layers: Annotated[
        str, typer.Option(help="Names or name endings, with commas, or a regular expression of whole names.")
    ] = "all-linear",
    text: Annotated[
        str, typer.Option(help="What to calibrate and measure on: a .txt file, or a task's training texts.")
    ] = "nyt",
    samples: Annotated[int, typer.Option(min=1, help="Windows of text to calibrate on.")] = 32,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 256,
    held_out: Annotated[int, typer.Option(min=0, help="Tokens at the end of the text to measure on.")] = 8192,
    seed: Annotated[int, typer.Option(help="Draws the windows.")] = 0,
    device: Annotated[str, typer.Option(help="As torch names it, such as cuda.")] = "cpu",
) -> None:
    """Replace the linear layers of a decoder or an encoder by two factors, along real text.

    Embeddings and heads stay, and the files' dtype. The folder loads by coterie, as the base of a run too, and its
    compression.json holds ranks, bytes, perplexity (of an encoder: how far hidden states move) and the output error of
    each layer.
    """
    from rich.console import Console

    from coterie.experiments.calibrating import Calibration
    from coterie.experiments.compression import compress_model, compressor
    from coterie.experiments.config import parse_override

    chosen = {".".join(key): value for key, value in map(parse_override, options or [])}
    compressor(method, chosen)
    place = out or Path(f"{Path(model).name}-{method}-{ratio:g}")
    watch = stage_watcher()
    try:
        notes = compress_model(
            model,
            place,
            ratio=ratio,
            method=method,
            options=chosen,
            layers=layers.split(",") if "," in layers else layers,
            calibration=Calibration(text, samples, length, held_out, seed),
            device=device,
            advance=watch.at,
        )
    finally:
        watch.end()
    console = Console()
    console.print(errors_table(notes.ranks, notes.figures))
    for line in sentences(notes.figures):
        console.print(line, highlight=False)
    print(f"{place}: model.safetensors, compression.json")


def errors_table(ranks: dict[str, int], figures: dict[str, Any]) -> Table:
    """Ranks and output errors of the layers of each kind."""
    from rich.table import Table

    made = Table(title="layers", caption="error: ||(W - U V) X|| / ||W X|| on the calibration text")
    made.add_column("kind")
    for heading in ("layers", "rank", "error, mean", "error, worst"):
        made.add_column(heading, justify="right")
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in ranks:
        kinds[name.rpartition(".")[2]].append(name)
    for kind, names in kinds.items():
        low, high = min(ranks[name] for name in names), max(ranks[name] for name in names)
        errors = [figures["output_error"][name] for name in names]
        mean = sum(errors) / len(errors)
        span = str(low) if low == high else f"{low} … {high}"
        made.add_row(kind, str(len(names)), span, f"{mean:.3f}", f"{max(errors):.3f}")
    return made


def sentences(figures: dict[str, Any]) -> list[str]:
    """Bytes, parameters, and what was measured on held-out text."""
    from coterie.report.numbers import duration, figure, percent, size

    whole, these = figures["bytes"], figures["parameters_of_these_layers"]
    told = [
        f"model: {size(whole['before'])} before, {size(whole['after'])} after; these layers keep "
        f"{percent(these['after'] / these['before'])} % of their parameters"
    ]
    if "perplexity" in figures:
        found = figures["perplexity"]
        told.append(
            f"perplexity: {figure(found['before'])} before, {figure(found['after'])} after, on {found['tokens']:,} "
            "held-out tokens"
        )
    if "hidden_states" in figures:
        found = figures["hidden_states"]
        told.append(
            f"last hidden states: moved by {percent(found['relative_error'])} % of their norm, on "
            f"{found['tokens']:,} held-out tokens"
        )
    return [*told, f"compressed in {duration(figures['seconds'])}"]


def stage_watcher() -> _Bars | _Lines:
    """What tells how far each stage is, as suits stderr."""
    return _Bars() if sys.stderr.isatty() else _Lines()


class _Bars:
    """A bar for each stage."""

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self.tasks: dict[str, Any] = {}

    def at(self, what: str, done: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if self.progress is None:
            self.progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.progress.start()
        if what not in self.tasks:
            self.tasks[what] = self.progress.add_task(what, total=total)
        self.progress.update(self.tasks[what], completed=done)

    def end(self) -> None:
        if self.progress is not None:
            self.progress.stop()


class _Lines:
    """A plain line every ten seconds."""

    def __init__(self) -> None:
        self.started, self.told = time.monotonic(), 0.0

    def at(self, what: str, done: int, total: int) -> None:
        seconds = time.monotonic() - self.started
        if seconds > PATIENCE and (not self.told or seconds - self.told >= _LINES):
            self.told = seconds
            print(f"{what} {done}/{total}", file=sys.stderr, flush=True)

    def end(self) -> None:
        pass
