"""How two terms of a model share each input, decided by what the input resembles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.protocol.messages import message


@message
class Mix:
    """A share a of the term `near` and 1 - a of `far`; other terms act in full.

    a = weight * max(0, mean over s of cos(f(x), anchors_s)) for each input x (FedDPA, arXiv 2403.19211): f(x) are the
    input's features as `Predict` gives them, with the term `by` alone. weight: lambda, in [0, 1]; anchors (S, d).
    Once stacked, weight is (clients,) and anchors (clients, S, d). A share that is one number for all inputs needs no
    Mix: it goes into the terms' scales.
    """

    anchors: Tensor
    weight: float | Tensor
    near: str = "local"
    far: str = "lora"
    by: str = "local"

    @property
    def names(self) -> tuple[str, str, str]:
        """The terms that it speaks of."""
        return (self.near, self.far, self.by)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be equal for two clients' mixes to stack."""
        return (Mix, tuple(self.anchors.shape), self.names)

    def shares(self, features: Tensor) -> dict[str, Tensor]:
        """Each input's share of both terms, (..., n) each, from its features (..., n, d)."""
        alike = F.cosine_similarity(features.unsqueeze(-2), self.anchors.unsqueeze(-3), dim=-1).mean(dim=-1)
        weight = self.weight.unsqueeze(-1) if isinstance(self.weight, Tensor) else self.weight
        share = weight * alike.clamp(min=0)
        return {self.near: share, self.far: 1 - share}

    @classmethod
    def stack(cls, mixes: Sequence[Mix]) -> Mix:
        """Several clients' mixes along a new leading axis."""
        anchors = torch.stack([mix.anchors for mix in mixes])
        weight = torch.tensor([float(mix.weight) for mix in mixes], dtype=anchors.dtype)
        return Mix(anchors, weight, *mixes[0].names)

    def unstack(self, index: int, like: Mix) -> Mix:
        """Client `index` of a stack, with the weight that `like` had."""
        return Mix(self.anchors[index].clone(), like.weight, *self.names)


def input_features(features: Tensor, examples: Tensor) -> Tensor:
    """One row for each example, (n, d), out of the rows (m, d) of predictions, each with its example (m,) in order.

    A text has one. Of a sequence it is the first: what the model holds of the last token of the prompt.
    """
    first = torch.ones_like(examples, dtype=torch.bool)
    first[1:] = examples[1:] != examples[:-1]
    return features[first]
