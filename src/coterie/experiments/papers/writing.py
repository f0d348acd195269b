"""A result as Markdown: ours beside the paper's, what differs, and what holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coterie.experiments.papers.reading import FIGURES
from coterie.report.numbers import percent

NOT_HERE = "not here yet"
LEFT_OUT = "not at this scale"
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
    made: list[str] = [*_reported(result), ""] if result.get("reported") else []
    for index, figure in enumerate(result["figures"]):
        made += [f"{FIGURES[figure].heading[0].upper()}{FIGURES[figure].heading[1:]}:", ""]
        made += [*_by_column(result, figure, with_paper=index == 0), ""]
    return [*made, *_marks(result)]


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
