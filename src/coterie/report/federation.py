"""Figures of the federation: who holds which data, who answered in which round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coterie.report.colours import KINDS
from coterie.report.drawing import (
    Picture,
    Sheet,
    Table,
    bar,
    below,
    label_width,
    legend_above,
    panel,
    rounds_axis,
    shortened,
    spread_out,
    swatch_places,
    swatches,
)
from coterie.report.reading import Run, at, client_ranks, mapping, number, texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PIECES = 120
"""Pieces of bars up to which each has a tooltip."""

MOST_ROWS = 40
"""Clients that have a row of their own in a picture; of more, evenly spaced ones."""

MOST_TABLED = 100
"""Clients that a table lists; of more, evenly spaced ones."""


def participation_picture(run: Run) -> Picture | None:
    """Who answered, failed or was late in which round; None where everybody answered in every round."""
    states = {number: _states(row) for row, number in _rows(run)}
    clients = sorted(set(client_ranks(run)).union(*states.values()))
    sampled = any(len(own) < len(clients) for own in states.values())
    if not sampled and all(state == "answered" for own in states.values() for state in own.values()):
        return None
    troubled = [name for name in clients if any(own.get(name) in ("failed", "late") for own in states.values())]
    kept = set(troubled[:MOST_ROWS]) | set(spread_out(clients, max(1, MOST_ROWS - len(troubled[:MOST_ROWS]))))
    drawn = [name for name in clients if name in kept]
    rounds = sorted(states)

    def draw(sheet: Sheet) -> Figure:
        left = 20 + max(label_width(shortened(name, 12)) for name in drawn)
        figure, axes = panel(sheet, 15 * len(drawn) + 74, left=left, top=30)
        axes.set_ylim(len(drawn) - 0.4, -0.6)
        axes.grid(False)
        axes.set_yticks(range(len(drawn)), [shortened(name, 12) for name in drawn])
        rounds_axis(axes, rounds[-1], rounds[0])
        axes.set_xlim(rounds[0] - 0.6, rounds[-1] + 0.6)
        pixel = (rounds[-1] - rounds[0] + 1.2) / (sheet.width - left - 16)
        half = min(0.32, 4 * pixel)
        x: list[float] = []
        y: list[float] = []
        for row, name in enumerate(drawn):
            for start, end in _stretches([n for n in rounds if states[n].get(name) == "answered"], len(rounds) > 40):
                x += [start - half, end + half, math.nan]
                y += [row, row, math.nan]
        axes.plot(x, y, color=sheet.colours["muted"], alpha=0.45, linewidth=6, solid_capstyle="butt", clip_on=False)
        axes.plot(
            [],
            [],
            linestyle="",
            marker="s",
            markeredgewidth=0,
            color=sheet.colours["muted"],
            alpha=0.45,
            label="answered",
        )
        for state, (form, role) in {"failed": ("X", "bad"), "late": ("^", "warn")}.items():
            points = [(n, row) for n in rounds for row, name in enumerate(drawn) if states[n].get(name) == state]
            axes.plot(
                [n for n, _ in points],
                [row for _, row in points],
                linestyle="",
                marker=form,
                markersize=7,
                markeredgewidth=0,
                color=sheet.colours[role],
                clip_on=False,
                label=state,
            )
        below(axes, sheet, "round")
        legend_above(axes, sheet, ncols=3)
        return figure

    title = "Who answered"
    failures = [(n, str(name), reason) for row, n in _rows(run) for name, reason in mapping(row.get("failed")).items()]
    late = [(n, name) for row, n in _rows(run) for name in texts(row.get("late"))]
    rows = [[str(n), name, "failed", shortened(str(reason), 160)] for n, name, reason in failures]
    rows += [[str(n), name, "late", "its answer came after the round"] for n, name in late]
    few = (
        f"{len(drawn)} of {len(clients)} clients are drawn, all that failed or were late among them."
        if len(drawn) < len(clients)
        else ""
    )
    return Picture(
        "participation",
        title,
        "the clients of each round",
        f"{title}: {len(failures)} failures, {len(late)} late answers, {len(rounds)} rounds of {len(clients)} clients.",
        draw,
        Table(["round", "client", "", "reason"], sorted(rows, key=lambda row: int(row[0]))),
        " ".join(part for part in ("Blank: not sampled in that round." if sampled else "", few) if part),
    )


def _classes_held(run: Run) -> tuple[list[Any], list[str]]:
    """Counts by client and class, and the names of the classes; nothing where the record does not tell."""
    facts = mapping(run.partition.get("statistics"))
    counts, classes = facts.get("histogram"), facts.get("classes")
    if not isinstance(counts, list) or not isinstance(classes, list):
        return [], []
    called = texts(at(run.summary, "task", "classes"))
    return counts, [str(called[c]) if isinstance(c, int) and 0 <= c < len(called) else str(c) for c in classes]


def _tasks_held(run: Run) -> tuple[list[Any], list[str]]:
    """Counts by client and task of a mixture, and the names of the tasks; nothing where the record does not tell."""
    clients, tasks = run.partition.get("clients"), texts(at(run.partition, "mixture", "groups"))
    held = [mapping(at(client, "groups")) for client in clients] if isinstance(clients, list) else []
    return [[own.get(task, 0) for task in tasks] for own in held], tasks


def partition_picture(run: Run, name: str, title: str) -> Picture | None:
    """The examples of each class, or of a mixture each task, that each client holds, as stacked bars.

    None where the record does not tell.
    """
    mixed = mapping(run.partition.get("mixture"))
    facts = mixed or mapping(run.partition.get("statistics"))
    counts, labels = _tasks_held(run) if mixed else _classes_held(run)
    if not counts or not labels or not _table_of_numbers(counts):
        return None
    ids = list(client_ranks(run))
    ids = ids if len(ids) == len(counts) else [str(place) for place in range(len(counts))]
    few, legend = _few_classes(counts, labels)
    named = [shortened(one, 24) for one in legend]
    rows = spread_out(list(range(len(counts))), MOST_ROWS)
    totals = [sum(row) for row in counts]
    distance = number(facts.get("mean_total_variation"))

    def draw(sheet: Sheet) -> Figure:
        letters = 12
        left = 16 + max(label_width(shortened(ids[row], letters)) for row in rows)
        right = 22 + max(label_width(f"{totals[row]:,}") for row in rows)
        places = swatch_places(named, sheet.width)
        top = 16 + 17 * (1 + places[-1][1])
        figure, axes = panel(sheet, 18 * len(rows) + top + 12, left=left, right=right, top=top, bottom=12)
        axes.grid(False)
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])
        axes.set_yticks(range(len(rows)), [shortened(ids[row], letters) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        most = max(totals) or 1
        axes.set_xlim(0, most)
        unit = (sheet.width - left - right) / most
        pieces = sum(count > 0 for row in rows for count in few[row])
        for place, row in enumerate(rows):
            start = 0
            for kind, count in enumerate(few[row]):
                if not count:
                    continue
                told = f"client {ids[row]}, {legend[kind]}: {count:,} of {totals[row]:,} ({count / totals[row]:.0%})"
                seen = max(count - 1 / unit, 0.4 / unit)
                bar(axes, start, seen, place, 0.76, sheet.colours[f"k{kind}"], told if pieces <= MOST_PIECES else None)
                if count * unit > 10 + label_width(f"{count:,}", 9.5):
                    axes.text(
                        start + count / 2,
                        place,
                        f"{count:,}",
                        ha="center",
                        va="center_baseline",
                        fontsize=9.5,
                        color="#000000",
                    )
                start += count
            axes.text(
                totals[row] + 5 / unit,
                place,
                f"{totals[row]:,}",
                va="center_baseline",
                fontsize=11,
                color=sheet.colours["muted"],
                clip_on=False,
            )
        swatches(figure, sheet, named, [f"k{kind}" for kind in range(len(named))], places)
        return figure

    note = [f"{sum(totals):,} training examples, {min(totals):,} to {max(totals):,} a client."]
    if distance is not None and len(counts) > 1:
        what = "mixtures" if mixed else "label shares"
        note.append(f"Mean distance of {what}: {distance:.2f} (0: alike, 1: disjoint).")
    if len(rows) < len(counts):
        note.append(f"{len(rows)} of {len(counts)} clients are drawn, evenly spaced.")
    return Picture(
        name,
        title,
        "examples of each task" if mixed else "examples of each class",
        f"{title}: who holds which data. " + " ".join(note),
        draw,
        Table(
            ["client", *legend, "all"],
            [
                [ids[row], *(f"{c:,}" for c in few[row]), f"{totals[row]:,}"]
                for row in spread_out(list(range(len(counts))), MOST_TABLED)
            ],
        ),
        " ".join(note),
    )


def _stretches(rounds: Sequence[int], merged: bool) -> list[tuple[int, int]]:
    """First and last of each stretch of consecutive rounds when `merged`; else each round by itself."""
    found: list[tuple[int, int]] = []
    for one in rounds:
        if merged and found and found[-1][1] == one - 1:
            found[-1] = (found[-1][0], one)
        else:
            found.append((one, one))
    return found


def _rows(run: Run) -> list[tuple[Mapping[str, Any], int]]:
    return [(row, int(row["round"])) for row in run.metrics]


def _states(row: Mapping[str, Any]) -> dict[str, str]:
    states = dict.fromkeys(texts(row.get("answered")), "answered")
    states |= dict.fromkeys(texts(row.get("late")), "late")
    return states | dict.fromkeys(map(str, mapping(row.get("failed"))), "failed")


def _table_of_numbers(rows: Sequence[Any]) -> bool:
    return all(
        isinstance(row, list) and len(row) == len(rows[0]) and all(isinstance(n, int) and n >= 0 for n in row)
        for row in rows
    )


def _few_classes(counts: list[list[int]], names: list[str]) -> tuple[list[list[int]], list[str]]:
    """Counts (clients, k) and names of at most `KINDS` classes: of more, the most frequent and all others together."""
    if len(names) <= KINDS:
        return counts, names
    totals = [sum(column) for column in zip(*counts, strict=True)]
    frequent = sorted(sorted(range(len(names)), key=lambda kind: -totals[kind])[: KINDS - 1])
    few = [[row[kind] for kind in frequent] for row in counts]
    few = [[*kept, sum(row) - sum(kept)] for kept, row in zip(few, counts, strict=True)]
    return few, [*(names[kind] for kind in frequent), f"{len(names) - len(frequent)} others"]
