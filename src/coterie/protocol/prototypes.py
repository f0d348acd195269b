"""Classes as points among a model's features: their means, and inputs judged by the nearest of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.protocol.messages import message, weighted_sum


@message
class Prototypes:
    """One point for each of C classes, in the space of features or of their projection.

    means: (..., C, w), any values where there is none; held: (..., C) bool, the classes that have one. projection:
    (..., w, d) of features of d entries; None: w = d. Features are those that `Predict` gives: what enters the head's
    last linear layer, or of an answer the state from which its first token is predicted.
    """

    means: Tensor
    held: Tensor
    projection: Tensor | None = None

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be equal for two clients' prototypes to stack."""
        shape = None if self.projection is None else tuple(self.projection.shape)
        return (Prototypes, tuple(self.means.shape), shape)

    def placed(self, features: Tensor) -> Tensor:
        """Features (..., n, d) in the prototypes' space, (..., n, w)."""
        return features if self.projection is None else features @ self.projection.mT.to(features.dtype)

    def distances(self, features: Tensor, classes: Tensor) -> Tensor:
        """The mean squared entry of each feature's difference from its own class's prototype, (..., n).

        features (..., n, d), classes (..., n) int64; 0 where the class has no prototype.
        """
        points = self.placed(features)
        own = torch.take_along_dim(self.means.to(points.dtype), classes.unsqueeze(-1), dim=-2)
        apart = (points - own).square().mean(dim=-1)
        return torch.where(self.held.gather(-1, classes), apart, 0.0)

    def scores(self, features: Tensor) -> Tensor:
        """-||f - p_c||^2 for each class, (..., n, C), so that the nearest has the largest; -inf where there is none."""
        apart = self.placed(features).unsqueeze(-2) - self.means.unsqueeze(-3).to(features.dtype)
        return (-apart.square().sum(dim=-1)).masked_fill(~self.held.unsqueeze(-2), -torch.inf)

    @classmethod
    def stack(cls, parts: Sequence[Prototypes]) -> Prototypes:
        """Several clients' prototypes along a new leading axis."""
        projections = [part.projection for part in parts if part.projection is not None]
        return Prototypes(
            torch.stack([part.means for part in parts]),
            torch.stack([part.held for part in parts]),
            torch.stack(projections) if projections else None,
        )

    def unstack(self, index: int) -> Prototypes:
        """Client `index` of a stack."""
        projection = None if self.projection is None else self.projection[index].clone()
        return Prototypes(self.means[index].clone(), self.held[index].clone(), projection)


@message
class ClassMeans:
    """The mean feature of each class that occurs, (k, d) float32, with the classes (ascending) and their examples."""

    classes: tuple[int, ...]
    means: Tensor
    counts: tuple[int, ...]

    @classmethod
    def of(cls, features: Tensor, classes: Tensor) -> ClassMeans:
        """Of n examples: features (n, d), classes (n,) int64. Summed in fp64, example after example."""
        found, place, counts = torch.unique(classes, return_inverse=True, return_counts=True)
        sums = torch.zeros(len(found), features.shape[1], dtype=torch.float64)
        sums.index_put_((place,), features.double(), accumulate=True)
        means = (sums / counts.unsqueeze(-1)).float()
        return cls(tuple(found.tolist()), means, tuple(counts.tolist()))

    @staticmethod
    def common(sent: Iterable[tuple[float, ClassMeans]], by_count: bool) -> dict[int, Tensor]:
        """The weighted mean (d,) over those who hold a class, by class; none of a class that nobody of weight holds.

        by_count: whether a class's weight is multiplied by its examples. Summed in fp64.
        """
        held_by: dict[int, list[tuple[float, Tensor]]] = {}
        for weight, own in sent:
            for c, mean, count in zip(own.classes, own.means, own.counts, strict=True):
                held_by.setdefault(c, []).append((weight * (count if by_count else 1), mean))
        totals = {c: sum(weight for weight, _ in held) for c, held in sorted(held_by.items())}
        return {
            c: weighted_sum([(weight / total, mean) for weight, mean in held_by[c]])
            for c, total in totals.items()
            if total > 0
        }
