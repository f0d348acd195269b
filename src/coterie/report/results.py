"""The figures of runs as text: large ones of a single run, a table of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.report import words
from coterie.report.colours import series
from coterie.report.drawing import MARKERS, MARKS, Table, marker
from coterie.report.groups import Group
from coterie.report.html import Html, element, joined
from coterie.report.models import models_table
from coterie.report.numbers import duration, figure, percent, size
from coterie.report.reading import at, number


@dataclass(frozen=True)
class Figure:
    """A column of the table of methods: heading, how it is written, whether more is better (None: neither)."""

    name: str
    heading: str
    write: Callable[[float | None], str]
    better: bool | None


COLUMNS = (
    Figure("pooled", "global model, pooled test", percent, True),
    Figure("own", "own models, own tests", percent, True),
    Figure("worst_25", "worst quarter of clients", percent, True),
    Figure("own_pooled", "own models, pooled test", percent, True),
    Figure("validation", "validation shares", percent, True),
    Figure("up", "up a client", size, None),
    Figure("down", "down a client", size, None),
    Figure("time", "time", lambda one: "–" if one is None else duration(one), None),
    Figure("mismatch", "lost in aggregation", figure, None),
    Figure("init_mismatch", "start mismatch", figure, None),
)


def results(groups: Sequence[Group], comparison: Mapping[str, Any]) -> Html:
    """What came out. comparison: the content of comparison.json, if there is one."""
    shown = [_key_figures(groups[0])] if len(groups) == 1 else [_methods(groups), _reached(groups, comparison)]
    return joined(*shown, *(_models(group, len(groups) > 1) for group in groups))


def _models(group: Group, named: bool) -> Html | None:
    """All models of a method that has several, with what each scores."""
    found = models_table(group)
    if found is None:
        return None
    name = f"Models of {group.label}" if named else "Its models"
    heading = element("h4", f"{name}: {words.metric_name(group.runs[0])}")
    return element("div", heading, table(found, name), style="margin-top:28px")


def _key_figures(group: Group) -> Html:
    """A single group's figures, large."""
    mean, several = group.mean, len(group.runs) > 1
    metric = words.metric_name(group.runs[0])
    unit = "%" if metric.endswith("%") else ""
    rows: list[tuple[str, str, str, str]] = []

    def add(name: str, label: str, write: Callable[[float], str], unit: str = "", aside: str = "") -> None:
        value = mean(name)
        if value is None:
            return
        values = sorted(group.values(name).values())
        spread = f"{write(values[0])} to {write(values[-1])} over {len(values)} seeds" if several else ""
        rows.append((label, write(value), unit, "; ".join(part for part in (spread, aside) if part)))

    def always(name: str, whose: str) -> str:
        base = mean(name)
        return "" if base is None else f"always {whose}most frequent class: {percent(base)}"

    add("pooled", "global model, pooled test", percent, unit, always("majority", "the "))
    add("own", "clients’ own models, own tests", percent, unit, always("majority_own", "one’s "))
    add("worst_25", "worst quarter of clients, own tests", percent, unit)
    add("own_pooled", "clients’ own models, pooled test", percent, unit)
    add("validation", "validation shares", percent, unit)
    for name, label in (("up", "sent up by a client"), ("down", "sent down to a client")):
        value = mean(name)
        if value is not None:
            written, _, by = size(value).partition(" ")
            rows.append((label, written, by, "on average, all rounds, evaluation apart"))
    add("mismatch", "lost in aggregation, relative", figure, aside="mean over rounds")
    spent = mean("time")
    if spent is not None:
        rows.append(("time of the run", duration(spent), "", ""))
    return element(
        "dl",
        *(
            element(
                "div",
                element("dt", label),
                element(
                    "dd", value, element("small", by) if by else None, class_="big long" if len(value) > 7 else "big"
                ),
                element("dd", aside, class_="aside") if aside else None,
            )
            for label, value, by, aside in rows
        ),
        class_="key",
    )


def _methods(groups: Sequence[Group]) -> Html:
    """All groups' figures: means, with the sample standard deviation over seeds."""
    from coterie.experiments.intervals import deviation

    kept = [column for column in COLUMNS if any(group.mean(column.name) is not None for group in groups)]
    best = {}
    for column in kept:
        means = [one for group in groups if (one := group.mean(column.name)) is not None]
        if column.better and len(means) > 1:
            best[column.name] = column.write(max(means))
    rows = []
    for group in groups:
        cells = []
        for column in kept:
            value, values = group.mean(column.name), list(group.values(column.name).values())
            text = column.write(value)
            spread = deviation(values)
            small = element("small", f"± {column.write(spread)}") if spread is not None and column.better else None
            chosen = "best" if value is not None and best.get(column.name) == text else None
            cells.append(element("td", text, small, class_=chosen))
        rows.append(element("tr", element("th", _mark(group), group.label, scope="row"), *cells))
    for name, heading in (("majority", "most frequent class"),):
        base = [one for group in groups if (one := group.mean(name)) is not None]
        own = [one for group in groups if (one := group.mean("majority_own")) is not None]
        if base or own:
            told = {"pooled": base, "own": own}
            rows.append(
                element(
                    "tr",
                    element("th", heading, scope="row", class_="muted"),
                    *(
                        element(
                            "td",
                            percent(sum(known) / len(known)) if (known := told.get(c.name)) else "",
                            class_="muted",
                        )
                        for c in kept
                    ),
                )
            )
    head = element(
        "tr",
        element("th", words.metric_name(groups[0].runs[0]), scope="col"),
        *(element("th", c.heading, scope="col") for c in kept),
    )
    whole = element("table", element("thead", head), element("tbody", *rows))
    several = any(len(group.runs) > 1 for group in groups)
    note = (
        "Scores are of the last round, traffic and time of the whole run. Bold is the highest mean, which alone is no "
        "proof."
    )
    if several:
        note = f"Means over seeds, ± sample standard deviation. {note}"
    return joined(
        scrolling(whole, "Figures of all methods", "main"),
        element("p", note, class_="note", style="font-size:14px;margin-top:10px"),
    )


def _reached(groups: Sequence[Group], comparison: Mapping[str, Any]) -> Html | None:
    """After how many rounds and bytes each method first had the scores that comparison.json counts as reached."""
    tables = []
    for name, where in (("pooled", "the pooled test shows"), ("own_mean", "clients’ own tests show")):
        target = at(comparison, "targets", name)
        score = number(at(target, "score"))
        rows = []
        for group in groups:
            told = at(comparison, "methods", group.runs[0].method, "reached", name)
            if score is None or told is None:
                continue
            rounds, up = number(at(told, "rounds", "mean")), number(at(told, "up_per_client", "mean"))
            seeds = f"{at(told, 'seeds')} of {at(told, 'of')}"
            rows.append([group.label, "–" if rounds is None else f"{rounds:.1f}", size(up), seeds])
        if rows and score is not None:
            source = str(at(target, "from") or "")
            heading = f"Until {where} {percent(score)}" + (f" ({source})" if source != "given" else "")
            box = table(Table(["", "rounds", "up a client", "seeds that reached it"], rows), heading)
            tables.append(element("div", element("h4", heading), box))
    return element("div", *tables, class_="beside") if tables else None


def _mark(group: Group) -> Html:
    """The group's marker in its colour."""
    mark = MARKS[MARKERS.index(marker(group.place))]
    return element("b", f"{mark} ", style=f"color:var(--{series(group.place)})", aria_hidden="true")


def table(numbers: Table, name: str, kind: str = "") -> Html:
    """Numbers in a box that scrolls by itself."""
    head = element("tr", *(element("th", text, scope="col") for text in numbers.heads))
    rows = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell, class_="words" if len(cell) > 40 else None) for cell in row[1:]),
        )
        for row in numbers.rows
    ]
    return scrolling(element("table", element("thead", head), element("tbody", *rows)), f"{name}, numbers", kind)


def scrolling(content: Html, name: str, kind: str = "") -> Html:
    """A box that scrolls by itself, with the keyboard too."""
    return element("div", content, class_=f"scroll {kind}".strip(), tabindex="0", role="region", aria_label=name)
