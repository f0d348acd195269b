"""Runs that differ in nothing but their seed, as one thing to be drawn: its name, its colour, its curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from coterie.report.reading import Run, at, client_ranks, mapping, number

Pick = Callable[[Mapping[str, Any]], float | None]
"""One figure of a line of metrics.jsonl."""

ASIDE = ("name", "seed", "checkpoint", "per_method")
"""Settings that do not make another thing of a run."""


@dataclass(frozen=True)
class Curve:
    """One figure over rounds, ascending: mean, lowest and highest over `seeds` runs."""

    rounds: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int


@dataclass(frozen=True)
class Group:
    """Runs of the same settings and different seeds, ascending. `place` gives the colour."""

    label: str
    place: int
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[int]:
        """The seeds, ascending."""
        return [run.seed for run in self.runs]

    def curve(self, pick: Pick) -> Curve | None:
        """The figure over the rounds of which all runs that ever have it have it; None where no run has."""
        series = [values for run in self.runs if (values := series_of(run, pick))]
        if not series:
            return None
        rounds = sorted(set.intersection(*(set(values) for values in series))) or sorted(series[0])
        columns = [[values[number] for values in series if number in values] for number in rounds]
        return Curve(
            tuple(rounds),
            tuple(sum(column) / len(column) for column in columns),
            tuple(map(min, columns)),
            tuple(map(max, columns)),
            len(series),
        )

    @cached_property
    def _figures(self) -> dict[str, dict[int, float]]:
        return {
            name: {run.seed: known for run in self.runs if (known := find(run)) is not None}
            for name, find in FIGURES.items()
        }

    def values(self, name: str) -> dict[int, float]:
        """One of `FIGURES` by seed, where it is known."""
        return self._figures[name]

    def mean(self, name: str) -> float | None:
        """Its mean over the seeds where it is known."""
        return average(list(self.values(name).values()))


def grouped(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
    """The groups in order of first appearance, and what is left out of them, in words.

    A run that is not finished is left out of a group in which another one is, as figures after different rounds have
    no common mean; a group of such runs alone keeps the seeds that have come furthest.
    """
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(_identity(run), []).append(run)
    notes: list[str] = []
    kept = {identity: _comparable(own, notes) for identity, own in members.items()}
    labels = _labels([own[0] for own in kept.values()])
    return [
        Group(label, place, tuple(sorted(own, key=lambda run: run.seed)))
        for place, (label, own) in enumerate(zip(labels, kept.values(), strict=True))
    ], notes


def series_of(run: Run, pick: Pick) -> dict[int, float]:
    """A figure by round, where the run has it."""
    return {row["round"]: value for row in run.metrics if (value := pick(row)) is not None}


def score(*path: str) -> Pick:
    """The score (accuracy, in older records) of the entry at this path of a line."""

    def pick(row: Mapping[str, Any]) -> float | None:
        entry = at(row, *path)
        value = number(at(entry, "score"))
        return number(at(entry, "accuracy")) if value is None else value

    return pick


def value(*path: str) -> Pick:
    """The number at this path of a line."""
    return lambda row: number(at(row, *path))


def mean_of(*paths: tuple[str, ...]) -> Pick:
    """The mean of the numbers at these paths, where all are there."""

    def pick(row: Mapping[str, Any]) -> float | None:
        found = [number(at(row, *path)) for path in paths]
        known = [one for one in found if one is not None]
        return sum(known) / len(known) if len(known) == len(found) else None

    return pick


POOLED, OWN = score("global", "pooled"), value("personal", "clients", "mean")
MISMATCH = value("mismatch", "relative")
INIT_MISMATCH = mean_of(("init_mismatch", "B"), ("init_mismatch", "A"))


def client_scores(row: Mapping[str, Any], whose: str) -> dict[str, float]:
    """Every client's score on its own test: of its own model (`personal`) or of the common one (`global`)."""
    entry = mapping(at(row, whose, "clients"))
    told = mapping(entry.get("score")) or mapping(entry.get("accuracy"))
    return {str(name): known for name, one in told.items() if (known := number(one)) is not None}


def last_with(run: Run, pick: Pick) -> float | None:
    """A figure in the last line that has it."""
    return next((known for row in reversed(run.metrics) if (known := pick(row)) is not None), None)


def metric_of(run: Run) -> str:
    """The name of the score."""
    told = run.summary.get("metric")
    metrics = mapping(at(run.metrics[-1], "global", "pooled", "metrics"))
    return str(told) if told else next(iter(metrics), "accuracy")


def traffic(row: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """Bytes of whole messages of a round by (kind, direction)."""
    return {
        (kind, way): int((number(at(size, "payload")) or 0) + (number(at(size, "overhead")) or 0))
        for kind, ways in mapping(row.get("bytes")).items()
        for way, size in mapping(ways).items()
    }


def sent(run: Run, way: str) -> dict[int, float]:
    """Bytes a client, on average, that went this way up to and with each round, evaluation apart."""
    total, found = 0.0, {}
    clients = max(1, len(client_ranks(run)))
    for row in run.metrics:
        total += sum(size for (kind, to), size in traffic(row).items() if to == way and kind != "evaluation")
        found[int(row["round"])] = total / clients
    return found


def seconds(run: Run) -> dict[str, float]:
    """Seconds of the run by what they were spent on."""
    total: Counter[str] = Counter()
    for row in run.timing:
        total.update({part: known for part, one in mapping(row.get("seconds")).items() if (known := number(one))})
    return dict(total)


def average(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None


def _mean_over_rounds(pick: Pick) -> Callable[[Run], float | None]:
    return lambda run: average(list(series_of(run, pick).values()))


def _majority(part: str) -> Callable[[Run], float | None]:
    """What always the most frequent class would score; known where the score is the share of right answers."""
    return lambda run: number(at(run.summary, "majority", part)) if metric_of(run) == "accuracy" else None


def _last(pick: Pick) -> Callable[[Run], float | None]:
    return lambda run: last_with(run, pick)


def _total(run: Run, part: str) -> float | None:
    spent = seconds(run)
    return (sum(spent.values()) if part == "all" else spent.get(part, 0.0)) if spent else None


FIGURES: dict[str, Callable[[Run], float | None]] = {
    "pooled": _last(POOLED),
    "majority": _majority("pooled"),
    "own": _last(OWN),
    "majority_own": _majority("own"),
    "worst_50": _last(value("personal", "clients", "worst_50")),
    "worst_25": _last(value("personal", "clients", "worst_25")),
    "own_pooled": _last(score("personal", "pooled")),
    "validation": _last(score("validation")),
    "loss": _last(value("train", "loss")),
    "up": lambda run: sent(run, "up")[run.rounds],
    "down": lambda run: sent(run, "down")[run.rounds],
    "time": lambda run: _total(run, "all"),
    "mismatch": _mean_over_rounds(MISMATCH),
    "init_mismatch": _mean_over_rounds(INIT_MISMATCH),
}
"""The figures of a run as it stands: scores of the last line that has them, mismatches as means over rounds, bytes a
client (evaluation apart), seconds."""


def _identity(run: Run) -> str:
    return repr(sorted((key, repr(one)) for key, one in settings(run).items()))


def settings(run: Run) -> dict[str, Any]:
    """What sets a run apart from others, by dotted key."""
    return {key: one for key, one in flat(run.config).items() if key.split(".")[0] not in ASIDE}


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping by dotted key; empty mappings have none."""
    found: dict[str, Any] = {}
    for key, one in nested.items():
        found |= flat(one, f"{prefix}{key}.") if isinstance(one, Mapping) else {f"{prefix}{key}": one}
    return found


def _comparable(runs: Sequence[Run], notes: list[str]) -> list[Run]:
    """One run a seed, all of them after the same round."""
    by_seed: dict[int, Run] = {}
    for run in runs:
        other = by_seed.setdefault(run.seed, run)
        if other is not run:
            better, worse = (
                (run, other) if (run.finished, run.rounds) > (other.finished, other.rounds) else (other, run)
            )
            by_seed[run.seed] = better
            notes.append(f"{worse.folder.name} has the settings and seed of {better.folder.name}, so it is left out")
    last = max((run.finished, run.rounds) for run in by_seed.values())
    kept = []
    for run in by_seed.values():
        if (run.finished, run.rounds) == last:
            kept.append(run)
        else:
            notes.append(f"{run.folder.name} is left out of figures and means, as others of its kind have come further")
    return kept


def _labels(runs: Sequence[Run]) -> list[str]:
    """Titles; those that several have, with the settings in which these differ, or else with the folder's name."""
    shared = Counter(run.title for run in runs)
    labels = []
    for run in runs:
        if shared[run.title] == 1:
            labels.append(run.title)
            continue
        alike = [settings(other) for other in runs if other.title == run.title]
        own = settings(run)
        keys = [key for key in own if any(other.get(key) != own[key] for other in alike)]
        told = ", ".join(f"{key.rpartition('.')[2]} {_brief(own[key])}" for key in keys[:2])
        labels.append(f"{run.title}, {told}" if told else run.title)
    again = Counter(labels)
    return [
        label if again[label] == 1 else f"{run.title}, {run.folder.name}"
        for label, run in zip(labels, runs, strict=True)
    ]


def _brief(setting: Any) -> str:
    text = f"{setting:g}" if isinstance(setting, float) else str(setting)
    return text if len(text) <= 24 else f"{text[:23]}…"
