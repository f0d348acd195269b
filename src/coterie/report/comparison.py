"""Comparisons as a table for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from coterie.report.numbers import decimal, duration, percent, size


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)


ROWS: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "pooled": ("global model, pooled test %", percent),
    "majority": ("  always the most frequent class %", percent),
    "own_mean": ("own models, own tests %", percent),
    "majority_own": ("  always the own most frequent class %", percent),
    "own_worst": ("  worst quarter %", percent),
    "own_pooled": ("own models, pooled test %", percent),
    "up_per_client": ("up a client", size),
    "down_per_client": ("down a client", size),
    "total": ("all traffic", size),
    "seconds_clients": ("time of clients", _time),
    "seconds_server": ("time of server", _time),
    "mismatch": ("lost in aggregation", decimal),
    "init_mismatch": ("start mismatch", decimal),
}
"""Every figure: its heading, and how it is written."""

SPREAD = ("pooled", "own_mean", "own_worst", "own_pooled", "mismatch", "init_mismatch")
"""The figures that are written with their standard deviation."""

NOTES = (
    "Accuracies are shares of correct answers after the last round. Own models: the model that each client uses, on "
    "that client's own test share (own tests; worst quarter: the mean of the lowest quarter of clients) and on the "
    "pooled test. Traffic is of whole messages, set-up included, evaluation apart. Lost in aggregation: "
    "||deployed − mean of products|| / ||mean of products||, mean over rounds. Start mismatch: FedPA-LoRA's Eq. 2, "
    "mean of both factors and over rounds. ± is the sample standard deviation over seeds."
)


def table(found: Mapping[str, Any]) -> Table:
    """The figures for the terminal: methods are columns."""
    made = Table(title=_title(found), caption="details: comparison.md")
    made.add_column("")
    for method in found["methods"].values():
        made.add_column(method["title"], justify="right")
    for row in _rows(found):
        made.add_row(*row)
    return made


def markdown(found: Mapping[str, Any]) -> str:
    """comparison.md."""
    heads = ["", *(method["title"] for method in found["methods"].values())]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in _rows(found)]
    return "\n".join([f"# {_title(found)}", "", *lines, "", found["sentence"], "", NOTES, ""])


def _title(found: Mapping[str, Any]) -> str:
    seeds = ", ".join(map(str, found["seeds"]))
    return f"{found['rounds']} rounds, seed{'s' if len(found['seeds']) > 1 else ''} {seeds}"


def _rows(found: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, (heading, write) in ROWS.items():
        cells = []
        for method in found["methods"].values():
            figure = method["figures"][name]
            spread = f" ± {write(figure['std'])}" if name in SPREAD and figure["std"] is not None else ""
            cells.append(write(figure["mean"]) + spread)
        rows.append([heading, *cells])
    return rows
