"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from coterie.report.catalogue import LAYER, RANK, Facts
from coterie.report.models import further_models
from coterie.report.numbers import decimal, duration, percent, size
from coterie.report.reading import at, number

if TYPE_CHECKING:
    from coterie.assets import Row


def run_table(summary: Mapping[str, Any]) -> Table:
    """The figures of one run, from its summary."""
    table = Table(title=f"{summary['title']}, {summary['rounds']} rounds, {len(summary['clients'])} clients")
    table.add_column("figure")
    table.add_column("value", justify="right")
    scored, own = summary["global"] or {}, summary["personal"] or {}
    pooled, shares = scored.get("pooled") or {}, own.get("clients") or {}
    validation, metric = summary["validation"] or {}, summary["metric"]
    unit = "% correct" if metric == "accuracy" else f"{metric} × 100"
    rows = [
        (f"global model, pooled test, {unit}", percent(pooled.get("score"))),
        ("  always the most frequent class", percent(summary["majority"]["pooled"])),
        (f"clients' own models, own test shares, mean, {unit}", percent(shares.get("mean"))),
        ("  always the own most frequent class", percent(summary["majority"]["own"])),
        ("  worst half of clients", percent(shares.get("worst_50"))),
        ("  worst quarter of clients", percent(shares.get("worst_25"))),
        (f"clients' own models, pooled test, mean, {unit}", percent((own.get("pooled") or {}).get("score"))),
        *((f"{called}, pooled test, {unit}", _pooled(summary, place)) for called, place in further_models(summary)),
        (f"what is deployed, validation shares, {unit}", percent(validation.get("score"))),
        ("training loss, last round", decimal(summary["loss"])),
        ("lost in aggregation (relative, mean of rounds)", decimal(summary["mismatch"])),
        ("sent up, all clients", size(summary["bytes"]["up"])),
        ("sent down, all clients", size(summary["bytes"]["down"])),
        ("time", duration(sum(summary["seconds"].values()))),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _pooled(summary: Mapping[str, Any], place: Sequence[str]) -> str:
    return percent(number(at(summary, *place, "pooled", "score")))


def methods_table(found: Sequence[Facts]) -> Table:
    """What there is to choose from."""
    table = Table(
        title="Methods",
        caption="deployed: beside the weighted sum of the clients' products; linear: the server needs weighted sums "
        f"alone; KiB: of a {LAYER.d_out} x {LAYER.d_in} layer at rank {RANK}; papers are on arXiv; coterie list NAME "
        "tells more",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        box=None,
    )
    table.add_column("name", no_wrap=True)
    for heading in ("ranks", "model", "deployed", "linear"):
        table.add_column(
            heading, width=len("approximate") if heading == "deployed" else None, no_wrap=heading != "deployed"
        )
    for heading in ("KiB up", "down"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("paper")
    for f in found:
        sizes = (f"{size / 1024:.3g}" for size in (f.bytes_up, f.bytes_down))
        paper = f.paper.removeprefix("arXiv ")  # what 80 columns have room for
        table.add_row(f.name, f.ranks, f.model, f.deployed, f.linear, *sizes, paper)
    return table


def method_table(f: Facts, options: Mapping[str, str]) -> Table:
    """One method: its facts, and its options with their defaults."""
    table = Table(title=f"{f.title} ({f.paper})", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in (
        ("ranks", f.ranks),
        ("model", f.model),
        ("deployed", f.deployed),
        ("linear upload", f.linear),
        ("up, per layer", f.up),
        ("down, per layer", f.down),
        *((f"options.{name}", value) for name, value in options.items()),
    ):
        table.add_row(name, value)
    return table


def assets_table(rows: Sequence[Row]) -> Table:
    """What can be fetched and what is there."""
    table = Table(title="Assets")
    for heading in ("name", "what", "licence", "download", "here"):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.name, row.what, row.licence, size(row.size), str(row.path) if row.present else "no")
    return table
