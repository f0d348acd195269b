"""What a comparison of finished runs shows: figures with honest spread, and one sentence that they support."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coterie.experiments.intervals import LEVEL, Paired, deviation, mean, paired

Summary = Mapping[str, Any]
Figure = dict[str, Any]
"""{"mean": ..., "std": sample standard deviation or None, "values": by seed} of one figure of one method."""


@dataclass(frozen=True)
class Finished:
    """A finished run: the content of its summary.json, and its lines of metrics.jsonl."""

    summary: Summary
    metrics: Sequence[Mapping[str, Any]]


def _at(*path: str) -> Callable[[Mapping[str, Any]], float | None]:
    def pick(record: Mapping[str, Any]) -> float | None:
        value: Any = record
        for key in path:
            value = None if value is None else value.get(key)
        return None if value is None else float(value)

    return pick


FIGURES: dict[str, Callable[[Summary], float | None]] = {
    "pooled": _at("global", "pooled", "score"),
    "majority": _at("majority", "pooled"),
    "own_mean": _at("personal", "clients", "mean"),
    "majority_own": _at("majority", "own"),
    "own_worst_50": _at("personal", "clients", "worst_50"),
    "own_worst_25": _at("personal", "clients", "worst_25"),
    "own_pooled": _at("personal", "pooled", "score"),
    "up_per_client": _at("bytes", "up_per_client"),
    "down_per_client": _at("bytes", "down_per_client"),
    "total": lambda summary: float(summary["bytes"]["up"] + summary["bytes"]["down"]),
    "mismatch": _at("mismatch"),
    "init_mismatch": _at("init_mismatch"),
}
"""Every figure of a comparison, and where a summary has it."""

TARGETS = ("pooled", "own_mean")
"""The figures of which it is told how many rounds and bytes they took to reach a target."""

PAIRED = ("pooled", "own_mean", "own_worst_50", "own_worst_25")
"""The figures of which differences are taken, seed by seed."""

SHARE_OF_BEST = 0.95
"""The target where none is given: this share of the best method's mean."""


def comparison(
    runs: Sequence[Finished], *, against: str | None = None, target: float | None = None, **more: Any
) -> dict[str, Any]:
    """The content of comparison.json: methods in the order of the runs, and what they show. No times are in it, so that
    it depends on settings and data alone.

    against: the method that differences are taken from; the first where none is named, or no run of it finished.
    target: the score of TARGETS whose rounds are counted, by default SHARE_OF_BEST of the best method's mean after the
    last round. `more` is added as is.
    """
    methods: dict[str, list[Finished]] = {}
    for run in runs:
        methods.setdefault(run.summary["method"], []).append(run)
    reference = against if against in methods else next(iter(methods))
    titles = _titles({method: own[0].summary["title"] for method, own in methods.items()})
    found: dict[str, Any] = {
        method: {
            "title": titles[method],
            "seeds": [run.summary["seed"] for run in own],
            "figures": {
                name: _figure({_seed(run): pick(run.summary) for run in own}) for name, pick in FIGURES.items()
            },
        }
        for method, own in methods.items()
    }
    aims = ((name, _target(found, name, target)) for name in TARGETS)
    targets = {name: aim for name, aim in aims if aim is not None}
    for method, own in methods.items():
        found[method]["reached"] = {name: _reached(own, name, aim["score"]) for name, aim in targets.items()}
    first = runs[0].summary
    made: dict[str, Any] = {
        "metric": first["metric"],
        "rounds": first["rounds"],
        "test_examples": first["task"]["test"],
        "seeds": sorted({run.summary["seed"] for run in runs}),
        "methods": found,
        "targets": targets,
        "paired": _paired(found, reference),
    }
    return {**made, **more, "sentence": sentence(made)}


def timing(runs: Sequence[Finished]) -> dict[str, Any]:
    """The content of timing.json: seconds of each method's runs, by what they were spent on and seed."""
    methods: dict[str, dict[str, dict[str, float]]] = {}
    for run in runs:
        for part, seconds in run.summary["seconds"].items():
            methods.setdefault(run.summary["method"], {}).setdefault(part, {})[_seed(run)] = seconds
    return {
        "seconds": {
            method: {part: _figure(values) for part, values in parts.items()} for method, parts in methods.items()
        }
    }


def sentence(found: Mapping[str, Any]) -> str:
    """What the figures support: the best on the pooled test and on own tests, by how much, and how sure that is.

    With several seeds the t interval of the lead over the next is told, seed by seed; with one seed no spread is
    known, and only the sampling error of the test set is told, where the metric is the accuracy.
    """
    told = [
        part
        for name, baseline, where in (
            ("pooled", "majority", "on the pooled test"),
            ("own_mean", "majority_own", "on clients' own tests"),
        )
        if (part := _lead(found["methods"], name, baseline, where)) is not None
    ]
    if not told:
        return "No score was measured."
    count = len(found["seeds"])
    if count == 1:
        caution = "One seed: no spread is known"
        if found["metric"] == "accuracy":
            error = 100 * math.sqrt(0.25 / found["test_examples"])
            caution += (
                f", and the test set alone ({found['test_examples']} examples) leaves each pooled figure uncertain by "
                f"up to {error:.1f} points (standard error)"
            )
        caution += "; compare more seeds before choosing."
    elif count < 5:
        caution = f"{count} seeds are few: an interval holds only as far as differences between seeds are normal."
    else:
        caution = f"These are means over {count} seeds."
    return f"{'; '.join(told)}. {caution}".replace("..", ".")


def _lead(methods: Mapping[str, Any], name: str, baseline: str, where: str) -> str | None:
    """Who leads in a figure, by how much over the next, and what always the most frequent class would score."""
    scored = [(m["figures"][name]["mean"], m) for m in methods.values() if m["figures"][name]["mean"] is not None]
    if not scored:
        return None
    scored.sort(key=lambda pair: -pair[0])
    best_mean, best = scored[0]
    always = best["figures"][baseline]["mean"]
    figure = f"{100 * best_mean:.1f}" + (
        "" if always is None else f"; always the most frequent class: {100 * always:.1f}"
    )
    if len(scored) == 1:
        return f"{best['title']} alone has a figure {where} ({figure})"
    second_mean, second = scored[1]
    points = 100 * (best_mean - second_mean)
    ahead = f"{points:.1f} points above" if points >= 0.05 else "level with"
    text = f"{best['title']} is best {where} ({figure}), {ahead} {second['title']}"
    lead = paired(best["figures"][name]["values"], second["figures"][name]["values"])
    if lead is not None and lead.low is not None and lead.high is not None:
        text += f" (95 % interval {100 * lead.low:.1f} to {100 * lead.high:.1f}"
        text += ")" if lead.low > 0 else ", which includes 0)"
    return text


def _target(methods: Mapping[str, Any], name: str, given: float | None) -> dict[str, Any] | None:
    """The score that counts as reached, and where it comes from; None where no method has the figure."""
    means = {
        method["title"]: method["figures"][name]["mean"]
        for method in methods.values()
        if method["figures"][name]["mean"] is not None
    }
    if not means:
        return None
    if given is not None:
        return {"score": given, "from": "given"}
    best = max(means, key=lambda title: means[title])
    score = means[best] - (1 - SHARE_OF_BEST) * abs(means[best])  # below the best where a metric can be negative, too
    return {"score": score, "from": f"{100 * SHARE_OF_BEST:.0f} % of {best}"}


def _reached(runs: Sequence[Finished], name: str, score: float) -> dict[str, Any] | None:
    """After how many rounds, and bytes up a client, the figure first was at the score: by seed, None where it never
    was, and over the seeds where it was. None where the method has no such figure."""
    if all(FIGURES[name](run.summary) is None for run in runs):
        return None
    rounds: dict[str, float | None] = {}
    up: dict[str, float | None] = {}
    for run in runs:
        sent = 0
        rounds[_seed(run)] = up[_seed(run)] = None
        for line in run.metrics:
            sent += sum(
                ways["up"]["payload"] + ways["up"]["overhead"]
                for kind, ways in line["bytes"].items()
                if kind != "evaluation" and "up" in ways
            )
            value = FIGURES[name](line)
            if value is not None and value >= score:
                rounds[_seed(run)], up[_seed(run)] = line["round"], sent / len(run.summary["clients"])
                break
    reached = sum(value is not None for value in rounds.values())
    return {"seeds": reached, "of": len(rounds), "rounds": _figure(rounds), "up_per_client": _figure(up)}


def _paired(methods: Mapping[str, Any], against: str) -> dict[str, Any]:
    """Every other method's figures less the reference's, seed by seed."""
    theirs = methods[against]["figures"]
    return {
        "against": against,
        "level": LEVEL,
        "methods": {
            method: {name: _plain(paired(own["figures"][name]["values"], theirs[name]["values"])) for name in PAIRED}
            for method, own in methods.items()
            if method != against
        },
    }


def _plain(difference: Paired | None) -> dict[str, Any] | None:
    return None if difference is None else {"n": len(difference.by_seed), **asdict(difference)}


def _titles(titles: Mapping[str, str]) -> dict[str, str]:
    """Titles; those that two methods share, with the class or name behind."""
    counts = Counter(titles.values())
    return {
        method: title if counts[title] == 1 else f"{title} ({method.rpartition(':')[2]})"
        for method, title in titles.items()
    }


def _seed(run: Finished) -> str:
    return str(run.summary["seed"])


def _figure(values: Mapping[str, float | None]) -> Figure:
    known = [value for value in values.values() if value is not None]
    return {"mean": mean(known) if known else None, "std": deviation(known), "values": dict(values)}
