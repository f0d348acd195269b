"""What finished runs show: accuracies of the last round, and mismatches round by round."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from coterie.errors import ConfigError
from coterie.experiments.build import scale_of
from coterie.experiments.config import Config
from coterie.experiments.folders import PARTITION, SUMMARY, read_config, read_lines
from coterie.experiments.papers import estimates
from coterie.experiments.shares import dealt


@dataclass(frozen=True)
class Finished:
    """A run that ended: its settings, the content of its summary.json, and of metrics.jsonl by round.

    mixtures: by client, the shares of tasks that it was to have; empty where the task is no mixture.
    """

    config: Config
    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    mixtures: estimates.Mixtures


@dataclass(frozen=True)
class Figure:
    """A measured figure: how it is headed and written, and where a run has it (None: nowhere). `layer` is the shell
    pattern of the one layer that a figure may be of. axis: of the figure over rounds; None where it has no curve."""

    heading: str
    unit: Literal["percent", "number", "seconds"]
    pick: Callable[[Finished, str], float | None]
    axis: Literal["log", "linear"] | None = None


Cell = dict[str, Any]
"""{"mean", "std" (sample deviation, None of one value), "values" by seed}."""


def finished_runs(folder: Path, method: str, seeds: Sequence[int]) -> list[Finished]:
    """The runs of one method under a comparison's folder, in the order of the seeds asked for."""
    found = {}
    for place in sorted(folder.glob(f"*/{SUMMARY}")):
        summary = json.loads(place.read_text(encoding="utf-8"))
        if summary["method"] == method and summary["seed"] in seeds:
            config, _ = read_config(place.parent)
            partition = json.loads((place.parent / PARTITION).read_text(encoding="utf-8"))
            metrics = read_lines(place.parent / "metrics.jsonl")
            found[summary["seed"]] = Finished(config, summary, metrics, estimates.requested(partition))
    return [found[seed] for seed in seeds if seed in found]


def of_model(run: Finished, model: str) -> Finished:
    """The run as if this one of its models were the deployed one; see `Row.model`.

    The training loss of `personal` is that of all clients, of personal/bases/<name> that of the clients with this base
    model; others have none.
    """
    if not model:
        return run
    found: Any = run.summary
    for key in model.split("/"):
        found = (found or {}).get(key)
    spec = model.removeprefix("personal/bases/") if model.startswith("personal/bases/") else None
    metrics = [
        {
            **line,
            "global": None,
            "train": {
                "loss": line["train"]["loss"] if model == "personal" else (line["train"].get("bases") or {}).get(spec)
            },
        }
        for line in run.metrics
    ]
    return replace(run, summary={**run.summary, "global": found, "personal": None}, metrics=metrics)


def cell(values: Mapping[str, float | None]) -> Cell:
    """Mean and sample deviation of the values that are there."""
    known = [value for value in values.values() if value is not None]
    mean = sum(known) / len(known) if known else None
    std = None
    if mean is not None and len(known) > 1:
        mean = known[0] if max(known) == min(known) else mean  # equal values have no spread, rounding or not
        std = math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))
    return {"mean": mean, "std": std, "values": dict(values)}


def curve(run: Finished, figure: str, layer: str) -> dict[int, float]:
    """A figure by round, of the rounds that have it.

    accuracy: of the global model on the pooled test, as much of it as a round is measured on. train_loss: of clients'
    local training, mean over clients. average_rank: see the
    method's `measures`. The others are mismatches of the layer that the pattern names, or of all layers on average
    (`mean_...`).

    aggregation: Eq. 1, ||B_g A_g - mean of B_i A_i||_F of unscaled products; aggregation_relative: divided by the
    norm of the mean; start_B, start_A: Eq. 2 of the factors that enter this round.

    Raises:
        ConfigError: no layer or several fit the pattern.
    """
    if figure in _PATHS:
        values = ((int(metrics["round"]), _followed(metrics, _PATHS[figure])) for metrics in run.metrics)
        return {number: value for number, value in values if value is not None}
    over_all = figure.startswith("mean_")
    kind = figure.removeprefix("mean_")
    section, key = {
        "aggregation": ("mismatch", "absolute"),
        "aggregation_relative": ("mismatch", "relative"),
        "start_B": ("init_mismatch", "B"),
        "start_A": ("init_mismatch", "A"),
    }[kind]
    scale = scale_of(run.config, max(dealt(run.config.clients.ranks, run.config.clients.count)))
    found = {}
    for metrics in run.metrics:
        layers = metrics.get(section, {}).get("layers", {})
        if not layers:
            continue
        chosen = list(layers) if over_all else [name for name in layers if fnmatch(name, layer)]
        if not over_all and len(chosen) != 1:
            raise ConfigError(
                f"{len(chosen)} adapted layers fit {layer!r}; of this model adapt one such (model.targets)"
            )
        mean = sum(layers[name][key] for name in chosen) / len(chosen)
        found[int(metrics["round"])] = mean / scale if kind == "aggregation" else mean
    return found


_PATHS = {
    "accuracy": ("global", "pooled", "accuracy"),
    "average_rank": ("measures", "average_rank"),
    "train_loss": ("train", "loss"),
}
"""Where a line of metrics.jsonl has the figures that need no reckoning."""


def _followed(content: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = content
    for key in path:
        value = None if value is None else value.get(key)
    return None if value is None else float(value)


def _over_rounds(figure: str) -> Callable[[Finished, str], float | None]:
    def pick(run: Finished, layer: str) -> float | None:
        values = list(curve(run, figure, layer).values())
        return sum(values) / len(values) if values else None

    return pick


def _at(*path: str) -> Callable[[Finished, str], float | None]:
    return lambda run, layer: _followed(run.summary, path)


def _last(figure: str) -> Callable[[Finished, str], float | None]:
    def pick(run: Finished, layer: str) -> float | None:
        values = curve(run, figure, layer)
        return values[max(values)] if values else None

    return pick


def _rank_left(run: Finished, layer: str) -> float | None:
    """The average rank after the last round, as a share of the largest rank of any client."""
    left, ranks = _last("average_rank")(run, layer), run.config.clients.ranks
    return None if left is None else left / (ranks if isinstance(ranks, int) else max(ranks))


def _megabytes(direction: str) -> Callable[[Finished, str], float | None]:
    """Of a client in a round on average, base patches and heads included."""
    total = _at("bytes", f"{direction}_per_client")

    def pick(run: Finished, layer: str) -> float | None:
        size = total(run, layer)
        return None if size is None else size / run.summary["rounds"] / 1e6

    return pick


def _estimate(judge: Callable[[estimates.Pairs], float | None]) -> Callable[[Finished, str], float | None]:
    """Of the mixtures that clients' contributions show against those that were drawn for them."""
    return lambda run, layer: judge(estimates.pairs(estimates.estimated(run.metrics), run.mixtures))


def _missed(run: Finished, layer: str) -> float | None:
    return estimates.missed(estimates.estimated(run.metrics), run.mixtures)


def _benchmarks(run: Finished, layer: str) -> float | None:
    """The plain mean over the benchmarks that the task consists of."""
    more = (run.summary["global"] or {}).get("more") or {}
    found = [more[part.name]["accuracy"] for part in run.config.task.parts or () if part.name in more]
    return sum(found) / len(found) if found else None


def _least_lead(run: Finished, layer: str) -> float | None:
    """By how much the own tests of the task that went worst are above always answering its most frequent class."""
    parts, base = (run.summary["personal"] or {}).get("parts") or {}, run.summary["task"].get("majority") or {}
    leads = [own["mean"] - base[part] for part, own in parts.items() if own.get("mean") is not None and part in base]
    return min(leads, default=None)


def _nowhere(run: Finished, layer: str) -> float | None:
    return None


BENCHMARKS = {
    "arc-easy": "ARC-Easy",
    "arc-challenge": "ARC-Challenge",
    "openbookqa": "OpenBookQA",
    "piqa": "PIQA",
    "winogrande": "WinoGrande",
    "social-iqa": "Social IQA",
    "hellaswag": "HellaSwag",
    "copa": "COPA",
    "pubmedqa": "PubMedQA",
    "medmcqa": "MedMCQA",
}
"""Parts of a task, or its zero-shot tests, of which each has a figure of its own."""

FIGURES: dict[str, Figure] = {
    "own": Figure("clients' own tests, mean over clients, %", "percent", _at("personal", "clients", "mean")),
    "worst_50": Figure("own tests, lowest half of clients, %", "percent", _at("personal", "clients", "worst_50")),
    "worst_25": Figure("own tests, lowest quarter, %", "percent", _at("personal", "clients", "worst_25")),
    "least_lead": Figure("least lead of any task over its most frequent class, own tests, %", "percent", _least_lead),
    "pooled": Figure("global model, pooled test, %", "percent", _at("global", "pooled", "accuracy")),
    "majority_own": Figure("always the own most frequent class, %", "percent", _at("majority", "own")),
    "majority_pooled": Figure("always the most frequent class, %", "percent", _at("majority", "pooled")),
    "aggregation": Figure("aggregation error (Eq. 1), one layer", "number", _over_rounds("aggregation"), "log"),
    "aggregation_relative": Figure(
        "aggregation error, relative, one layer", "number", _over_rounds("aggregation_relative"), "log"
    ),
    "start_B": Figure("start mismatch of B (Eq. 2), one layer", "number", _over_rounds("start_B"), "log"),
    "start_A": Figure("start mismatch of A (Eq. 2), one layer", "number", _over_rounds("start_A"), "log"),
    "mean_aggregation": Figure("aggregation error, all layers", "number", _over_rounds("mean_aggregation"), "log"),
    "mean_aggregation_relative": Figure(
        "aggregation error, relative, all layers", "number", _over_rounds("mean_aggregation_relative"), "log"
    ),
    "mean_start_B": Figure("start mismatch of B, all layers", "number", _over_rounds("mean_start_B"), "log"),
    "mean_start_A": Figure("start mismatch of A, all layers", "number", _over_rounds("mean_start_A"), "log"),
    "accuracy": Figure("global model, pooled test, over rounds, %", "percent", _over_rounds("accuracy"), "linear"),
    "average_rank": Figure("average rank of clients", "number", _over_rounds("average_rank"), "linear"),
    "last_rank": Figure("average rank after the last round", "number", _last("average_rank")),
    "rank_left": Figure("the same as a share of r", "number", _rank_left),
    "train_loss": Figure("training loss of the last round", "number", _last("train_loss"), "linear"),
    "benchmarks": Figure("accuracy, mean over benchmarks, %", "percent", _benchmarks),
    **{
        name: Figure(f"accuracy on {title}, %", "percent", _at("global", "more", name, "accuracy"))
        for name, title in BENCHMARKS.items()
    },
    "mismatch": Figure("aggregation error, relative, all layers together", "number", _at("mismatch")),
    "mixture_error": Figure(
        "mean absolute error of mixtures told by contributions", "number", _estimate(estimates.mean_absolute_error)
    ),
    "mixture_slope": Figure("slope of these estimates over the true shares", "number", _estimate(estimates.slope)),
    "mixture_missed": Figure("share of clients whose largest task is mistaken, %", "percent", _missed),
    "megabytes_up": Figure("uploaded by a client in a round, MB", "number", _megabytes("up")),
    "megabytes_down": Figure("downloaded by a client in a round, MB", "number", _megabytes("down")),
    "seconds": Figure("seconds of a round", "seconds", _nowhere),
    "value": Figure("value", "number", _nowhere),
}
"""Every figure that a definition may name."""


def further_cells(runs: Sequence[Finished]) -> dict[str, dict[str, Cell]]:
    """Of the further models of a method (such as FedPA-LoRA's preserved factors): own and pooled figures by name."""
    known = sorted({name for run in runs for name in (run.summary.get("personal") or {}).get("further", {})})
    made: dict[str, dict[str, Cell]] = {}
    for name in known:
        at = {
            "own": _at("personal", "further", name, "clients", "mean"),
            "pooled": _at("personal", "further", name, "pooled", "accuracy"),
        }
        made[name] = {
            figure: cell({str(run.summary["seed"]): pick(run, "") for run in runs}) for figure, pick in at.items()
        }
    return made
