"""Figures of single clients: who scores what, in the end and over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coterie.report.colours import rank_roles
from coterie.report.drawing import (
    NARROW,
    Picture,
    Sheet,
    Table,
    below,
    end_labels,
    legend_above,
    panel,
    rounds_axis,
    shortened,
    spread_out,
    tip,
)
from coterie.report.groups import Group, average, client_scores
from coterie.report.numbers import percent
from coterie.report.reading import Run, client_ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_DOTS = 240
"""Clients that are drawn as dots of their own; of more, evenly spaced ones."""

MOST_SINGLE = 60
"""Clients up to which each mark has a tooltip, and the global model's beside it."""

MOST_TABLED = 100
"""Clients that a table lists; of more, evenly spaced ones."""


def strip_picture(group: Group, limits: tuple[float, float], metric: str, alone: bool) -> Picture | None:
    """Every client's own score on its own test, in order; None where none was measured.

    limits: lowest and highest share of all groups, so that their pictures compare. alone: the report is of one group.
    """
    dots = _dots(group)
    if not dots:
        return None
    ranks = rank_roles(dot["rank"] for dot in dots)
    drawn = spread_out(dots, MOST_DOTS)
    mean, worst = average([dot["own"] for dot in dots]), average([dot["own"] for dot in dots if dot["worst"]])
    several = len(group.runs) > 1
    title = "Every client’s own score" if alone else group.label

    def draw(sheet: Sheet) -> Figure:
        colours = sheet.colours
        figure, axes = panel(sheet, 262 if sheet.width == NARROW else 300, right=92, top=34)
        low, high = 100 * limits[0], 100 * limits[1]
        pad = 0.06 * (high - low) or 5
        axes.set_ylim(max(low - pad, -100), min(high + pad, 104))
        axes.set_xlim(-0.9, len(drawn) - 0.1)
        axes.locator_params(axis="y", nbins=5)
        axes.set_xticks([])
        radius = max(2.2, min(5.5, 170 / max(1, len(drawn))))
        singly = len(drawn) <= MOST_SINGLE
        for place, dot in enumerate(drawn if singly else ()):
            if dot["common"] is not None:
                ends = [100 * dot["common"], 100 * dot["own"]]
                axes.plot([place, place], ends, color=colours["muted"], linewidth=0.6, alpha=0.7, zorder=2)
                axes.plot(
                    [place],
                    ends[:1],
                    marker="_",
                    markersize=3.6 * radius,
                    markeredgewidth=1.2,
                    color=colours["muted"],
                    clip_on=False,
                    zorder=2.5,
                )
        looks: dict[tuple[Any, ...], list[tuple[int, Any]]] = {}
        for place, dot in enumerate(drawn):
            looks.setdefault((dot["rank"], dot["worst"], place if singly else None), []).append((place, dot))
        for (rank, worst_one, _), members in looks.items():
            axes.plot(
                [place for place, _ in members],
                [100 * dot["own"] for _, dot in members],
                linestyle="",
                marker="v" if worst_one else "o",
                markersize=2 * radius,
                markeredgewidth=0,
                color=colours[ranks[rank]],
                clip_on=False,
                zorder=3,
                **(tip(_said(members[0][1], several)) if singly else {}),
            )
        ends = [(len(drawn) - 0.1, 100 * mean, f"mean {percent(mean)}", "ink")] if mean is not None else []
        if worst is not None and len(dots) > 1:
            ends.append((len(drawn) - 0.1, 100 * worst, f"worst ¼ {percent(worst)}", "ink"))
        for _, height, _, _ in ends:
            axes.axhline(height, color=colours["ink"], linewidth=0.8, dashes=(1, 2), zorder=1.5)
        end_labels(axes, sheet, ends, away=4)
        _rank_legend(axes, sheet, ranks)
        if not several and len(drawn) <= 12:
            axes.set_xticks(range(len(drawn)), [shortened(dot["client"], 6) for dot in drawn])
            below(axes, sheet, "client")
        else:
            below(axes, sheet, "clients, from the lowest to the highest", 16)
        return figure

    common = any(dot["common"] is not None for dot in dots)
    note = f"{len(drawn)} of {len(dots)} are drawn, evenly spaced." if len(drawn) < len(dots) else ""
    heads = ["client", *(["seed"] if several else []), "rank", "own model", *(["global model"] if common else [])]
    rows = [
        [
            dot["client"],
            *([str(dot["seed"])] if several else []),
            str(dot["rank"]),
            percent(dot["own"]),
            *([percent(dot["common"])] if common else []),
        ]
        for dot in spread_out(dots, MOST_TABLED)
    ]
    lowest, highest = dots[0], dots[-1]
    return Picture(
        f"clients-{group.place}",
        title,
        f"{metric} on each client’s own test" + (f", {len(group.runs)} seeds" if several else ""),
        f"{group.label}: own scores of {len(dots)} clients, from {percent(lowest['own'])} (client {lowest['client']}, "
        f"rank {lowest['rank']}) to {percent(highest['own'])}; mean {percent(mean)}, worst quarter {percent(worst)}.",
        draw,
        Table(heads, rows),
        note,
        wide=alone,
    )


def how_to_read(groups: Sequence[Group]) -> str:
    """What the marks of the clients' pictures mean."""
    several = any(len(group.runs) > 1 for group in groups)
    return (
        "A mark is a client with its own model, coloured by rank; triangles are the worst quarter"
        f"{' of each seed' if several else ''}. A dash is the global model on the same test, where "
        "that differs."
    )


def client_curves_picture(run: Run, metric: str) -> Picture | None:
    """Each client's own score over rounds; None with fewer than three rounds in which it was measured."""
    scores = {int(row["round"]): own for row in run.metrics if (own := client_scores(row, "personal"))}
    if len(scores) < 3:
        return None
    ranks, rounds = client_ranks(run), sorted(scores)
    names = sorted(set().union(*scores.values()))
    roles = rank_roles(ranks.get(name, 0) for name in names)
    drawn = spread_out(names, 60)
    means = [average(list(scores[number].values())) or 0.0 for number in rounds]

    def draw(sheet: Sheet) -> Figure:
        figure, axes = panel(sheet, 262, right=74, top=34)
        values = [100 * value for own in scores.values() for value in own.values()]
        pad = 0.06 * (max(values) - min(values)) or 5
        axes.set_ylim(min(values) - pad, max(values) + pad)
        axes.locator_params(axis="y", nbins=5)
        for name in drawn:
            points = [(number, 100 * scores[number][name]) for number in rounds if name in scores[number]]
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color=sheet.colours[roles[ranks.get(name, 0)]],
                linewidth=1.1,
                alpha=0.75,
                clip_on=False,
                **tip(f"client {name}, rank {ranks.get(name, '?')}"),
            )
        axes.plot(rounds, [100 * y for y in means], color=sheet.colours["ink"], linewidth=2.4, clip_on=False, zorder=4)
        rounds_axis(axes, rounds[-1], rounds[0])
        below(axes, sheet, "round")
        end_labels(axes, sheet, [(rounds[-1], 100 * means[-1], f"mean {percent(means[-1])}", "ink")])
        _rank_legend(axes, sheet, roles)
        return figure

    title = "Clients over rounds"
    rows = [[name, str(ranks.get(name, "–")), *(percent(scores[n].get(name)) for n in rounds)] for name in names]
    few = f" {len(drawn)} of {len(names)} clients are drawn, evenly spaced." if len(drawn) < len(names) else ""
    return Picture(
        "clients-over-rounds",
        title,
        f"{metric} on each client’s own test",
        f"{title}: the mean goes from {percent(means[0])} in round {rounds[0]} to {percent(means[-1])} in round "
        f"{rounds[-1]}, over {len(names)} clients.",
        draw,
        Table(["client", "rank", *(f"round {number}" for number in rounds)], rows),
        f"Thin: one client each. Thick: their mean.{few}",
    )


def _dots(group: Group) -> list[dict[str, Any]]:
    """Every client of every seed: its own score in the last line that has one, the common model's in the same line,
    whether it is in the worst quarter (rounded up) of its run; ascending by own score."""
    found: list[dict[str, Any]] = []
    for run in group.runs:
        row = next((row for row in reversed(run.metrics) if client_scores(row, "personal")), None)
        if row is None:
            continue
        own, common, ranks = client_scores(row, "personal"), client_scores(row, "global"), client_ranks(run)
        worst = set(sorted(own, key=lambda name: own[name])[: -(-len(own) // 4)])
        found += [
            {
                "client": name,
                "seed": run.seed,
                "rank": ranks.get(name, 0),
                "own": score,
                "common": None if common.get(name) == score else common.get(name),
                "worst": name in worst,
            }
            for name, score in own.items()
        ]
    return sorted(found, key=lambda dot: (dot["own"], dot["client"]))


def _said(dot: Mapping[str, Any], several: bool) -> str:
    where = f", seed {dot['seed']}" if several else ""
    common = "" if dot["common"] is None else f"; global model {percent(dot['common'])}"
    return f"client {dot['client']}{where}, rank {dot['rank']}: {percent(dot['own'])}{common}"


def _rank_legend(axes: Axes, sheet: Sheet, ranks: Mapping[int, str]) -> None:
    """The ranks and their colours above the axes."""
    shown = dict(ranks)
    if len(shown) > 5:  # neighbours share a colour: the lowest and highest of each
        shown = {rank: role for rank, role in ranks.items() if rank in (min(ranks), max(ranks))}
    for rank, role in shown.items():
        axes.plot([], [], linestyle="", marker="o", markersize=6, color=sheet.colours[role], label=f"{rank}")
    legend_above(axes, sheet, ncols=len(shown), title="rank")
