"""What a comparison of finished runs shows: figures with honest spread, and one sentence that they support."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Summary = Mapping[str, Any]
Figure = dict[str, Any]
"""{"mean": ..., "std": sample standard deviation or None, "values": by seed} of one figure of one method."""


def _at(*path: str) -> Callable[[Summary], float | None]:
    def pick(summary: Summary) -> float | None:
        value: Any = summary
        for key in path:
            value = None if value is None else value.get(key)
        return None if value is None else float(value)

    return pick


FIGURES: dict[str, Callable[[Summary], float | None]] = {
    "pooled": _at("global", "pooled", "accuracy"),
    "majority": _at("majority", "pooled"),
    "own_mean": _at("personal", "clients", "mean"),
    "majority_own": _at("majority", "own"),
    "own_worst": _at("personal", "clients", "worst_25"),
    "own_pooled": _at("personal", "pooled", "accuracy"),
    "up_per_client": _at("bytes", "up_per_client"),
    "down_per_client": _at("bytes", "down_per_client"),
    "total": lambda summary: float(summary["bytes"]["up"] + summary["bytes"]["down"]),
    "seconds_clients": _at("seconds", "clients"),
    "seconds_server": _at("seconds", "server"),
    "mismatch": _at("mismatch"),
    "init_mismatch": _at("init_mismatch"),
}
"""Every figure of a comparison, and where a summary has it."""


def comparison(summaries: Sequence[Summary]) -> dict[str, Any]:
    """The content of comparison.json: figures by method, in the order of the summaries, and the sentence."""
    methods: dict[str, list[Summary]] = {}
    for summary in summaries:
        methods.setdefault(summary["method"], []).append(summary)
    found = {
        method: {
            "title": runs[0]["title"],
            "seeds": [run["seed"] for run in runs],
            "figures": {name: _figure(runs, pick) for name, pick in FIGURES.items()},
        }
        for method, runs in methods.items()
    }
    seeds = sorted({summary["seed"] for summary in summaries})
    test = summaries[0]["task"]["test"]
    made = {"methods": found, "seeds": seeds, "rounds": summaries[0]["rounds"], "test_examples": test}
    return {**made, "sentence": sentence(found, seeds, test)}


def sentence(methods: Mapping[str, Any], seeds: Sequence[int], test_examples: int) -> str:
    """What the figures support: the best on the pooled test and on own tests, by how much, and how sure that is.

    With several seeds a lead counts when it exceeds twice its standard error over the seeds that both methods have,
    seed by seed; with one seed no spread is known, and only the sampling error of the test set is told.
    """
    told = [
        part
        for name, baseline, where in (
            ("pooled", "majority", "on the pooled test"),
            ("own_mean", "majority_own", "on clients' own tests"),
        )
        if (part := _lead(methods, name, baseline, where)) is not None
    ]
    if not told:
        return "No accuracy was measured."
    if len(seeds) == 1:
        error = 100 * math.sqrt(0.25 / test_examples)
        caution = (
            f"One seed shows no spread: the test set alone ({test_examples} examples) leaves each pooled figure "
            f"uncertain by up to {error:.1f} points (standard error), so compare more seeds before choosing."
        )
    elif len(seeds) < 5:
        caution = f"{len(seeds)} seeds are too few to tell a lead of the size of its spread from chance."
    else:
        caution = f"These are means over {len(seeds)} seeds."
    return f"{'; '.join(told)}. {caution}".replace("..", ".")


def _lead(methods: Mapping[str, Any], name: str, baseline: str, where: str) -> str | None:
    """Who leads in a figure, by how much over the next, and what always the most frequent class would score."""
    scored = [(m["figures"][name]["mean"], m) for m in methods.values() if m["figures"][name]["mean"] is not None]
    if not scored:
        return None
    scored.sort(key=lambda pair: -pair[0])
    mean, best = scored[0]
    always = best["figures"][baseline]["mean"]
    figure = f"{_percent(mean)} %" + (
        "" if always is None else f"; always the most frequent class: {_percent(always)} %"
    )
    if len(scored) == 1:
        return f"{best['title']} alone has a figure {where} ({figure})"
    second_mean, second = scored[1]
    points = 100 * (mean - second_mean)
    ahead = f"{points:.1f} points above" if points >= 0.05 else "level with"
    text = f"{best['title']} is best {where} ({figure}), {ahead} {second['title']}"
    ours, theirs = best["figures"][name]["values"], second["figures"][name]["values"]
    leads = [
        100 * (ours[seed] - theirs[seed]) for seed in ours if theirs.get(seed) is not None and ours[seed] is not None
    ]
    if len(leads) > 1:
        error = _std(leads) / math.sqrt(len(leads))
        clear = points > 2 * error
        text += f" ({'more' if clear else 'not more'} than twice the standard error of {error:.1f})"
    return text


def _figure(runs: Sequence[Summary], pick: Callable[[Summary], float | None]) -> Figure:
    values = {str(run["seed"]): pick(run) for run in runs}
    known = [value for value in values.values() if value is not None]
    mean = sum(known) / len(known) if known else None
    return {"mean": mean, "std": _std(known) if len(known) > 1 else None, "values": values}


def _std(values: Sequence[float]) -> float:
    """The sample standard deviation."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
