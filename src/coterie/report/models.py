"""Runs with more than one model to tell of: untrained ones, those of clients with each base, the server's others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coterie.report.drawing import Table
from coterie.report.groups import Group, average, score
from coterie.report.numbers import percent
from coterie.report.reading import at, mapping

PLACES = (
    ("untrained, {}", ("untrained",)),
    ("own models, clients with {}", ("personal", "bases")),
    ("at the server, {}", ("global", "further")),
)
"""How models are called and where summary.json has them, by name."""

Place = tuple[str, ...]


def further_models(summary: Mapping[str, Any]) -> Iterator[tuple[str, Place]]:
    """The models beside the deployed one and the clients' mean: what each is called, and its place in summary.json."""
    for called, place in PLACES:
        for name in sorted(mapping(at(summary, *place))):
            yield called.format(name.replace("_", " ")), (*place, name)


def models_table(group: Group) -> Table | None:
    """The scores of all models of a group's runs on the pooled test and on each further one, means over seeds.

    None where there is but the global model, or where no run is finished.
    """
    summaries = [run.summary for run in group.runs if run.finished]
    places = dict(pair for summary in summaries for pair in further_models(summary))
    if not places:
        return None
    places["global model"] = ("global",)
    tests = sorted({test for s in summaries for place in places.values() for test in mapping(at(s, *place, "more"))})
    heads = {"pooled test": ("pooled",)} | {test: ("more", test) for test in tests}
    rows = []
    for called, place in places.items():
        cells = [_mean(summaries, (*place, *of)) for of in heads.values()]
        if any(cell is not None for cell in cells):
            rows.append([called, *map(percent, cells)])
    return Table(["", *heads], rows)


def _mean(summaries: Sequence[Mapping[str, Any]], place: Place) -> float | None:
    return average([known for one in summaries if (known := score(*place)(one)) is not None])
