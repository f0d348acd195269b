"""FedSEE's Figure 9: what clients contribute to the experts, as an estimate of the mixtures that they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Mixtures = Mapping[str, Mapping[str, float]]
"""Shares by task, by client."""
Pairs = Sequence[tuple[float, float]]
"""(share held, share estimated)."""


def requested(partition: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The mixtures that the partitioner wanted for clients, from a partition.json; empty where the task is no mixture.

    They are what the paper compares with: its section B.7 speaks of the proportions that the partitioner used. Tasks
    of which a client was to have nothing are left out.
    """
    return {one["id"]: dict(one["mixture"]["requested"]) for one in partition["clients"] if "mixture" in one}


def estimated(metrics: Sequence[Mapping[str, Any]], phase: str = "main") -> dict[str, dict[str, float]]:
    """Clients' contributions brought to sum one, the mean over the phase's rounds that tell of the client."""
    told: dict[str, list[Mapping[str, float]]] = {}
    for row in metrics:
        if row["phase"] == phase:
            for client, shares in row.get("measures", {}).get("contributions", {}).items():
                told.setdefault(client, []).append(shares)
    return {
        client: {task: sum(one[task] for one in rounds) / len(rounds) for task in rounds[0]}
        for client, rounds in told.items()
    }


def pairs(estimates: Mixtures, truth: Mixtures) -> Pairs:
    """Of every estimate for a client whose truth is known; a task that the truth leaves out is held by zero."""
    return [
        (truth[client].get(task, 0.0), share)
        for client, shares in estimates.items()
        if client in truth
        for task, share in shares.items()
    ]


def mean_absolute_error(found: Pairs) -> float | None:
    """None of no pairs."""
    return sum(abs(share - held) for held, share in found) / len(found) if found else None


def slope(found: Pairs) -> float | None:
    """Of the least-squares line of estimates over shares; None where all shares are equal."""
    if not found:
        return None
    x, y = (sum(values) / len(found) for values in zip(*found, strict=True))
    spread = sum((held - x) ** 2 for held, _ in found)
    return None if spread < 1e-12 else sum((held - x) * (share - y) for held, share in found) / spread


def missed(estimates: Mixtures, truth: Mixtures) -> float | None:
    """The share of clients whose largest estimate is of another task than their largest share; None of no clients."""
    known = [client for client in estimates if truth.get(client)]
    if not known:
        return None
    wrong = [one for one in known if _largest(estimates[one]) != _largest(truth[one])]
    return len(wrong) / len(known)


def _largest(shares: Mapping[str, float]) -> str:
    return max(shares, key=lambda task: shares[task])
