"""Whether a run stores the activations below its lowest adapter; settled once, and then part of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from coterie.data.sequences import ChoiceSet, DataSet
from coterie.errors import ModelError
from coterie.models.loading import DTYPES, Base, inputs_of
from coterie.training.asks import Plan
from coterie.training.lower import MIB, Lower, StoredLower, lower_of
from coterie.training.objectives import TrainSet, labelled

_OFTEN = 2.0  # computed alone, an example costs up to half as much again as in a batch
_ALIKE = {torch.bfloat16: 5e-2}  # of the largest logit
_SOME = 64


@dataclass(frozen=True)
class Reading:
    """What a base model reads: examples to try it on, at least one, and how many tokens all its data sets have."""

    base: Base
    data: TrainSet
    tokens: int


def with_stored_lower(
    plan: Plan, readings: Sequence[Reading], wanted: Literal["auto", "stored"], memory: int, disk: int, seen: float
) -> Plan:
    """The plan, with so many MiB for activations where some base has blocks below its lowest adapter.

    seen: how often local training passes over an example, on average. With wanted="auto" there is room only if that is
    often enough, all activations fit, and every base answers alike either way. The bases are left as they were.

    Raises:
        ModelError: wanted="stored" for a base that answers otherwise then, such as one that mixes padding into tokens.
    """
    found = [(one, lower) for one in readings if (lower := _lower(one)) is not None]
    if not found:
        return plan
    stored = replace(plan, lower_memory=memory, lower_disk=disk)
    if wanted == "auto":
        size = sum(one.tokens * lower.width * DTYPES[plan.dtype].itemsize for one, lower in found)
        fits = size <= max(memory // plan.workers, disk) * MIB
        return stored if seen >= _OFTEN and fits and all(_alike(one) for one, _ in found) else plan
    for one, _ in found:
        if not _alike(one):
            raise ModelError(
                f"execution.lower=stored, but {type(one.base.network).__name__} answers otherwise with stored "
                f"activations (by {difference(one.base, one.data):.1g} of its largest logit); take lower=off"
            )
    return stored


def token_count(data: DataSet) -> int:
    """The tokens of all examples, of questions those of all options; of images their places."""
    return int((data.sequences() if isinstance(data, ChoiceSet) else data).lengths.sum())


@torch.no_grad()
def difference(base: Base, data: TrainSet) -> float:
    """How far logits with stored activations lie from those without at most, over the largest of these.

    Of the shortest and the longest of the first examples, in one batch.
    """
    lengths = np.asarray(data.lengths[:_SOME])
    chosen = [int(lengths.argmin()), int(lengths.argmax())]
    batch = data.batch(chosen, int(lengths.max()))
    plain = labelled(base, batch).logits
    with StoredLower(Plan(lower_memory=_SOME)).used(base):
        stored = labelled(base, batch).logits
    return float((plain - stored).abs().max() / plain.abs().max().clamp(min=1e-9))


def _lower(reading: Reading) -> Lower | None:
    base, data = reading.base, reading.data
    batch = data.batch([0], int(data.lengths[0]))
    return lower_of(base, base.network.forward, inputs_of(base, batch))


def _alike(reading: Reading) -> bool:
    return difference(reading.base, reading.data) <= _ALIKE.get(reading.base.dtype, 1e-3)
