"""A result as Markdown: ours beside the paper's, what differs, and what holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coterie.experiments.papers import panels
from coterie.experiments.papers.reading import FIGURES, cell
from coterie.report.numbers import percent

NOT_HERE = "not here yet"
LEFT_OUT = "not at this scale"
COMPARED = ("own", "worst_50", "worst_25", "pooled")
"""Figures of which differences from one row are told."""
MANY = 6
"""Comparisons of a statement that are all told; of more, only those that do not hold."""


def markdown(result: Mapping[str, Any]) -> str:
    """The whole page of a result."""
    lines = [f"# {result['title']}", "", f"{result['paper']}; {result['shows']}.", ""]
    lines += [f"Scale {result['scale']}: {result['about']}.", f"`{result['command']}`, {_where(result)}.", ""]
    lines += tables(result)
    if "picture" in result:
        lines += [f"![{result['title']}]({result['picture']})", ""]
    lines += ["## What the paper says, and what holds here", "", *claims(result), ""]
    lines += ["## What differs", "", "| | paper | here | |", "|---|---|---|---|"]
    lines += [f"| {s['aspect']} | {s['paper']} | {s['here']} | {s['verdict']} |" for s in result["setting"]]
    return "\n".join([*lines, "", *(f"- {note}" for note in result["notes"]), ""])


def tables(result: Mapping[str, Any]) -> list[str]:
    """The tables: of the first figure beside the paper's, of the further ones ours alone.

    What the paper reports of conditions that were not computed stands in a table of its own, before them.
    """
    if result["kind"] == "curves" and len(result["columns"]) == 1:
        return [*_by_figure(result), ""]
    if "panels" in result:
        return [*([f"**{result['void']}**.", ""] if result.get("void") else []), *panels.tables(result)]
    made: list[str] = [*_reported(result), ""] if result.get("reported") else []
    against = result.get("against", "")
    absolute = {**result, "rows": _without_paper(result["rows"], against)} if against else result
    for index, figure in enumerate(result["figures"]):
        heading = f"{FIGURES[figure].heading[0].upper()}{FIGURES[figure].heading[1:]}"
        made += [f"{heading}:", "", *_by_column(absolute, figure, with_paper=index == 0), ""]
        if against and figure in COMPARED:
            made += [f"{heading}, method minus {result['rows'][against]['title']}, seed by seed:", ""]
            made += [*_by_column(differences(result, figure), figure, with_paper=index == 0), ""]
    return [*made, *_marks(result)]


def differences(result: Mapping[str, Any], figure: str) -> dict[str, Any]:
    """The result with every other row's difference from the row `against` in place of the figure, of seeds in both."""
    against = result["against"]
    base = result["rows"][against]["here"]
    rows = {}
    for name, entry in result["rows"].items():
        if name == against:
            continue
        here = {}
        for column, found in entry["here"].items():
            mine = found.get(figure, {}).get("values", {})
            theirs = base.get(column, {}).get(figure, {}).get("values", {})
            both = [seed for seed in mine if None not in (mine[seed], theirs.get(seed))]
            here[column] = {figure: cell({seed: mine[seed] - theirs[seed] for seed in both})}
        rows[name] = {**entry, "here": here}
    return {**result, "rows": rows}


def _without_paper(rows: Mapping[str, Any], but: str) -> dict[str, Any]:
    return {name: entry if name == but else {**entry, "paper": {}} for name, entry in rows.items()}


def claims(result: Mapping[str, Any]) -> list[str]:
    """One point for each statement of the paper, with the comparisons that speak against it, or all if they are few."""
    made = []
    for claim in result["claims"]:
        count = f" ({claim['agree']} of {claim['of']})" if claim["of"] > 1 else ""
        count += ", one seed" if claim["seeds"] == 1 and result["kind"] != "server" else ""
        missing = f" Without {', '.join(claim['missing'])}." if claim["missing"] else ""
        made.append(f"- **{claim['verdict']}**{count}: {claim['says']} [{claim['where']}].{missing}")
        told = claim["comparisons"]
        shown = told if len(told) <= MANY else [line for line in told if line.startswith("no:")]
        made += [f"  - {line}" for line in shown]
    return made


def _by_column(result: Mapping[str, Any], figure: str, with_paper: bool) -> list[str]:
    write = _writer(FIGURES[figure].unit)
    heads = ["", "heads"] if result["kind"] == "runs" else [""]
    told = {column for entry in result["rows"].values() for column in entry["paper"]}
    beside = told & set(result["columns"]) if with_paper else set()
    for column, title in result["columns"].items():
        heads += [f"{title}: paper", "here"] if column in beside else [title]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for entry in result["rows"].values():
        if not entry["state"] and not (beside and entry["paper"]) and not _any(entry, figure):
            continue  # it has no such figure, as local training has no global model
        cells = [entry["title"]]
        if result["kind"] == "runs":
            mark = " †" if figure == "pooled" and entry["heads"] == "own" else ""
            mark = " ‡" if figure == "own" and entry["heads"] == "averaged" else mark
            cells.append(f"{entry['heads']}{mark}")
        for column in result["columns"]:
            if column in beside:
                cells.append(_paper(entry["paper"].get(column), write))
            cells.append(_here(entry, column, figure, write))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _any(entry: Mapping[str, Any], figure: str) -> bool:
    """Whether the row has the figure in some column."""
    return any(found.get(figure, {}).get("mean") is not None for found in entry["here"].values())


def _reported(result: Mapping[str, Any]) -> list[str]:
    """What the paper reports of conditions that were not computed here."""
    write = _writer(FIGURES[result["figures"][0]].unit)
    lines = ["What the paper reports:", "", f"| | {' | '.join(result['reported'].values())} |"]
    lines.append("|---|" + "---:|" * len(result["reported"]))
    for entry in result["rows"].values():
        if entry["paper"]:
            cells = [_paper(entry["paper"].get(column), write) for column in result["reported"]]
            lines.append(f"| {entry['title']} | {' | '.join(cells)} |")
    return lines


def _by_figure(result: Mapping[str, Any]) -> list[str]:
    """Figures as lines, methods as columns; for a picture whose values the paper does not print."""
    (column,) = result["columns"]
    rows = result["rows"].values()
    lines = [f"| {result['columns'][column]} | {' | '.join(row['title'] for row in rows)} |"]
    lines.append("|---|" + "---:|" * len(rows))
    for figure in result["figures"]:
        write = _writer(FIGURES[figure].unit)
        lines.append(f"| {FIGURES[figure].heading} | {' | '.join(_here(row, column, figure, write) for row in rows)} |")
    return lines


def _here(entry: Mapping[str, Any], column: str, figure: str, write: Callable[[float], str]) -> str:
    if entry["state"]:
        return str(entry["state"])
    cell = entry["here"].get(column, {}).get(figure)
    if cell is None or cell["mean"] is None:
        return "–"
    return write(cell["mean"]) + ("" if cell["std"] is None else f" ± {write(cell['std'])}")


def _paper(reported: Sequence[float | None] | None, write: Callable[[float], str]) -> str:
    if reported is None or reported[0] is None:
        return "–"
    return write(reported[0]) + ("" if reported[1] is None else f" ± {write(reported[1])}")


def _marks(result: Mapping[str, Any]) -> list[str]:
    """What the marks in the tables mean, and the rows' own notes."""
    made = []
    if result["kind"] == "runs":
        spread = "± is the sample standard deviation over seeds (the paper's: over its three seeds)."
        if any(entry["heads"] == "own" for entry in result["rows"].values()):
            spread = (
                "Where a row has own heads, its sensible figure is on own tests; where heads are averaged, on the "
                "pooled test. † heads of single clients on the pooled test, mean over clients. ‡ one head for all on "
                f"own tests. {spread}"
            )
        made += [spread, ""]
    notes = [f"{entry['title']}: {entry['note']}." for entry in result["rows"].values() if entry["note"]]
    return [*made, *([" ".join(notes), ""] if notes else [])]


def _writer(unit: str) -> Callable[[float], str]:
    if unit == "percent":
        return percent
    return lambda value: "0" if value == 0 else f"{value:.3g}"


def _where(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    return f"{result['date']}, {machine['cores']} cores ({machine['cpu']}), torch {result['versions']['torch']}"
