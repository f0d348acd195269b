"""The task's loss, by kind of data: the class of a text or image, or the next token of an answer. The one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from coterie.data.branches import Branches, branched
from coterie.data.images import ImageSet
from coterie.data.sequences import IGNORED, ChoiceSet, Classified, DataSet, SequenceSet
from coterie.errors import DataError, ModelError
from coterie.models.loading import Base, inputs_of, moved
from coterie.training.mixing import share_out

TrainSet = Classified | SequenceSet
"""What a model can be trained on."""


def check_kind(base: Base, data: DataSet, who: str) -> None:
    """Raises ModelError where texts with classes meet a language model, sequences a classifier, or images neither's."""
    pictured = isinstance(data, ImageSet)
    fits = base.is_language != isinstance(data, Classified)
    if not fits or (not base.is_language and pictured != (base.vision is not None)):
        held = "images" if pictured else "texts with classes" if isinstance(data, Classified) else "sequences"
        seen = "a classifier" if base.vision is None else "a classifier of images"
        wanted = "a language model, which has no classes" if base.is_language else seen
        raise ModelError(f"{who}: {held} do not suit {wanted}; load the base for the kind of task")


def check_labels(data: DataSet, who: str) -> None:
    """Raises DataError where a class or right option is not known (-1): such data are for predictions alone."""
    if isinstance(data, Classified | ChoiceSet) and len(data) and int(data.labels.min()) < 0:
        raise DataError(f"{who}: these examples have no labels; ask for predictions of them, or take labelled data")


def trainable(base: Base, data: DataSet, who: str) -> TrainSet:
    """The data, of a kind that this base can be trained on.

    Raises:
        DataError: options to choose between, which have no loss of their own.
        ModelError: see `check_kind`.
    """
    check_kind(base, data, who)
    if isinstance(data, ChoiceSet):
        raise DataError(f"{who}: a set of choices can be scored, not trained on; give its answers()")
    return data


def laid_out(base: Base, data: DataSet) -> DataSet | Branches:
    """What batches are made of: the examples, or of questions their prompts once, where this base can be asked so."""
    if isinstance(data, ChoiceSet) and data.options.pictures is None and base.branches:
        return branched(data)
    return data


def logits_of(base: Base, batch: Mapping[str, Tensor]) -> Tensor:
    """The network's logits, in float32 at least: (n, classes), or of a language model (m, V) at the kept places."""
    logits: Tensor = base.network(**inputs_of(base, batch)).logits
    return logits if logits.dtype == torch.float64 else logits.float()


@dataclass(frozen=True)
class Labelled:
    """What a model says where there is a label: m examples with a class, or m tokens of answers.

    logits (m, C), over classes or the vocabulary; targets (m,) int64; slots (m,) int64, where in the batch's labels,
    seen as one row, these stand; places (m,) int64, where the prediction is made: there, or at the token before.
    """

    logits: Tensor
    targets: Tensor
    places: Tensor
    slots: Tensor


def labelled(base: Base, batch: Mapping[str, Tensor], clients: int = 1) -> Labelled:
    """Logits where there are labels, of a batch of `clients` clients with equally many examples each.

    A language model computes no others: its output layer is the largest of all.
    """
    labels = batch["labels"]
    if not base.is_language:
        share_out(base, batch)
        places = torch.arange(len(labels), device=base.device)
        return Labelled(logits_of(base, batch), moved(labels, base.device), places, places)
    # Counted where the batch was made: asking a GPU how many there are would wait for all that is queued there.
    width = labels.shape[1]
    slots = labels.reshape(-1).ne(IGNORED).nonzero().squeeze(1)
    before = batch["before"].reshape(-1)[slots] if "before" in batch else slots % width - 1
    places = slots // width * width + before
    targets = labels.reshape(-1)[slots]
    size = labels.numel() // clients
    counts = torch.bincount(slots // size, minlength=clients).tolist()
    kept = [moved(own % size, base.device) for own in torch.split(places, counts)]
    share_out(base, batch, kept)
    with base.slots.keeping(kept):
        logits = logits_of(base, batch)
    return Labelled(logits, *(moved(value, base.device) for value in (targets, places, slots)))


def label_losses(found: Labelled) -> Tensor:
    """Cross-entropy of each label, (m,)."""
    return F.cross_entropy(found.logits, found.targets, reduction="none")


def by_row(values: Tensor, found: Labelled, labels: Tensor) -> Tensor:
    """Values of labels (m,) summed for each example, (n,); in one order, whatever else is in the batch."""
    if labels.dim() == 1:
        return values
    return values.new_zeros(labels.numel()).index_put((found.places,), values).view(labels.shape).sum(dim=1)


def row_losses(base: Base, batch: Mapping[str, Tensor], clients: int = 1) -> Tensor:
    """Each example's loss (n,), float32 at least: cross-entropy on its class, or summed over its answer's tokens."""
    found = labelled(base, batch, clients)
    return by_row(label_losses(found), found, batch["labels"])


def option_losses(base: Base, batch: Mapping[str, Tensor], clients: int = 1) -> Tensor:
    """The loss of every option of a batch of `Branches`, summed over its tokens, (m,), question after question."""
    found = labelled(base, batch, clients)
    branches = moved(batch["branches"], found.logits.device)
    losses = label_losses(found)
    spread = losses.new_zeros(branches.numel()).index_put((found.slots,), losses).view(branches.shape)
    # Each sum is over a whole row, in one order whatever else is in the batch.
    most = int(batch["branches"].max()) + 1
    sums = torch.stack([torch.where(branches == branch, spread, 0.0).sum(dim=1) for branch in range(most)], dim=1)
    exists = torch.arange(most) <= batch["branches"].max(dim=1, keepdim=True).values
    return sums.reshape(-1)[moved(exists.reshape(-1).nonzero().squeeze(1), sums.device)]


def row_count(data: DataSet | Branches, indices: ArrayLike) -> int:
    """How many rows a batch of the examples at `indices` has: one each, of a `ChoiceSet` one for each option."""
    return int(data.select(indices).counts.sum()) if isinstance(data, ChoiceSet) else len(np.asarray(indices))


def label_count(data: DataSet, indices: ArrayLike) -> int:
    """What the mean loss of the examples at `indices` is over: their answers' tokens, or else the examples."""
    return int(data.select(indices).labelled.sum()) if isinstance(data, SequenceSet) else len(np.asarray(indices))
