"""The figures of a finished run, from its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie.data.tasks import Task
from coterie.experiments.build import Built
from coterie.experiments.config import Config
from coterie.wire.ledger import Ledger, Totals


def summarise(
    config: Config,
    built: Built,
    metrics: Sequence[dict[str, Any]],
    timing: Sequence[dict[str, Any]],
    ledger: Ledger,
) -> dict[str, Any]:
    """The content of summary.json.

    metric is the name of what is called score; accuracies are shares of one, task.majority of each part of a mixture;
    mismatches are means over the rounds that have them; bytes are of whole messages, evaluation traffic apart, set-up
    included; seconds are sums over rounds.
    """
    traits = built.setting.algorithm.traits
    last = metrics[-1]
    return {
        "method": config.method,
        "title": traits.title,
        "seed": config.seed,
        "rounds": len(metrics),
        "clients": {card.id: {"rank": card.rank, "examples": card.examples} for card in built.setting.federation.cards},
        "task": {
            "name": built.task.name,
            "classes": list(built.task.label_names),
            "train": len(built.task.train),
            "test": len(built.task.test),
            "source": built.task.source,
            "notes": list(built.task.notes),
            "majority": part_majorities(built.task),
        },
        "metric": built.task.metrics[0],
        "majority": built.majority,
        "global": last.get("global"),
        "personal": last.get("personal"),
        "untrained": metrics[0].get("untrained"),
        "validation": last.get("validation"),
        "loss": last["train"]["loss"],
        "mismatch": _mean(m["mismatch"]["relative"] for m in metrics if "mismatch" in m),
        "init_mismatch": _mean(
            (m["init_mismatch"]["B"] + m["init_mismatch"]["A"]) / 2 for m in metrics if "init_mismatch" in m
        ),
        "failures": sum(len(m["failed"]) + len(m["late"]) for m in metrics),
        "bytes": _bytes(ledger, len(built.setting.sites)),
        "seconds": _seconds(timing),
    }


def part_majorities(task: Task) -> dict[str, float]:
    """Of a task of several, what always answering its most frequent class scores on each one's test examples."""
    if task.kind == "instructions" or task.test.groups is None:
        return {}
    groups = np.asarray(task.test.groups)
    own = {part: task.test.labels[groups == part] for part in task.parts}
    return {part: float(np.bincount(labels).max() / len(labels)) for part, labels in own.items() if len(labels)}


def _mean(values: Any) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def _bytes(ledger: Ledger, clients: int) -> dict[str, Any]:
    totals = ledger.totals()
    up, down = _sum(totals, "up"), _sum(totals, "down")
    by_kind = {f"{kind}/{direction}": size.total for (kind, direction), size in sorted(totals.items())}
    return {
        "up": up,
        "down": down,
        "up_per_client": up / clients,
        "down_per_client": down / clients,
        "by_kind": by_kind,
    }


def _sum(totals: Totals, direction: str) -> int:
    return sum(size.total for (kind, way), size in totals.items() if way == direction and kind != "evaluation")


def _seconds(timing: Sequence[dict[str, Any]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for row in timing:
        total.update(row["seconds"])
    return dict(sorted(total.items()))
