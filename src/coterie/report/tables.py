"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from coterie.report.numbers import decimal, duration, percent, size

if TYPE_CHECKING:
    from coterie.assets import Row
    from coterie.protocol import Traits


def run_table(summary: Mapping[str, Any]) -> Table:
    """The figures of one run, from its summary."""
    table = Table(title=f"{summary['title']}, {summary['rounds']} rounds, {len(summary['clients'])} clients")
    table.add_column("figure")
    table.add_column("value", justify="right")
    scored, own = summary["global"] or {}, summary["personal"] or {}
    pooled, shares = scored.get("pooled") or {}, own.get("clients") or {}
    rows = [
        ("global model, pooled test, % correct", percent(pooled.get("accuracy"))),
        ("  always the most frequent class, %", percent(summary["majority"]["pooled"])),
        ("clients' own models, own test shares, mean %", percent(shares.get("mean"))),
        ("  always the own most frequent class, %", percent(summary["majority"]["own"])),
        ("  worst quarter of clients, %", percent(shares.get("worst_25"))),
        ("clients' own models, pooled test, mean %", percent((own.get("pooled") or {}).get("accuracy"))),
        ("training loss, last round", decimal(summary["loss"])),
        ("lost in aggregation (relative, mean of rounds)", decimal(summary["mismatch"])),
        ("sent up, all clients", size(summary["bytes"]["up"])),
        ("sent down, all clients", size(summary["bytes"]["down"])),
        ("time", duration(sum(summary["seconds"].values()))),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def methods_table(traits: Mapping[str, Traits]) -> Table:
    """What there is to choose from."""
    table = Table(
        title="Methods",
        caption="exact: what is deployed is the mean of the clients' products, whatever they send",
    )
    for heading in ("name", "ranks", "exact", "up", "down", "paper"):
        table.add_column(heading)
    for name, facts in sorted(traits.items()):
        exact = "yes" if facts.exact else "best at its rank" if facts.best_rank else "no"
        table.add_row(name, facts.ranks, exact, facts.up, facts.down, facts.paper)
    return table


def assets_table(rows: Sequence[Row]) -> Table:
    """What can be fetched and what is there."""
    table = Table(title="Assets")
    for heading in ("name", "what", "licence", "download", "here"):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.name, row.what, row.licence, size(row.size), str(row.path) if row.present else "no")
    return table
