"""Which figures a report has, by section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coterie.report import clients, words
from coterie.report.clients import client_curves_picture, strip_picture
from coterie.report.curves import Level, Line, bytes_picture, how_to_read, lines_over_rounds, rounds_picture
from coterie.report.drawing import Picture
from coterie.report.federation import participation_picture, partition_picture
from coterie.report.groups import INIT_MISMATCH, MISMATCH, OWN, POOLED, Group, average, client_scores, score, value
from coterie.report.numbers import figure, percent
from coterie.report.reading import Run, at, mapping, number
from coterie.report.sums import differences_picture, rank_traffic_picture, time_picture, traffic_picture

Section = tuple[str, str | None, list[Picture]]
"""Heading, what stands under it, figures."""

MOST_ALIKE = 3
"""Pictures of partitions, and of who answered, at most."""

MOST_MEASURES = 8


def sections_of(groups: Sequence[Group]) -> list[Section]:
    """All figures that these runs have records for; sections without any are left out."""
    sections: list[tuple[str, str | None, list[Picture | None]]] = [
        ("Curves", how_to_read(groups), _rounds(groups)),
        (
            "Between seeds",
            "Differences on the same partition and keys. Dots: single seeds. Diamond and bar: their mean and its 95 % "
            "t interval; a bar across zero leaves open which is better.",
            _differences(groups),
        ),
        ("Clients", clients.how_to_read(groups), _clients(groups)),
        ("Aggregation", how_to_read(groups), _aggregation(groups)),
        ("Cost", None, [traffic_picture(groups), rank_traffic_picture(groups), time_picture(groups)]),
        ("Federation", _answers(groups), [*_data(groups), *_participation(groups)]),
    ]
    kept = []
    for heading, intro, pictures in sections:
        drawn = [picture for picture in pictures if picture is not None]
        if drawn:
            kept.append((heading, intro, drawn))
    return kept


def _first(groups: Sequence[Group]) -> Run:
    return groups[0].runs[0]


def _rounds(groups: Sequence[Group]) -> list[Picture | None]:
    metric = words.metric_name(_first(groups))
    phases = _phases(groups)
    pooled = lines_over_rounds(groups, POOLED)
    pictures = [
        rounds_picture(
            "pooled",
            "Global model, pooled test",
            metric,
            pooled,
            percent,
            factor=100.0,
            level=_level(groups, "majority", "always the most frequent class"),
            phases=phases,
            note=_examples_note(groups),
            wide=True,
        ),
        rounds_picture(
            "own",
            "Own models, own tests",
            f"{metric}, mean over clients",
            lines_over_rounds(groups, OWN),
            percent,
            factor=100.0,
            level=_level(groups, "majority_own", "always one’s own most frequent class"),
            phases=phases,
            wide=not pooled,
        ),
        rounds_picture(
            "worst-quarter",
            "Worst quarter of clients",
            f"{metric}, own tests, mean over the lowest quarter",
            lines_over_rounds(groups, value("personal", "clients", "worst_25")),
            percent,
            factor=100.0,
            phases=phases,
        ),
        rounds_picture(
            "validation",
            "Validation shares",
            metric,
            lines_over_rounds(groups, score("validation")),
            percent,
            factor=100.0,
            phases=phases,
        ),
        rounds_picture(
            "loss",
            "Training loss",
            "mean over the clients that answered",
            lines_over_rounds(groups, value("train", "loss")),
            figure,
            phases=phases,
        ),
    ]
    rows = [row for group in groups for run in group.runs for row in run.metrics]
    for test in sorted({str(name) for row in rows for name in mapping(at(row, "global", "more"))}):
        lines = lines_over_rounds(groups, score("global", "more", test))
        title = f"Global model, {test}"
        pictures.append(
            rounds_picture(f"test-{_file(test)}", title, metric, lines, percent, factor=100.0, phases=phases)
        )
    for name in sorted({str(name) for row in rows for name in mapping(at(row, "personal", "further"))}):
        lines = lines_over_rounds(groups, value("personal", "further", name, "clients", "mean"))
        title = f"Sites’ {name.replace('_', ' ')} models, own tests"
        pictures.append(
            rounds_picture(f"further-{_file(name)}", title, metric, lines, percent, factor=100.0, phases=phases)
        )
    if len(groups) == 1:
        pictures.append(_objective(groups[0]))
    pictures.append(bytes_picture(groups, percent, metric))
    return pictures


def _objective(group: Group) -> Picture | None:
    """The clients' objectives at the end of local training, as three lines."""
    lines: list[Line] = []
    for place, (name, told) in enumerate(
        (("task", "task loss"), ("local", "+ penalties"), ("joint", "+ new reference"))
    ):
        curve = group.curve(value("objective", name))
        if curve is not None and not any(curve.mean == line.mean for line in lines):
            role = f"s{place}"
            lines.append(Line(told, curve.rounds, curve.mean, curve.low, curve.high, curve.seeds, role, place))
    return rounds_picture("objective", "Objective", "at the end of local training", lines, figure)


def _differences(groups: Sequence[Group]) -> list[Picture | None]:
    if len(groups) < 2:
        return []
    metric = words.metric_name(_first(groups))
    pictures = []
    for name, title in (("pooled", "Pooled test"), ("own", "Own tests"), ("worst_25", "Worst quarter")):
        against = next((group for group in groups if group.mean(name) is not None), groups[0])
        unit = f"{metric.replace(', %', '')}, points"
        pictures.append(differences_picture(f"difference-{_file(name)}", title, unit, groups, name, against))
    return pictures


def _clients(groups: Sequence[Group]) -> list[Picture | None]:
    metric = words.metric_name(_first(groups))
    scores = [
        one
        for group in groups
        for run in group.runs
        for whose in ("personal", "global")
        for one in client_scores(
            next((r for r in reversed(run.metrics) if client_scores(r, whose)), {}), whose
        ).values()
    ]
    if not scores:
        return []
    limits = (min(scores), max(scores))
    alone = len(groups) == 1
    pictures = [strip_picture(group, limits, metric, alone) for group in groups]
    if alone and len(groups[0].runs) == 1:
        pictures.append(client_curves_picture(_first(groups), metric))
    return pictures


def _aggregation(groups: Sequence[Group]) -> list[Picture | None]:
    pictures = [
        rounds_picture(
            "mismatch",
            "Lost in aggregation",
            "from the mean of clients’ products to what is deployed, relative",
            lines_over_rounds(groups, MISMATCH),
            figure,
        ),
        rounds_picture(
            "start-mismatch",
            "Start mismatch",
            "how far a client starts from what it last sent, relative",
            lines_over_rounds(groups, INIT_MISMATCH),
            figure,
            note="FedPA-LoRA’s Eq. 2, the mean of both factors.",
        ),
    ]
    rows = [row for group in groups for run in group.runs for row in run.metrics]
    names = dict.fromkeys(
        str(name) for row in rows for name, one in mapping(row.get("measures")).items() if number(one) is not None
    )
    for name in list(names)[:MOST_MEASURES]:
        title = name.replace("_", " ").capitalize()
        lines = lines_over_rounds(groups, value("measures", name))
        pictures.append(rounds_picture(f"measure-{_file(name)}", title, "the method’s own measure", lines, figure))
    return pictures


def _participation(groups: Sequence[Group]) -> list[Picture | None]:
    """Who answered, in the first seed's run of each group; groups in which the same clients did are one picture."""
    alike: dict[str, list[Group]] = {}
    for group in groups:
        rows = group.runs[0].metrics
        told = repr([(row.get("cohort"), sorted(mapping(row.get("failed"))), row.get("late")) for row in rows])
        alike.setdefault(told, []).append(group)
    pictures: list[Picture | None] = []
    for members in list(alike.values())[:MOST_ALIKE]:
        run = members[0].runs[0]
        picture = participation_picture(run)
        if picture is not None:
            seed = f"seed {run.seed}" if any(len(group.runs) > 1 for group in members) else ""
            whose = words.listed([group.label for group in members]) if len(alike) > 1 else ""
            told = ", ".join(part for part in (whose, seed) if part)
            name = picture.name if len(alike) == 1 else f"{picture.name}-{members[0].place}"
            title = f"{picture.title}, {told}" if told else picture.title
            pictures.append(
                replace(picture, name=name, title=title, alt=f"{told}. {picture.alt}" if told else picture.alt)
            )
    return pictures


def _answers(groups: Sequence[Group]) -> str | None:
    """That everybody answered, where so, in place of a picture of it."""
    runs = [run for group in groups for run in group.runs]
    if any(participation_picture(run) is not None for run in runs):
        return None
    return "Every client answered in every round."


def _data(groups: Sequence[Group]) -> list[Picture | None]:
    """One picture for every partition there is, at most `MOST_ALIKE`."""
    seen: dict[str, Run] = {}
    for run in sorted((run for group in groups for run in group.runs), key=lambda run: run.seed):
        facts = at(run.partition, "statistics", "histogram")
        if facts is not None:
            seen.setdefault(repr(facts), run)
    several = len(seen) > 1
    return [
        partition_picture(
            run,
            f"partition-{place}" if several else "partition",
            f"Partition of seed {run.seed}" if several else "Who holds what",
        )
        for place, run in enumerate(list(seen.values())[:MOST_ALIKE])
    ]


def _level(groups: Sequence[Group], name: str, label: str) -> Level | None:
    """The baseline, the mean over groups that know it."""
    base = average([one for group in groups if (one := group.mean(name)) is not None])
    return None if base is None else Level(base, "majority", f"Dashes: {label}.")


def _phases(groups: Sequence[Group]) -> list[tuple[int, str]]:
    """(first round, name) of each phase, where all runs have the same."""
    found = []
    for group in groups:
        for run in group.runs:
            starts: list[tuple[int, str]] = []
            for row in run.metrics:
                if not starts or starts[-1][1] != row.get("phase"):
                    starts.append((int(row["round"]), str(row.get("phase"))))
            found.append(starts)
    return found[0] if all(starts == found[0] for starts in found) else []


def _examples_note(groups: Sequence[Group]) -> str:
    """Where rounds are measured on fewer examples than the last one."""
    counts = [number(at(row, "global", "pooled", "examples")) for row in _first(groups).metrics]
    known = [one for one in counts if one is not None]
    if len(known) > 1 and known[0] < known[-1]:
        return (
            f"Rounds before the last are measured on {known[0]:,.0f} test examples, the last on all {known[-1]:,.0f}."
        )
    return f"{known[-1]:,.0f} test examples." if known else ""


def _file(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")
