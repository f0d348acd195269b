"""`coterie partition`: who would hold which examples, before anything is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

_LEVELS = "▁▂▃▄▅▆▇█"


def partition(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file; see configs/.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings in place of the file's, such as partition.beta=0.1."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.svg", help="Draw who holds what, as SVG.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what a run's partition.json would hold.")
    ] = None,
) -> None:
    """Show who would hold which examples: exactly the shares that a run with these settings has.

    Nothing is trained and no model is loaded.
    """
    from coterie.experiments.config import load

    chosen = load(config, settings or [])
    from rich.console import Console

    from coterie.data.pictures import partition_svg
    from coterie.experiments.folders import json_text
    from coterie.experiments.shares import chosen_task, dealt, share_out

    task = chosen_task(chosen)
    shares = share_out(chosen, task)
    if picture is not None:
        _write(picture, partition_svg(shares.record))
    if json is not None:
        _write(json, json_text(shares.record) + "\n")
    ranks = dealt(chosen.clients.ranks, chosen.clients.count)
    console = Console()
    console.print(table(task.name, shares.record, ranks, list(shares.groups.values())))
    for line in sentences(shares.record):
        console.print(line, highlight=False)
    for place in (picture, json):
        if place is not None:
            print(f"{place} is written")


def table(task: str, record: Mapping[str, Any], ranks: Sequence[int], groups: Sequence[str]) -> Table:
    """A row for each client, or for evenly spaced ones of very many, and one for all together.

    record: the content of partition.json; ranks, groups: of each client, in its order.
    """
    from rich.table import Table

    from coterie.data.pictures import few_classes, few_clients, pieces_of
    from coterie.report.numbers import percent

    histogram, names, kind = pieces_of(record)
    many, title = {"class": ("classes", "labels")}.get(kind, (f"{kind}s", f"{kind}s held"))
    pooled = [sum(column) for column in zip(*histogram, strict=True)]
    # As in the picture: of many classes, the most frequent and all others together.
    bars, legend = few_classes([*histogram, pooled], names)
    clients, how = record["clients"], record["how"]
    parts = [name for name in ("train", "validation", "test") if name in clients[0]]
    grouped = any(group != "all" for group in groups)
    what = "".join(f", {name} {how[name]:g}" for name in ("beta", "shards", "alpha") if how.get(name) is not None)
    made = Table(
        title=f"{task}: {how['kind']}{what}, seed {how['seed']}",
        caption=f"{title}, from left to right: {', '.join(map(_short, legend))}",
    )
    for heading in ("client", *(["group"] if grouped else [])):
        made.add_column(heading, overflow="fold")
    for heading in ("rank", *parts, many, f"top {kind} %"):
        made.add_column(heading, justify="right", overflow="fold")
    made.add_column(title, no_wrap=True)

    def cells(at: int, row: Sequence[int], sizes: Sequence[int]) -> list[str]:
        counts = [f"{size:,}" for size in sizes]
        return [*counts, str(sum(map(bool, row))), percent(max(row) / sum(row)), _bar(bars[at])]

    for at in few_clients(len(clients)):
        sizes = [len(clients[at][part]) for part in parts]
        group = [groups[at]] if grouped else []
        made.add_row(clients[at]["id"], *group, str(ranks[at]), *cells(at, histogram[at], sizes))
    made.add_section()
    totals = [sum(len(held[part]) for held in clients) for part in parts]
    made.add_row("all", *([""] if grouped else []), "", *cells(-1, pooled, totals))
    return made


def sentences(record: Mapping[str, Any]) -> list[str]:
    """What the table does not tell: who holds most and least, how unlike labels are, what the server has."""
    from coterie.data.pictures import few_clients

    facts, clients = record["statistics"], record["clients"]
    sizes: list[int] = facts["sizes"]
    least, most = min(range(len(sizes)), key=sizes.__getitem__), max(range(len(sizes)), key=sizes.__getitem__)
    told = [
        f"{facts['examples']:,} examples of {len(sizes):,} clients; the smallest is {clients[least]['id']} with "
        f"{sizes[least]:,}, the largest {clients[most]['id']} with {sizes[most]:,}"
    ]
    if len(sizes) > 1 and "parts" not in record:  # one label means another thing in each part
        told.append(
            f"mean total variation distance of label shares: {facts['mean_from_pooled']:.3f} from those of all, "
            f"{facts['mean_total_variation']:.3f} between two clients (0: alike, 1: no class in common)"
        )
    told += _of_mixtures(record["mixture"]) if "mixture" in record else []
    if "tests" in record:
        shared = record["tests"]["of_several_clients"]
        told.append(
            f"clients' tests are {record['tests']['examples']:,} examples of the task's test set, {shared:,} of them "
            "in several clients'"
        )
    told += [f"set aside for the server: {held['examples']:,} as {name}" for name, held in record["server"].items()]
    shown = len(few_clients(len(sizes)))
    return told + ([f"{shown} of {len(sizes):,} clients are shown, evenly spaced"] if shown < len(sizes) else [])


def _of_mixtures(mixture: Mapping[str, Any]) -> list[str]:
    """How much of each task (or group) clients hold, and how unlike their mixtures are."""
    used = (f"{name} {mixture['allocated'][name]:,} of {mixture['supply'][name]:,}" for name in mixture["groups"])
    return [
        f"held by clients: {', '.join(used)}",
        f"mean total variation distance of two clients' mixtures: {mixture['mean_total_variation']:.3f}",
    ]


def _bar(row: Sequence[int]) -> str:
    """A column for each class, as high as its count among the row's; a space where there is none of it."""
    highest = max(1, *row)
    return "".join(_LEVELS[(len(_LEVELS) * count - 1) // highest] if count else " " for count in row)


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"


def _write(place: Path, text: str) -> None:
    """Raises ConfigError when the file cannot be written."""
    from coterie.errors import ConfigError

    try:
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{place}: cannot be written ({error.strerror or error})") from error
