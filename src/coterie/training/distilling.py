"""Fits that learn from labels and from distributions over them, label by label: classes, or tokens of answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.data.sequences import ChoiceSet, DataSet, SequenceSet
from coterie.errors import DataError
from coterie.protocol import Distillation
from coterie.training.objectives import Labelled, label_losses
from coterie.training.teaching import Held


def check_distillation(loss: Distillation, data: DataSet, who: str) -> None:
    """Raises DataError where the targets are no distributions for the labels of these examples."""
    if isinstance(data, ChoiceSet):
        raise DataError(f"{who}: a set of choices can be scored, not trained on; give its answers()")
    labels = int(data.labelled.sum()) if isinstance(data, SequenceSet) else len(data)
    shapes = tuple(loss.ids.shape), tuple(loss.probabilities.shape)
    if len(shapes[0]) != 2 or shapes[0] != shapes[1] or shapes[0][0] != labels:
        raise DataError(f"{who}: targets {shapes[0]} with {shapes[1]} for {labels} labels; one row each is expected")
    p = loss.probabilities.detach().double()
    if labels and (float(p.min()) < 0 or float((p.sum(dim=1) - 1).abs().max()) > 1e-3):
        raise DataError(f"{who}: a target is no distribution; take a softmax over its row")


def target_rows(data: DataSet, indices: Sequence[int] | Tensor) -> Tensor:
    """The rows of the labels of the examples at `indices`, in that order, (m,) int64."""
    chosen = torch.as_tensor(indices, dtype=torch.int64)
    if not isinstance(data, SequenceSet):
        return chosen
    counts = data.labelled
    starts = counts.cumsum(0) - counts
    held = counts[chosen]
    within = torch.arange(int(held.sum())) - torch.repeat_interleave(held.cumsum(0) - held, held)
    return torch.repeat_interleave(starts[chosen], held) + within


def distilled_losses(found: Labelled, held: Held, losses: Sequence[Distillation]) -> Tensor:
    """The sum of the losses of each client's labels, (S,): gold * CE(label) + (1 - gold) * KL(target || model)."""
    rows = [target_rows(data, torch.as_tensor(indices)) for data, indices in held]
    labels = torch.split(label_losses(found), [len(own) for own in rows])
    logs = torch.split(found.logits.log_softmax(dim=-1), [len(own) for own in rows])
    sums = []
    for loss, own, ce, log_q in zip(losses, rows, labels, logs, strict=True):
        p = loss.probabilities[own].to(log_q.device, log_q.dtype)
        divergence = (torch.xlogy(p, p) - p * log_q.gather(1, loss.ids[own].to(log_q.device).long())).sum(dim=1)
        sums.append((loss.gold * ce + (1 - loss.gold) * divergence).sum())
    return torch.stack(sums)
