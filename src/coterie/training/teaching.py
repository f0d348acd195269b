"""Fits that learn from a teacher's distributions: a model's scores of classes, options or tokens, and the loss.

A mini-batch is `Held`, for each client of a stack its data and the positions of its examples there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from coterie.data.sequences import ChoiceSet, DataSet, SequenceSet
from coterie.errors import DataError
from coterie.maths.weak_to_strong import confidence_losses, entropy_losses, hardened
from coterie.models.loading import Base
from coterie.protocol import WeakToStrong
from coterie.training.objectives import label_count, labelled, option_losses, row_losses

Held = Sequence[tuple[DataSet, np.ndarray]]


def check_teaching(loss: WeakToStrong, data: DataSet, vocabulary: int, who: str) -> None:
    """Raises DataError where the targets are no distributions over the classes, options or tokens of these examples."""
    rows = label_count(data, np.arange(len(data)))
    exists = torch.ones(1, _columns(loss, data, vocabulary), dtype=torch.bool)
    if isinstance(data, ChoiceSet):
        exists = torch.arange(exists.shape[1]) < data.counts[:, None]
    shape, wanted = tuple(loss.targets.shape), (rows, exists.shape[1])
    if shape != wanted or (loss.ids is not None and tuple(loss.ids.shape) != shape):
        ids = "" if loss.ids is None else f" at ids {tuple(loss.ids.shape)}"
        raise DataError(f"{who}: targets {shape}{ids} where the data have {wanted}; predict them on this data set")
    targets = loss.targets.detach().cpu()
    sums = targets.where(exists, 0.0).double().sum(dim=1)
    sound = (targets >= 0).all(dim=1) & (targets.where(~exists, 0.0) == 0).all(dim=1) & ((sums - 1).abs() < 1e-3)
    if not bool(sound.all()):
        first = int((~sound).nonzero()[0])
        raise DataError(f"{who}: row {first} of the targets is no distribution over what there is; take a softmax")


def needs_whole(loss: WeakToStrong, data: DataSet) -> bool:
    """Whether an example's loss depends on the others of its mini-batch: by a threshold among those of two options."""
    if loss.form == "entropy" or loss.hardening == "argmax" or isinstance(data, SequenceSet):
        return False
    return int((data.counts == 2).sum()) > 1 if isinstance(data, ChoiceSet) else data.num_classes == 2


def example_scores(base: Base, batch: Mapping[str, Tensor], held: Held) -> list[Tensor]:
    """Of each client, (b, C): logits of an example's classes, or log-likelihoods of its options, -inf where none.

    Of sequences (m, V), logits of every token of the answers.
    """
    if isinstance(held[0][0], ChoiceSet):
        losses = (option_losses if "branches" in batch else row_losses)(base, batch, len(held))
        counts = [int(data.select(indices).counts.sum()) for data, indices in held if isinstance(data, ChoiceSet)]
        pairs = zip(held, torch.split(-losses, counts), strict=True)
        return [data.arranged(own, indices) for (data, indices), own in pairs if isinstance(data, ChoiceSet)]
    logits = labelled(base, batch, len(held)).logits
    return list(torch.split(logits, [label_count(data, indices) for data, indices in held]))


def teaching_losses(
    scores: Sequence[Tensor],
    held: Held,
    losses: Sequence[WeakToStrong],
    progress: Sequence[float],
    hard: Sequence[Tensor] | None = None,
) -> Tensor:
    """The sum of the losses of each client's examples, (S,).

    progress: the part of its steps that each client has taken. hard: f_hat, where it is of more examples than these.
    """
    sums = []
    for place, (z, (data, indices), loss, u) in enumerate(zip(scores, held, losses, progress, strict=True)):
        f_w = _targets(loss, data, indices, z)
        if loss.form == "entropy":
            own = entropy_losses(z, f_w, loss.alpha_at(u))
        else:
            f_hat = hardened(z, f_w, loss.hardening) if hard is None else hard[place]
            own = confidence_losses(z, f_w, f_hat, loss.alpha_at(u))
        sums.append(own.sum())
    return torch.stack(sums)


@torch.no_grad()
def hardened_whole(
    parts: Iterable[tuple[Held, Mapping[str, Tensor]]],
    losses: Sequence[WeakToStrong],
    score: Callable[[Held, Mapping[str, Tensor]], Sequence[Tensor]],
) -> list[list[Tensor]]:
    """f_hat of mini-batches that are computed in parts: thresholds are of the whole. For each part, each client's."""
    scored = [(held, score(held, batch)) for held, batch in parts]
    whole: list[list[Tensor]] = []
    for client, loss in enumerate(losses):
        z = torch.cat([scores[client] for _, scores in scored])
        data, indices = scored[0][0][client][0], [held[client][1] for held, _ in scored]
        f_hat = hardened(z, _targets(loss, data, np.concatenate(indices), z), loss.hardening)
        whole.append(list(torch.split(f_hat, [len(part) for part in indices])))
    return [list(part) for part in zip(*whole, strict=True)]


def vocabulary_of(base: Base) -> int:
    """How many tokens a language model tells apart; 0 of another network."""
    if not base.is_language:
        return 0
    table = base.network.get_input_embeddings().weight  # type: ignore[operator]
    return int(table.shape[0])


def _columns(loss: WeakToStrong, data: DataSet, vocabulary: int) -> int:
    if isinstance(data, ChoiceSet):
        return int(data.counts.max())
    if isinstance(data, SequenceSet):
        return vocabulary if loss.ids is None else loss.ids.shape[-1]
    return data.num_classes


def _targets(loss: WeakToStrong, data: DataSet, indices: np.ndarray, like: Tensor) -> Tensor:
    """The teacher's distributions for the examples at `indices`, or their answers' tokens, in the shape of `like`."""
    rows = torch.as_tensor(indices)
    if isinstance(data, SequenceSet):
        ends = data.labelled.cumsum(dim=0).tolist()
        counts = data.labelled.tolist()
        rows = torch.cat([torch.arange(ends[row] - counts[row], ends[row]) for row in rows.tolist()])
    rows = rows.to(loss.targets.device)
    targets = loss.targets[rows].to(like.device, like.dtype)
    if loss.ids is None:
        return targets
    return torch.zeros_like(like).scatter(1, loss.ids[rows].to(like.device), targets)
