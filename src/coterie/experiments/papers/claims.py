"""Whether what a paper says of its rows holds for ours: by means over seeds, and seed by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.experiments.papers.definition import Claim, Definition
from coterie.experiments.papers.reading import Cell

Cells = Mapping[str, Mapping[str, Mapping[str, Cell]]]
"""Row, column, figure."""


def judged(definition: Definition, cells: Cells) -> list[dict[str, Any]]:
    """Each claim with a verdict, how many comparisons agree, which rows are missing, and each comparison in words, or
    why there is none.

    Verdicts are `holds`, `holds in part` (of its comparisons), `does not hold`, with `on average` behind the first and
    the last where some seed says otherwise; `cannot be told`, `not tested`. `seeds` is how many were compared.
    """
    return [_judged(definition, claim, cells) for claim in definition.claims]


def _judged(definition: Definition, claim: Claim, cells: Cells) -> dict[str, Any]:
    columns = [] if claim.untested else claim.columns or list(definition.columns)
    wanted = list(dict.fromkeys([*claim.first, *claim.second]))
    missing = [row for row in wanted if all(_cell(cells, row, column, claim.figure) is None for column in columns)]
    agree: list[bool] = []
    seeds: list[list[bool]] = []
    told: list[str] = []
    for column in columns:
        for first in claim.first:
            for second in claim.second or [first]:
                compared = _compared(definition, claim, cells, column, first, second)
                if compared is not None:
                    agree.append(compared[0])
                    seeds.append(compared[1])
                    told.append(compared[2])
    titles = [] if claim.untested else [definition.rows[row].title for row in missing]
    return {
        "says": claim.says,
        "where": claim.where,
        "verdict": "not tested" if claim.untested else _verdict(agree, seeds),
        "agree": sum(agree),
        "of": len(agree),
        "seeds": max(map(len, seeds), default=0),
        "missing": titles,
        "comparisons": [claim.untested] if claim.untested else told,
    }


def _compared(
    definition: Definition, claim: Claim, cells: Cells, column: str, first: str, second: str
) -> tuple[bool, list[bool], str] | None:
    """Whether one comparison agrees on average, in each seed, and in words; None where a figure is not there."""
    other = claim.than.get(column, column)
    places = [(first, column), (second, other)]
    if claim.sense in ("wider", "gains"):
        places = [(first, column), (second, column), (first, other), (second, other)]
    found = [_cell(cells, row, place, claim.figure) for row, place in places]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    holds = _holds(claim, [each["mean"] for each in known])
    by_seed = [[each["values"].get(seed) for each in known] for seed in known[0]["values"]]
    whole = [_holds(claim, values) for values in by_seed if None not in values]
    several = len(definition.columns) > 1
    shown = places if claim.second or claim.than else places[:1]
    words = [
        f"{definition.rows[row].title} {_number(each['mean'])}"
        + (f" ({definition.columns[place].title})" if several and (claim.than or (row, place) == shown[-1]) else "")
        for (row, place), each in zip(shown, known, strict=False)
    ]
    return holds, whole, f"{'yes' if holds else 'no'}: {', '.join(words)}, {sum(whole)} of {len(whole)} seeds"


def _verdict(agree: list[bool], seeds: list[list[bool]]) -> str:
    if not agree:
        return "cannot be told"
    said = "holds" if all(agree) else "holds in part" if any(agree) else "does not hold"
    mixed = any(one != by_mean for by_mean, each in zip(agree, seeds, strict=True) for one in each)
    if mixed and said != "holds in part":
        said += " on average"
    return said


def _cell(cells: Cells, row: str, column: str, figure: str) -> Cell | None:
    found = cells.get(row, {}).get(column, {}).get(figure)
    return None if found is None or found["mean"] is None else found


def _holds(claim: Claim, values: Sequence[float]) -> bool:
    """values: of first and second; of `wider` and `gains`, of both in the column and then in the other one."""
    ours, theirs = values[0], values[1]
    if claim.sense == "wider":
        return abs(ours - theirs) > abs(values[2] - values[3])
    if claim.sense == "gains":
        return ours - theirs > values[2] - values[3]
    return {
        "zero": ours == 0,
        "below": ours < claim.within,
        "above": ours > claim.within,
        "near": abs(ours - theirs) <= claim.within,
        "at-least": ours >= theirs - claim.within,
        "less": ours < theirs,
        "greater": ours > theirs,
    }[claim.sense]


def _number(value: float) -> str:
    return f"{value:.4g}"
