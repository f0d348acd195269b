"""Who holds what, as a picture: plain SVG that stands alone or inside a page, in light and in dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

COLOURS = (
    "#4a8fd6",
    "#d9731a",
    "#3f9a54",
    "#d6608c",
    "#9b7ad6",
    "#a5794a",
    "#1f9c96",
    "#8f8c22",
    "#d0604f",
    "#858b93",
)
"""Fills of classes, each at least 3:1 against white and against near-black, and 4.5:1 under black figures. The last
is for what is put together. A page may set its own as --partition-0 … --partition-9."""

MOST_CLIENTS = 60
_BAR, _PITCH, _TOP = 14, 20, 22
_LETTER = 7.0
"""Estimated width of a letter at the font size of 12, for laying out; nothing depends on it but gaps."""


def partition_svg(manifest: Mapping[str, Any], width: int = 480) -> str:
    """Stacked horizontal bars: the examples of each class that each client holds, clients from top to bottom.

    Of a mixture, pieces are the examples of each task (or group).
    manifest: what `coterie.data.holdings.manifest` returns, with `classes`, the names of the label values, `server`,
    its data sets, and an `id` for each client where the caller has added them. width: of the drawing in units of which
    a letter's height is 12; the picture scales to its place. With more than ten classes the rarest are put together,
    with more than `MOST_CLIENTS` clients evenly spaced ones are shown, and a line says so.

    All text and lines take the colour of the place (currentColor). Every piece has a tooltip, and its number where
    there is room.
    """
    histogram, names, what = pieces_of(manifest)
    counts, legend = few_classes(histogram, names)
    shown = few_clients(len(counts))
    labels = [_shortened(str(manifest["clients"][client].get("id", client)), 14) for client in shown]
    left = 8 + _LETTER * max(map(len, [*labels, "client"]))
    right = 12 + _LETTER * max(len(f"{sum(row):,}") for row in counts)
    room = max(width - left - right, 40.0)
    largest = max(1, *(sum(row) for row in counts))
    body: list[str] = []
    below: float = _TOP
    for client, label in zip(shown, labels, strict=True):
        body += _bar(counts[client], label, legend, left, below, room / largest)
        below += _PITCH
    notes = _notes(manifest, len(shown))
    rows, below = _legend(legend, width, below + 14)
    body += rows
    for note in notes:
        body.append(_text(0, below, note, "partition-note"))
        below += 16
    title = f"Examples of {len(counts)} clients by {what}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="partition" viewBox="0 0 {width} {below:g}" width="100%" '
            f'style="max-width:{round(1.5 * width)}px" role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_style(len(legend))}</style>",
            _text(left, 12, f"examples of each {what}", "partition-note"),
            _text(0, 12, "client", "partition-note"),
            *body,
            "</svg>",
            "",
        ]
    )


def pieces_of(manifest: Mapping[str, Any]) -> tuple[list[list[int]], list[str], str]:
    """What clients' bars consist of: counts (clients, k), their names, and what one of them is called.

    Of a mixture the tasks (or groups) in sorted order, of any other partition the classes.
    """
    if "mixture" not in manifest:
        return manifest["statistics"]["histogram"], class_names(manifest), "class"
    groups: list[str] = manifest["mixture"]["groups"]
    counts = [[client["groups"].get(group, 0) for group in groups] for client in manifest["clients"]]
    return counts, groups, "task" if "parts" in manifest else "group"


def class_names(manifest: Mapping[str, Any]) -> list[str]:
    """What the classes of the histogram are called: the task's names at the label values, or these values."""
    values: list[int] = manifest["statistics"]["classes"]
    names: Sequence[str] = manifest.get("classes", ())
    return [str(names[value]) if 0 <= value < len(names) else str(value) for value in values]


def few_classes(histogram: list[list[int]], names: list[str]) -> tuple[list[list[int]], list[str]]:
    """Counts (clients, k) and names of at most ten classes: of more, the nine most frequent and all others."""
    if len(names) <= len(COLOURS):
        return histogram, names
    totals = [sum(column) for column in zip(*histogram, strict=True)]
    frequent = sorted(sorted(range(len(names)), key=lambda kind: -totals[kind])[: len(COLOURS) - 1])
    counts = [[row[kind] for kind in frequent] for row in histogram]
    counts = [[*kept, sum(row) - sum(kept)] for kept, row in zip(counts, histogram, strict=True)]
    return counts, [*(names[kind] for kind in frequent), f"{len(names) - len(frequent)} others"]


def few_clients(count: int) -> list[int]:
    """Which of so many clients are shown, ascending: all up to `MOST_CLIENTS`, evenly spaced ones of more."""
    if count <= MOST_CLIENTS:
        return list(range(count))
    return [place * (count - 1) // (MOST_CLIENTS - 1) for place in range(MOST_CLIENTS)]


def _bar(row: list[int], label: str, legend: list[str], left: float, top: float, unit: float) -> list[str]:
    """One client: its name, a piece for each class that it holds, and its number of examples."""
    total, pieces = sum(row), []
    start = left
    for kind, (number, name) in enumerate(zip(row, legend, strict=True)):
        length = number * unit
        if number:
            tip = f"client {label}, {name}: {number:,} of {total:,} ({number / total:.0%})"
            # A gap of one unit keeps neighbours apart where colours do not.
            drawn = max(length - 1, 0.4)
            pieces.append(
                f'<rect class="partition-{kind}" x="{start:.2f}" y="{top}" width="{drawn:.2f}" height="{_BAR}">'
                f"<title>{escape(tip)}</title></rect>"
            )
            if length > 8 + _LETTER * len(f"{number:,}"):
                middle = start + drawn / 2
                pieces.append(_text(middle, top + 11, f"{number:,}", "partition-number"))
        start += length
    return [_text(0, top + 11, label), *pieces, _text(start + 5, top + 11, f"{total:,}")]


def _legend(legend: list[str], width: int, top: float) -> tuple[list[str], float]:
    """Squares with the names of classes, as many in a row as fit; and where the rows end."""
    drawn, across = [], 0.0
    for kind, name in enumerate(legend):
        label = _shortened(name, 28)
        need = 18 + _LETTER * len(label) + 14
        if across and across + need - 14 > width:
            across, top = 0.0, top + 18
        drawn.append(f'<rect class="partition-{kind}" x="{across:.2f}" y="{top - 10}" width="12" height="12"/>')
        drawn.append(_text(across + 18, top, label))
        across += need
    return drawn, top + 20


def _notes(manifest: Mapping[str, Any], shown: int) -> list[str]:
    facts = manifest["statistics"]
    sizes, clients = facts["sizes"], facts["clients"]
    notes = [f"{facts['examples']:,} examples, {min(sizes):,} to {max(sizes):,} a client"]
    mixture = manifest.get("mixture")
    if clients > 1:
        what = "label shares" if mixture is None else "mixtures"
        distance = (facts if mixture is None else mixture)["mean_total_variation"]
        notes.append(f"mean distance of {what} {distance:.2f} (0: alike, 1: disjoint)")
    if mixture is not None and (left := sum(mixture["supply"].values()) - facts["examples"]):
        notes.append(f"left to nobody: {left:,} examples that no client asked for")
    for name, held in manifest.get("server", {}).items():
        notes.append(f"set aside for the server: {held['examples']:,} examples ({name})")
    if shown < clients:
        notes.append(f"{shown} of {clients:,} clients are drawn, evenly spaced")
    return notes


def _text(x: float, y: float, content: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.2f}" y="{y:g}">{escape(content)}</text>'


def _shortened(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _style(kinds: int) -> str:
    """As a file of its own, the picture has the colours of the reader's scheme; in a page, those of the page."""
    rules = [
        "svg.partition:root{color-scheme:light dark;color:CanvasText;background:Canvas}",
        ".partition text{font:12px system-ui,sans-serif;fill:currentColor}",
        ".partition .partition-note{font-size:11px;opacity:.8}",
        ".partition .partition-number{font-size:10.5px;fill:#000;text-anchor:middle}",
        *(f".partition .partition-{k}{{fill:var(--partition-{k},{fill})}}" for k, fill in enumerate(COLOURS[:kinds])),
    ]
    return "".join(rules)
