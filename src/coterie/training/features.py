"""Features of a mini-batch's examples: penalties on them, their means by class, classes by the nearest prototype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.data.sequences import IGNORED, ChoiceSet, DataSet, SequenceSet
from coterie.errors import DataError, ModelError
from coterie.models.loading import Base
from coterie.protocol import ClassMeans, FeaturePenalty, PrototypeDistance, Prototypes
from coterie.training.mixing import pooled

NOWHERE = -1e9
"""The score of a class without a prototype, finite lest one example made a mean loss infinite."""


def check_classes(data: DataSet, who: str) -> None:
    """Raises DataError for examples without a class: open answers, and questions, which are trained on by answers."""
    if isinstance(data, ChoiceSet) or (isinstance(data, SequenceSet) and data.classes is None):
        raise DataError(
            f"{who}: open answers have no classes, of which features could be near to prototypes; take texts with "
            "classes, or questions with options"
        )


def check_features(data: DataSet, penalties: Iterable[object], collect: bool, who: str) -> None:
    """Where features are looked at, raises DataError as `check_classes`, ModelError for a class without a place."""
    asked = [penalty for penalty in penalties if isinstance(penalty, FeaturePenalty)]
    if not asked and not collect:
        return
    check_classes(data, who)
    most = int(_classes(data).max())
    for penalty in asked:
        if isinstance(penalty, PrototypeDistance) and most >= penalty.prototypes.held.shape[-1]:
            count = penalty.prototypes.held.shape[-1]
            raise ModelError(f"{who}: there are places for the prototypes of {count} classes, but examples of {most}")


def example_features(base: Base, seen: Tensor | None, batch: Mapping[str, Tensor], clients: int = 1) -> Tensor:
    """What the pass that ran last holds of each example, (S, n, d), float32 at least; see `Prototypes`.

    seen: what entered the head or output layer. An answer without tokens counts as zeros.
    """
    if not base.is_language:
        found = pooled(base, seen, batch)
    else:
        assert seen is not None
        following = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        rows = following.ne(IGNORED).nonzero()[:, 0].to(seen.device)
        first = torch.diff(rows, prepend=rows.new_full((1,), -1)) > 0
        found = seen.new_zeros(len(following), seen.shape[-1]).index_put((rows[first],), seen[first])
    found = found if found.dtype == torch.float64 else found.float()
    return found.view(clients, -1, found.shape[-1])


def classes_of(batch: Mapping[str, Tensor], clients: int, like: Tensor) -> Tensor:
    """The class of each example, (S, n) int64, on the device of `like`."""
    return batch.get("classes", batch["labels"]).to(like.device).view(clients, -1)


def feature_losses(penalties: Sequence[FeaturePenalty], features: Tensor, classes: Tensor) -> Tensor:
    """All penalties on the features (S, n, d) of a batch, summed over its examples, (S,)."""
    return torch.stack([penalty.value(features, classes) for penalty in penalties]).sum(dim=0).sum(dim=1)


def collected(parts: Sequence[tuple[Tensor, Tensor]]) -> ClassMeans | None:
    """Means by class of all parts, each (n, d) features with (n,) classes; None without any."""
    if not parts:
        return None
    return ClassMeans.of(torch.cat([one for one, _ in parts]), torch.cat([one for _, one in parts]))


def nearest_scores(points: Prototypes, features: Tensor, classes: int) -> Tensor:
    """The scores (n, C) of so many classes for features (1, n, d), by stacked prototypes of one client.

    Raises:
        ModelError: prototypes of another number of classes.
    """
    if points.held.shape[-1] != classes:
        raise ModelError(f"prototypes of {points.held.shape[-1]} classes cannot judge examples of {classes}")
    return points.scores(features)[0].clamp(min=NOWHERE)


def _classes(data: DataSet) -> Tensor:
    if isinstance(data, SequenceSet):
        assert data.classes is not None
        return data.classes
    return data.labels
