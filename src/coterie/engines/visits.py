"""One client's part in a round, and the figures of a round that follow from all parts of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.engines.driver import Party
from coterie.engines.measures import (
    aggregation_mismatch,
    factors_in,
    initialisation_mismatch,
    low_rank_terms,
    mean_initialisation_mismatch,
)
from coterie.engines.setting import Setting
from coterie.protocol import Adapter, Client, Memory, Model, Penalty, Seen, SiteRecord


@dataclass
class Visit:
    """One client's part in the round that is being played.

    payload, head_group: as they arrived, None while nothing has. kept: the bytes of the site's new record. late: it
    answered, but after the server had moved on.
    """

    client: Client
    party: Party
    memory: Memory
    record: SiteRecord
    download: Any
    payload: Any = None
    head_group: str | None = None
    error: Exception | None = None
    kept: bytes = b""
    diagnostics: Any = None
    late: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


def weights_of(setting: Setting, answered: Mapping[str, Visit]) -> dict[str, float]:
    """The policy's weight of everybody who answered, summing to one."""
    policy = setting.weights if setting.weights != "paper" else setting.algorithm.traits.weights
    raw = {}
    for name in sorted(answered):
        if policy == "uniform":
            raw[name] = 1.0
        elif policy == "examples":
            raw[name] = float(answered[name].client.card.examples)
        else:
            raw[name] = float(sum(fitted.examples_seen for _, fitted in answered[name].party.fits))
    total = sum(raw.values())
    # Nothing was processed, or nobody has examples: then nobody counts more than others.
    return {name: value / total if total > 0 else 1 / len(raw) for name, value in raw.items()}


def training_of(answered: Mapping[str, Visit], members: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The loss of each client's last Fit and their mean, and how many steps each took in all its Fits.

    members: the clients with each base model, by its spec. Where there are several models, `bases` has the mean loss
    over the clients with each, weighted by their examples; None where none of them trained.
    """
    losses = {name: visit.party.fits[-1][1].mean_loss for name, visit in sorted(answered.items()) if visit.party.fits}
    mean = sum(losses.values()) / len(losses) if losses else None
    steps = {name: sum(f.steps_taken for _, f in v.party.fits) for name, v in sorted(answered.items())}
    found = {"loss": mean, "losses": losses, "steps": steps}
    if len(members) < 2:
        return found
    examples = {name: max(1, answered[name].client.card.examples) for name in losses}
    return found | {"bases": {spec: _mean_loss(losses, examples, names) for spec, names in members.items()}}


def _mean_loss(losses: Mapping[str, float], examples: Mapping[str, int], names: Sequence[str]) -> float | None:
    weights = {name: examples[name] for name in names if name in losses}
    return sum(losses[name] * weight for name, weight in weights.items()) / sum(weights.values()) if weights else None


def seen_of(visit: Visit, weight: float) -> Seen:
    """What simulation knows of a client that answered."""
    if not visit.party.fits:
        return Seen(weight, None, visit.diagnostics)
    request, fitted = visit.party.fits[-1]
    penalties = tuple(penalty for penalty in request.penalties if isinstance(penalty, Penalty))
    return Seen(weight, fitted.model, visit.diagnostics, penalties)


def server_training_of(party: Party) -> dict[str, Any]:
    """The same of a server that trains without clients, by the names of the data sets that it trained on.

    The loss of several Fits on one data set, such as several students', is their mean.
    """
    each: dict[str, list[float]] = {}
    for request, fitted in party.fits:
        each.setdefault(request.data, []).append(fitted.mean_loss)
    losses = {name: sum(own) / len(own) for name, own in each.items()}
    steps = {name: sum(f.steps_taken for request, f in party.fits if request.data == name) for name in losses}
    return {"loss": sum(losses.values()) / len(losses), "losses": losses, "steps": steps}


def mismatches(
    deployed: Model | None,
    patches: Sequence[Adapter],
    answered: Mapping[str, Visit],
    weights: Mapping[str, float],
    visits: Mapping[str, Visit],
    by_layer: bool,
) -> dict[str, Any]:
    """`mismatch` and `init_mismatch` of a round (FedPA-LoRA, Eqs. 1-2), each where there is something to compare.

    deployed, patches: the global model after the aggregation, and what that added to the base.
    """
    found: dict[str, Any] = {}
    locals_ = [
        (weights[name], v.party.fits[-1][1].model)
        for name, v in sorted(answered.items())
        if v.party.fits and v.payload is not None  # what stays at home is no part of an aggregation
    ]
    if deployed is not None and any(low_rank_terms(model) for _, model in locals_):
        found["mismatch"] = aggregation_mismatch(locals_, deployed, patches, by_layer)
    pairs = []
    for _, visit in sorted(visits.items()):
        previous, initial = visit.fields.get("previous"), visit.party.first_initial
        entering = None if initial is None or "lora" not in initial else factors_in(initial["lora"])
        if previous is not None and entering is not None:
            pairs.append(initialisation_mismatch(previous, entering, by_layer=by_layer))
    pairs = [pair for pair in pairs if pair]
    if pairs:
        found["init_mismatch"] = mean_initialisation_mismatch(pairs)
    return found


def factors_left(visit: Visit) -> Adapter | None:
    """The factors that this client's training ended with, whatever it made of them for its upload.

    FedPA-LoRA's Eq. 2 takes "locally optimized" factors, and counts what FedRot-LoRA's rotation does to them.
    """
    fits = visit.party.fits
    return factors_in(fits[-1][1].model["lora"]) if fits and "lora" in fits[-1][1].model else factors_in(visit.payload)


class Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Books the time since the last lap."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
