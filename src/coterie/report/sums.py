"""Figures of what adds up (bytes, seconds) and of differences between methods, as bars and intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coterie.report.colours import series
from coterie.report.drawing import (
    MARKERS,
    MARKS,
    Picture,
    Sheet,
    Table,
    bar,
    below,
    label_width,
    marker,
    panel,
    shortened,
    swatch_places,
    swatches,
    tip,
)
from coterie.report.groups import Group, average, seconds, traffic
from coterie.report.numbers import duration, size
from coterie.report.reading import client_ranks, sent_by_client, texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Part:
    """A part of a sum: what it is called, and its colour's role."""

    name: str
    role: str


KINDS = {
    "message": Part("messages", "p0"),
    "head": Part("heads", "p1"),
    "base": Part("base changes", "p3"),
    "setup": Part("set-up", "p4"),
    "data": Part("clients' data", "p2"),
}
EVALUATION = "evaluation"
SPENT = {
    "clients": Part("clients", "p0"),
    "evaluation": Part("evaluation", "p2"),
    "server": Part("server", "p3"),
    "measures": Part("measures", "p4"),
}


def traffic_picture(groups: Sequence[Group]) -> Picture | None:
    """Bytes a client over the whole run, by kind and direction; None where nothing travelled."""
    bars: dict[tuple[str, str], dict[str, float]] = {}
    apart = []
    for group in groups:
        sums = _bytes(group)
        for way in ("up", "down"):
            bars[group.label, way] = {kind: sums[kind, to] for kind, to in sums if to == way and kind != EVALUATION}
            apart.append(size(sums.get((EVALUATION, way), 0.0)))
    if not any(sum(parts.values()) for parts in bars.values()):
        return None
    picture = _bars_picture(
        "traffic",
        "What travelled",
        "a client, all rounds, whole messages",
        bars,
        KINDS,
        size,
        "Models that are sent only to be measured are apart: a deployment does not send them.",
    )
    rows = [[*row, told] for row, told in zip(picture.table.rows, apart, strict=True)]
    return replace(picture, table=Table([*picture.table.heads, "evaluation, apart"], rows))


def rank_traffic_picture(groups: Sequence[Group]) -> Picture | None:
    """Bytes up of a client by its rank; None where ranks are equal, nothing was sent or no ledger tells."""
    by_group: dict[str, dict[int, float]] = {}
    for group in groups:
        by_rank: dict[int, list[float]] = {}
        for run in group.runs:
            ranks_of = client_ranks(run)
            for client, ways in (sent_by_client(run) or {}).items():
                if client in ranks_of:
                    by_rank.setdefault(ranks_of[client], []).append(float(ways["up"]))
        if any(any(one) for one in by_rank.values()):
            by_group[group.label] = {rank: average(one) or 0.0 for rank, one in sorted(by_rank.items())}
    ranks = sorted({rank for sizes in by_group.values() for rank in sizes})
    if len(ranks) < 2:
        return None
    most = max(one for sizes in by_group.values() for one in sizes.values())
    places = {group.label: group.place for group in groups}

    def draw(sheet: Sheet) -> Figure:
        names = [f"rank {rank}" for rank in ranks]
        left, right = 20 + max(map(label_width, names)), 24 + label_width(size(most))
        pitch = max(30, 11 * len(by_group) + 12)
        labels = [shortened(label, 24) for label in by_group]
        legend = swatch_places(labels, sheet.width) if len(by_group) > 1 else []
        top = 22 + 17 * legend[-1][1] if legend else 8
        figure, axes = panel(sheet, pitch * len(ranks) + top + 8, left=left, right=right, top=top, bottom=8)
        axes.grid(False)
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])
        axes.set_yticks(range(len(ranks)), names)
        axes.set_ylim(len(ranks) - 0.5, -0.5)
        axes.set_xlim(0, most)
        for row, rank in enumerate(ranks):
            for place, (label, sizes) in enumerate(by_group.items()):
                if rank not in sizes:
                    continue
                y = row + (place - (len(by_group) - 1) / 2) * 11 / pitch
                colour = sheet.colours[series(places[label])]
                axes.plot([0, sizes[rank]], [y, y], color=colour, linewidth=1.2, alpha=0.7, clip_on=False)
                axes.plot(
                    [sizes[rank]],
                    [y],
                    marker=marker(places[label]),
                    markersize=6.5,
                    markeredgewidth=0,
                    color=colour,
                    clip_on=False,
                    **tip(f"{label}, rank {rank}: {size(sizes[rank])}"),
                )
            known = [sizes[rank] for sizes in by_group.values() if rank in sizes]
            if max(known) - min(known) < 0.01 * most:
                pixel = most / (sheet.width - left - right)
                axes.text(
                    max(known) + 9 * pixel,
                    row,
                    size(max(known)),
                    fontsize=11,
                    color=sheet.colours["ink"],
                    va="center_baseline",
                    clip_on=False,
                )
        if legend:
            marks = "".join(MARKS[MARKERS.index(marker(places[label]))] for label in by_group)
            swatches(figure, sheet, labels, [series(places[label]) for label in by_group], legend, marks)
        return figure

    title = "What a client sends"
    rows = [[f"rank {rank}", *(size(sizes.get(rank)) for sizes in by_group.values())] for rank in ranks]
    return Picture(
        "sent-by-rank",
        title,
        "up by rank, all rounds, mean over clients",
        f"{title}, by rank. "
        + " ".join(
            f"{label}: " + ", ".join(f"rank {rank} {size(one)}" for rank, one in sizes.items()) + "."
            for label, sizes in by_group.items()
        ),
        draw,
        Table(["", *by_group], rows),
        "Clients that were not sampled in a round, or failed in it, sent nothing then." if _gaps(groups) else "",
    )


def time_picture(groups: Sequence[Group]) -> Picture | None:
    """Seconds of a run by what they were spent on, the mean over seeds; None where no time was recorded."""
    bars: dict[tuple[str, str], dict[str, float]] = {}
    for group in groups:
        spent = [told for run in group.runs if (told := seconds(run))]
        if spent:
            bars[group.label, ""] = {
                part: sum(one.get(part, 0.0) for one in spent) / len(spent) for part in set().union(*spent)
            }
    if not any(sum(parts.values()) for parts in bars.values()):
        return None
    note = "Clients: their local training, of all of them on this machine."
    if any(len(group.runs) > 1 for group in groups):
        note += " Means over seeds."
    return _bars_picture("time", "Where the time went", "of one run", bars, SPENT, duration, note)


def differences_picture(
    name: str, title: str, unit: str, groups: Sequence[Group], figure_name: str, against: Group
) -> Picture | None:
    """Each group's figure less that of `against`, seed by seed, with the t interval of the mean; None where no other
    group shares two seeds with it."""
    from coterie.experiments.intervals import LEVEL, paired

    theirs = {str(seed): one for seed, one in against.values(figure_name).items()}
    found = []
    for group in groups:
        if group is against:
            continue
        one = paired({str(seed): value for seed, value in group.values(figure_name).items()}, theirs)
        if one is not None and one.low is not None and one.high is not None:
            found.append((group, one, one.low, one.high))
    if not found:
        return None

    def draw(sheet: Sheet) -> Figure:
        names = [shortened(group.label, 18) for group, *_ in found]
        left = 20 + max(map(label_width, names))
        figure, axes = panel(sheet, 34 * len(found) + 52, left=left, right=20, top=8)
        axes.grid(False)
        axes.grid(axis="x", color=sheet.colours["rule"], linewidth=0.8)
        axes.axvline(0, color=sheet.colours["muted"], linewidth=1)
        axes.set_yticks(range(len(found)), names)
        axes.set_ylim(len(found) - 0.5, -0.5)
        for row, (group, one, low, high) in enumerate(found):
            colour = sheet.colours[series(group.place)]
            axes.plot([100 * low, 100 * high], [row, row], color=colour, linewidth=2, zorder=2)
            seeds = [100 * value for value in one.by_seed.values()]
            axes.plot(
                seeds,
                [row + 0.24] * len(seeds),
                linestyle="",
                marker="o",
                markersize=4,
                markeredgewidth=0,
                color=colour,
                alpha=0.6,
            )
            axes.plot([100 * one.mean], [row], marker="D", markersize=7, markeredgewidth=0, color=colour, zorder=3)
        for label in axes.get_yticklabels():
            label.set_color(sheet.colours["ink"])
        axes.margins(x=0.06)
        axes.locator_params(axis="x", nbins=6)
        below(axes, sheet, f"points above {shortened(against.label, 24)}")
        return figure

    rows = [
        [group.label, f"{100 * one.mean:+.1f}", f"{100 * low:+.1f} to {100 * high:+.1f}", str(len(one.by_seed))]
        for group, one, low, high in found
    ]
    return Picture(
        name,
        title,
        unit,
        f"{title}, points above {against.label}. "
        + " ".join(f"{row[0]}: {row[1]}, interval {row[2]}." for row in rows),
        draw,
        Table(["", "mean", f"{LEVEL:.0%} interval", "seeds"], rows),
    )


def _bars_picture(
    name: str,
    title: str,
    unit: str,
    bars: Mapping[tuple[str, str], Mapping[str, float]],
    known: Mapping[str, Part],
    write: Callable[[float], str],
    note: str,
) -> Picture:
    """Stacked horizontal bars with their sums, by (label, which of its bars); parts that are not known come last."""
    found = {kind for parts in bars.values() for kind, one in parts.items() if one}
    kinds = {kind: part for kind, part in known.items() if kind in found}
    kinds |= {kind: Part(kind, "p1") for kind in sorted(found - set(known))}
    sums = {bar: sum(parts.values()) for bar, parts in bars.items()}
    beside = {(label, which): f"{write(one)} {which}".strip() for (label, which), one in sums.items()}
    labels = list(dict.fromkeys(label for label, _ in bars))

    def draw(sheet: Sheet) -> Figure:
        right = 20 + max(map(label_width, beside.values()))
        names = [part.name for part in kinds.values()]
        places = swatch_places(names, sheet.width)
        top = 18 + 17 * (1 + places[-1][1])
        height = 16 * len(bars) + 26 * len(labels)
        figure, axes = panel(sheet, height + top + 2, left=12, right=right, top=top, bottom=2)
        axes.grid(False)
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_ylim(height, 0)
        most = max(sums.values())
        axes.set_xlim(0, most)
        pixel = most / (sheet.width - 12 - right)
        ink, y = sheet.colours["ink"], 0.0
        for label in labels:
            axes.text(0, y + 6, shortened(label, 44), fontsize=11, color=ink, va="center_baseline")
            y += 22
            for which in (which for one, which in bars if one == label):
                start = 0.0
                for kind, part in kinds.items():
                    length = bars[label, which].get(kind, 0.0)
                    if length:
                        told = f"{label} {which}, {part.name}: {write(length)}".replace(" ,", ",")
                        seen = max(length - pixel, 0.6 * pixel)
                        bar(axes, start, seen, y, 13, sheet.colours[part.role], told)
                        start += length
                axes.text(
                    start + 6 * pixel,
                    y,
                    beside[label, which],
                    fontsize=11,
                    color=ink,
                    va="center_baseline",
                    clip_on=False,
                )
                y += 16
            y += 4
        swatches(figure, sheet, names, [part.role for part in kinds.values()], places)
        return figure

    def summed(one: tuple[str, str]) -> str:
        held = [f"{part.name} {write(size)}" for kind, part in kinds.items() if (size := bars[one].get(kind, 0.0))]
        return f"{one[0]}: {beside[one]}" + (f" ({', '.join(held)})." if len(held) > 1 else ".")

    rows = [
        [" ".join(one).strip(), *(write(parts.get(kind, 0.0)) for kind in kinds), write(sums[one])]
        for one, parts in bars.items()
    ]
    heads = ["", *(part.name for part in kinds.values()), "sum"]
    return Picture(name, title, unit, f"{title}. {' '.join(map(summed, bars))}", draw, Table(heads, rows), note)


def _gaps(groups: Sequence[Group]) -> bool:
    """Whether some client was missing in some round."""
    return any(
        len(texts(row.get("answered"))) < len(client_ranks(run))
        for g in groups
        for run in g.runs
        for row in run.metrics
    )


def _bytes(group: Group) -> dict[tuple[str, str], float]:
    """Bytes a client and run by (kind, direction)."""
    total: dict[tuple[str, str], float] = {}
    for run in group.runs:
        share = 1 / (max(1, len(client_ranks(run))) * len(group.runs))
        for row in run.metrics:
            for key, amount in traffic(row).items():
                total[key] = total.get(key, 0.0) + share * amount
    return total
