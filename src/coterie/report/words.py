"""What was run and what came out, in plain words that claim no more than the figures support."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from coterie.report.groups import Group, average, metric_of, settings
from coterie.report.numbers import percent
from coterie.report.reading import Run, at, client_ranks, mapping, number

METRICS = {"accuracy": "accuracy", "f1": "F1", "macro_f1": "macro F1", "matthews": "Matthews correlation"}


def metric_name(run: Run) -> str:
    """The score as a page calls it, with its unit."""
    name = metric_of(run)
    return "accuracy, %" if name == "accuracy" else f"{METRICS.get(name, name.replace('_', ' '))} × 100"


def written_score(run: Run) -> Callable[[float | None], str]:
    """A score with its unit, for sentences."""
    sign = "\u00a0%" if metric_of(run) == "accuracy" else ""
    return lambda one: "–" if one is None else f"{percent(one)}{sign}"


def task_name(run: Run) -> str:
    """The task, or the file that it is read from."""
    name, path = at(run.config, "task", "name"), at(run.config, "task", "path")
    return Path(path).name if name == "file" and isinstance(path, str) else str(name or at(run.summary, "task", "name"))


def title_of(groups: Sequence[Group]) -> str:
    """The page's first heading."""
    tasks = list(dict.fromkeys(task_name(run) for group in groups for run in group.runs))
    on = f" on {tasks[0]}" if len(tasks) == 1 else ""
    labels = [group.label for group in groups]
    if len(labels) == 1:
        return f"{labels[0]}{on}"
    if len(labels) <= 4 and sum(map(len, labels)) <= 60:
        return f"{listed(labels)}{on}"
    methods = len({run.title for group in groups for run in group.runs}) == len(groups)
    return f"{len(groups)} {'methods' if methods else 'settings'}{on}"


def facts_of(groups: Sequence[Group]) -> list[str]:
    """What was run, in short pieces: rounds, clients and ranks, seeds, base model, how data were shared out."""
    runs = [run for group in groups for run in group.runs]
    first = runs[0]
    facts = []
    counts = sorted({run.rounds for run in runs})
    facts.append(_range(counts, "round"))
    clients = sorted({len(client_ranks(run)) for run in runs})
    ranks = sorted({rank for run in runs for rank in client_ranks(run).values()})
    told = f" of rank {ranks[0]}" if len(ranks) == 1 else f" of ranks {listed(map(str, ranks))}" if ranks else ""
    facts.append(_range(clients, "client") + (told if len(ranks) <= 6 else f" of ranks {ranks[0]} to {ranks[-1]}"))
    seeds = sorted({run.seed for run in runs})
    if len(seeds) > 6:
        facts.append(f"{len(seeds)} seeds")
    else:
        facts.append(f"seed{'s' if len(seeds) > 1 else ''} {listed(map(str, seeds))}")
    base = at(first.config, "model", "base")
    if isinstance(base, str) and all(at(run.config, "model", "base") == base for run in runs):
        facts.append(f"base model {Path(base).name if '/' in base and Path(base).is_absolute() else base}")
    how = mapping(at(first.partition, "how")) or mapping(first.config.get("partition"))
    if how.get("kind"):
        name = "alpha" if how["kind"] == "mixture" else "beta"
        value = number(how.get(name))
        uses = value is not None and how["kind"] in ("dirichlet", "quantity", "mixture")
        facts.append(f"{how['kind']} partition" + (f", {name} {value:g}" if uses else ""))
    return facts


def lead(groups: Sequence[Group]) -> list[str]:
    """The sentences under the heading."""
    return _one(groups[0]) if len(groups) == 1 else _several(groups)


def notes_on(groups: Sequence[Group]) -> list[str]:
    """What a reader must know before comparing: unfinished runs, and groups that are not of the same thing."""
    notes = []
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        if not run.finished:
            planned = at(run.config, "rounds")
            of = f" of {planned}" if isinstance(planned, int) and planned > run.rounds else ""
            notes.append(
                f"{run.folder.name} is not finished: {run.rounds}{of} rounds have been played. Figures are of the last "
                "round that has them; what a summary would tell (baselines of the most frequent class) is missing."
            )
    for what, tell in (
        ("tasks", lambda run: (at(run.config, "task"), at(run.summary, "task", "test"))),
        ("base models", lambda run: (at(run.config, "model", "base"), run.recorded.get("base"))),
        ("numbers of rounds", lambda run: run.rounds),
    ):
        if len({repr(tell(run)) for run in runs if run.finished}) > 1:
            notes.append(f"The runs are of different {what}: figures side by side do not compare methods alone.")
    shares: dict[int, set[str]] = {}
    for run in runs:
        if run.partition:
            shares.setdefault(run.seed, set()).add(repr(at(run.partition, "statistics", "histogram")))
    if any(len(found) > 1 for found in shares.values()):
        notes.append("Runs of the same seed hold different partitions of the data.")
    versions = {repr(sorted(mapping(run.recorded.get("versions")).items())) for run in runs}
    if len(versions) > 1:
        notes.append("The runs were made with different versions of software: see the environment below.")
    return notes


def listed(names: Iterable[str]) -> str:
    """a, b and c."""
    every = list(names)
    return every[0] if len(every) == 1 else f"{', '.join(every[:-1])} and {every[-1]}"


def differing(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Settings that differ between groups: by dotted key, one value for each group."""
    own = [settings(group.runs[0]) for group in groups]
    keys = dict.fromkeys(key for one in own for key in one)
    found = {key: ["–" if key not in one else str(one[key]) for one in own] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def _one(group: Group) -> list[str]:
    """One group: its score beside the baseline, and the clients' own."""
    first = group.runs[0]
    score = written_score(first)
    rounds = f"After {first.rounds} round{'s' if first.rounds > 1 else ''}"
    seeds = f" on average over {len(group.runs)} seeds" if len(group.runs) > 1 else ""
    pooled, majority = group.mean("pooled"), group.mean("majority")
    test = number(at(first.metrics[-1], "global", "pooled", "examples")) or number(at(first.summary, "task", "test"))
    told: list[str] = []
    own_told: list[str] = []
    if pooled is not None:
        told.append(
            f"{rounds}, the global model scores {score(pooled)} on the pooled test{seeds}"
            + (
                f"; always answering the most frequent class would score {score(majority)}."
                if majority is not None
                else "."
            )
        )
        if majority is not None and test:
            told.append(_against_majority(pooled - majority, test))
    own, base, worst = group.mean("own"), group.mean("majority_own"), group.mean("worst_25")
    if own is not None:
        start = "The models" if pooled is not None else f"{rounds}, the models"
        text = f"{start} that clients use score {score(own)} on their own tests on average"
        text += f", {score(worst)} in the worst quarter" if worst is not None and len(client_ranks(first)) > 1 else ""
        own_told.append(f"{text}{seeds if pooled is None else ''}.")
        if base is not None:
            own_told.append(
                f"That is {_points(own - base)} always answering one’s own most frequent class ({score(base)})."
            )
    return [" ".join(part) for part in (told, own_told) if part] or [f"{rounds}, no score had been measured."]


def _against_majority(lead: float, test: float) -> str:
    error = math.sqrt(0.25 / test)
    if abs(lead) < 2 * error:
        return (
            f"On {test:,.0f} test examples that is not told apart from the baseline: the sampling error alone is up to "
            f"{100 * error:.1f} points."
        )
    return f"That is {_points(lead)} the baseline."


def _points(lead: float) -> str:
    points = 100 * abs(lead)
    return "level with" if points < 0.05 else f"{points:.1f} points {'above' if lead > 0 else 'below'}"


def _several(groups: Sequence[Group]) -> list[str]:
    """Several groups: who leads on which test, by how much, in how many seeds."""
    score = written_score(groups[0].runs[0])
    told: list[str] = []
    for name, baseline, where, always in (
        ("pooled", "majority", "the pooled test", "Always answering the most frequent class"),
        ("own", "majority_own", "clients’ own tests", "Always answering one’s own most frequent class"),
    ):
        ranked = sorted(
            ((mean, group) for group in groups if (mean := group.mean(name)) is not None), key=lambda pair: -pair[0]
        )
        if not ranked:
            continue
        best, group = ranked[0]
        text = f"On {where}, {group.label} scores highest: {score(best)}"
        text += f" on average over {len(group.runs)} seeds" if len(group.runs) > 1 and not told else ""
        if len(ranked) > 1:
            text += f", {_ahead(group, ranked[1][1], name)}"
        text = f"{text}."
        base = average([one for each in groups if (one := each.mean(baseline)) is not None])
        if base is not None:
            text += f" {always} would score {score(base)}" + (", more than any of them." if base > best else ".")
        told.append(text)
    if not told:
        return ["No score had been measured."]
    return [*told, _caution(groups)]


def _ahead(best: Group, second: Group, name: str) -> str:
    ours, theirs = best.values(name), second.values(name)
    common = sorted(set(ours) & set(theirs))
    if not common:
        return f"before {second.label}"
    lead = average([ours[seed] - theirs[seed] for seed in common]) or 0.0
    text = f"{_points(lead)} {second.label}"
    if len(common) > 1:
        wins = sum(ours[seed] > theirs[seed] for seed in common)
        text += f" and ahead of it in {wins} of {len(common)} seeds"
    return text


def _caution(groups: Sequence[Group]) -> str:
    first = groups[0].runs[0]
    seeds = min(len(group.runs) for group in groups)
    if seeds == 1:
        test = number(at(first.summary, "task", "test"))
        sampling = ""
        if test and metric_of(first) == "accuracy":
            error = 100 * math.sqrt(0.25 / test)
            sampling = f", and {test:,.0f} test examples alone leave each pooled figure uncertain by {error:.1f} points"
        return f"One seed shows no spread{sampling}: play more seeds before choosing."
    if seeds < 5:
        return f"{seeds} seeds are few: a lead of the size of the spread may be chance."
    return ""


def _range(counts: Sequence[int], what: str) -> str:
    if len(counts) == 1:
        return f"{counts[0]} {what}{'' if counts[0] == 1 else 's'}"
    return f"{counts[0]} to {counts[-1]} {what}s"
