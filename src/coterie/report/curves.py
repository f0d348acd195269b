"""Figures over rounds and over bytes, as lines: one for each method, with a band over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.report.colours import SERIES, series
from coterie.report.drawing import (
    FEW_POINTS,
    NARROW,
    Picture,
    Sheet,
    Table,
    below,
    end_labels,
    label_width,
    marker,
    panel,
    rounds_axis,
    shortened,
    spread_out,
)
from coterie.report.groups import OWN, POOLED, Group, Pick, sent, series_of
from coterie.report.numbers import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BANDS = 5
"""Lines up to which each has its band; with more, bands would hide each other."""

MOST_ROWS = 60
"""Rounds that a table lists; of more, evenly spaced ones."""


@dataclass(frozen=True)
class Line:
    """A curve: points with ascending x, their lowest and highest over seeds, and how it looks. `role` is a colour's,
    `place` gives marker and dashes."""

    label: str
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    seeds: int
    role: str
    place: int = 0


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with; `label` is short, `meaning` a sentence."""

    value: float
    label: str
    meaning: str


def how_to_read(groups: Sequence[Group]) -> str | None:
    """What lines and bands mean, where there are several seeds."""
    counts = sorted({len(group.runs) for group in groups})
    if counts[-1] == 1:
        return None
    told = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    drawn = "Band" if len(groups) <= MOST_BANDS else "Upright at the end"
    return f"Line: mean over {told} seeds. {drawn}: from the lowest to the highest of them."


def lines_over_rounds(groups: Sequence[Group], pick: Pick) -> list[Line]:
    """A line for each group that has the figure."""
    found = []
    for group in groups:
        curve = group.curve(pick)
        if curve is not None:
            role = series(group.place)
            found.append(
                Line(group.label, curve.rounds, curve.mean, curve.low, curve.high, curve.seeds, role, group.place)
            )
    return found


def rounds_picture(
    name: str,
    title: str,
    unit: str,
    lines: Sequence[Line],
    write: Callable[[float | None], str],
    *,
    factor: float = 1.0,
    level: Level | None = None,
    phases: Sequence[tuple[int, str]] = (),
    note: str = "",
    wide: bool = False,
) -> Picture | None:
    """Lines over rounds; None where there is none.

    write: a value as text, before `factor` by which the axis shows it. phases: (first round, name) of each, when more
    than one.
    """
    if not lines:
        return None

    def draw(sheet: Sheet) -> Figure:
        figure, axes, place = _plot(sheet, title, lines, write, factor, level)
        last = int(max(line.x[-1] for line in lines))
        first = int(min(line.x[0] for line in lines))
        rounds_axis(axes, last, first)
        below(axes, sheet, "round")
        for start, phase in phases[1:]:
            axes.axvline(start - 0.5, color=sheet.colours["muted"], linewidth=0.7, dashes=(1, 2))
            axes.annotate(
                phase,
                (start - 0.5, 1),
                xycoords=("data", "axes fraction"),
                xytext=(4, 2),
                textcoords="offset points",
                fontsize=10,
                color=sheet.colours["muted"],
            )
        place()
        return figure

    return Picture(
        name,
        title,
        unit,
        f"{title} over rounds. {_alt(lines, write, level, 'round')}",
        draw,
        _table(lines, write, "round"),
        " ".join(part for part in (level.meaning if level else "", note) if part),
        wide,
    )


def bytes_picture(groups: Sequence[Group], write: Callable[[float | None], str], metric: str) -> Picture | None:
    """The score against what a client has sent up to then, on average; None where nothing was measured or sent.

    The pooled score of the common model; where no group has one, the mean of the clients' own on their own tests.
    """
    pick, what = (POOLED, "pooled test") if any(group.curve(POOLED) for group in groups) else (OWN, "own tests")
    lines = []
    for group in groups:
        curve = group.curve(pick)
        if curve is None:
            continue
        ways = [sent(run, "up") for run in group.runs if series_of(run, pick)]
        across = [sum(way.get(number, 0.0) for way in ways) / len(ways) for number in curve.rounds]
        if across[-1] > 0:
            role = series(group.place)
            lines.append(Line(group.label, across, curve.mean, curve.low, curve.high, curve.seeds, role, group.place))
    if not lines:
        return None
    most = max(line.x[-1] for line in lines)
    scale, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")) if most >= s or s == 1)

    def draw(sheet: Sheet) -> Figure:
        scaled = [
            Line(one.label, [x / scale for x in one.x], one.mean, one.low, one.high, one.seeds, one.role, one.place)
            for one in lines
        ]
        figure, axes, place = _plot(sheet, title, scaled, write, 100.0, None)
        axes.set_xlim(0, most / scale * 1.02)
        axes.locator_params(axis="x", nbins=6)
        below(axes, sheet, f"{unit} up a client")
        place()
        return figure

    title = "Score against bytes up"
    heads = ["", "up a client", metric]
    rows = [[line.label, size(line.x[-1]), write(line.mean[-1])] for line in lines]
    return Picture(
        "score-against-bytes",
        title,
        f"{metric} on the {what}",
        f"{title}. "
        + " ".join(f"{one.label}: {write(one.mean[-1])} after {size(one.x[-1])} up a client." for one in lines),
        draw,
        Table(heads, rows),
        "Whole messages, set-up and heads included, evaluation apart; the mean over clients. A point is a round.",
    )


def _plot(
    sheet: Sheet,
    title: str,
    lines: Sequence[Line],
    write: Callable[[float | None], str],
    factor: float,
    level: Level | None,
) -> tuple[Figure, Axes, Callable[[], None]]:
    """The lines on axes whose y is fitted to them; what is returned last names them, once x is settled."""
    colours, roomy = sheet.colours, sheet.width > NARROW
    names = [_end(line, len(lines), write, roomy) for line in lines]
    beside = [*names, f"{level.label} {write(level.value)}"] if level is not None else names
    right = 16 + max(map(label_width, beside)) + (8 if len(beside) > 1 else 0)
    height = max(300 if roomy else 232, 15 * len(lines) + 70)
    values = [factor * y for line in lines for y in (*line.low, *line.high)] + ([factor * level.value] if level else [])
    low, high = min(values), max(values)
    pad = 0.08 * (high - low) or 0.1 * abs(high) or 0.5
    low = max(low - pad, 0.0) if low >= 0 else low - pad
    figure, axes = panel(sheet, height, right=right)
    axes.set_ylim(low, high + pad)
    axes.locator_params(axis="y", nbins=6, steps=[1, 2, 5, 10])
    if level is not None:
        axes.axhline(factor * level.value, color=colours["muted"], linewidth=1, dashes=(4, 3), zorder=1.5)
    for line in lines:
        colour = colours[line.role]
        x = list(line.x)
        low_y, high_y = [factor * y for y in line.low], [factor * y for y in line.high]
        if line.seeds > 1 and len(lines) <= MOST_BANDS and len(x) > 1:
            axes.fill_between(x, low_y, high_y, color=colour, alpha=0.10, linewidth=0, clip_on=False)
            for edge in (low_y, high_y):
                axes.plot(x, edge, color=colour, alpha=0.4, linewidth=0.6, clip_on=False, zorder=2)
        elif line.seeds > 1:
            axes.plot([x[-1]] * 2, [low_y[-1], high_y[-1]], color=colour, alpha=0.5, linewidth=1.2, clip_on=False)
        axes.plot(
            x,
            [factor * y for y in line.mean],
            color=colour,
            linewidth=2,
            linestyle="-" if line.place < SERIES else (0, (5, 2)) if line.place < 2 * SERIES else (0, (1, 2)),
            marker=marker(line.place) if len(x) <= FEW_POINTS or len(lines) > SERIES else None,
            markevery=1 if len(x) <= FEW_POINTS else (line.place % 5, max(1, len(x) // 6)),
            markersize=5,
            markeredgewidth=0,
            clip_on=False,
            zorder=3,
        )

    def place() -> None:
        ends = [(line.x[-1], factor * line.mean[-1], name, line.role) for line, name in zip(lines, names, strict=True)]
        if level is not None:
            ends.append((axes.get_xlim()[1], factor * level.value, f"{level.label} {write(level.value)}", "muted"))
        end_labels(axes, sheet, ends)

    return figure, axes, place


def _end(line: Line, many: int, write: Callable[[float | None], str], roomy: bool) -> str:
    """What stands at the end of a line: its value where it is alone, else its name (and value, where there is room)."""
    value = write(line.mean[-1])
    if many == 1:
        return value
    return f"{shortened(line.label, 26)}  {value}" if roomy else shortened(line.label, 16)


def _alt(lines: Sequence[Line], write: Callable[[float | None], str], level: Level | None, what: str) -> str:
    told = []
    for line in lines:
        text = f"{line.label}: {write(line.mean[-1])} in {what} {line.x[-1]:g}"
        if len(line.x) > 1:
            text += f", from {write(line.mean[0])} in {what} {line.x[0]:g}"
        if line.seeds > 1:
            text += f" ({line.seeds} seeds, {write(line.low[-1])} to {write(line.high[-1])} at the end)"
        told.append(f"{text}.")
    if level is not None:
        told.append(f"To compare: {level.label} {write(level.value)}.")
    return " ".join(told)


def _table(lines: Sequence[Line], write: Callable[[float | None], str], what: str) -> Table:
    places = sorted({x for line in lines for x in line.x})
    rows = []
    for place in spread_out(places, MOST_ROWS):
        cells = [f"{place:g}"]
        for line in lines:
            at = list(line.x).index(place) if place in line.x else None
            spread = f" ({write(line.low[at])} to {write(line.high[at])})" if at is not None and line.seeds > 1 else ""
            cells.append("–" if at is None else write(line.mean[at]) + spread)
        rows.append(cells)
    return Table([what, *(line.label for line in lines)], rows)
