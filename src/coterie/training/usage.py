"""How much a model uses its routed experts on a data set."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from coterie.data.batches import evaluation_batches
from coterie.data.sequences import DataSet
from coterie.errors import DataError
from coterie.models.loading import Base
from coterie.protocol import Model
from coterie.training.evaluation import alone
from coterie.training.objectives import row_losses, trainable
from coterie.training.routing import noting


@torch.no_grad()
def mean_usage(
    base: Base, model: Model, head: Mapping[str, Tensor] | None, data: DataSet, batch_size: int
) -> dict[tuple[str, str], Tensor]:
    """Each routed layer's mean routing weights (M,) over all examples and token positions, padding left out; float64.

    By term and layer; on the CPU, without dropout.

    Raises:
        DataError: no examples, or options to choose between.
        ModelError: data of another kind than the base is for, or a term that does not fit its layer.
    """
    chosen = trainable(base, data, "usage")
    if len(chosen) == 0:
        raise DataError("there are no examples to measure usage on")
    stacked, own_head = alone(base, model, head)
    sums: dict[tuple[str, str], Tensor] = {}
    counts: dict[tuple[str, str], Tensor] = {}
    with base.slots.bound(1, stacked, own_head) as binding:
        for planned in evaluation_batches(chosen.lengths, batch_size):
            batch = chosen.batch(planned.indices, planned.pad_to)
            used = noting(binding, batch, 1, base.device)
            row_losses(base, batch)
            for place, sum_ in used.sums.items():
                wide, count = sum_[0].double().cpu(), used.counts[place][0].double().cpu()
                sums[place] = sums[place] + wide if place in sums else wide
                counts[place] = counts[place] + count if place in counts else count
    return {place: total / counts[place] for place, total in sums.items()}
