"""What a client's or the server's program may ask of whoever runs it: frozen data, answered by the engine.

No request has a field named like a field of its answer, so a forgotten `yield` raises at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from coterie.protocol.penalties import Penalty
from coterie.protocol.terms import Model


@dataclass(frozen=True)
class Task:
    """The task's own loss: cross-entropy on labels, mean over the examples of a mini-batch."""


@dataclass(frozen=True)
class Fit:
    """Train what the patterns name, everything else frozen. None means the experiment's setting.

    Patterns are of `term.layer.parameter`; `lr_scale` maps such patterns to factors of the learning rate.
    """

    initial: Model
    train: tuple[str, ...] = ("lora.*",)
    head: bool = True
    loss: Task = Task()
    penalties: tuple[Penalty, ...] | list[Penalty] = ()
    data: str = "train"
    steps: int | None = None
    epochs: int | None = None
    lr_scale: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Fitted:
    """The trained model; `mean_loss` is the task loss averaged over the steps taken, penalties apart."""

    model: Model
    mean_loss: float
    examples_seen: int
    steps_taken: int
    penalty_before: float = 0.0
    penalty_after: float = 0.0


@dataclass(frozen=True)
class Evaluate:
    """Loss and accuracy on a data set of the party's own; `limit` takes the first so many examples."""

    model: Model
    data: str
    limit: int | None = None


@dataclass(frozen=True)
class Score:
    """Means over the examples."""

    loss: float
    accuracy: float
    examples: int


@dataclass(frozen=True)
class Predict:
    """Logits of every example (or its `top_k` largest), with pooled features when asked for."""

    model: Model
    data: str
    top_k: int | None = None
    features: bool = False


@dataclass(frozen=True)
class Predictions:
    """logits (n, C) or (n, k) with class ids (n, k); labels (n,); embeddings (n, d) when asked for."""

    logits: Tensor
    labels: Tensor
    ids: Tensor | None = None
    embeddings: Tensor | None = None


@dataclass(frozen=True)
class Gradient:
    """The task gradient by the parameters that `wrt` names, on one mini-batch or the whole set; answered by a dict.

    batch="first" takes the coming Fit's first mini-batch (FedPA-LoRA, Appendix F).
    """

    model: Model
    data: str
    wrt: tuple[str, ...] = ("lora.*",)
    batch: Literal["first", "all"] = "all"


@dataclass(frozen=True)
class Calibrate:
    """Gram matrices X X^T (d_in, d_in) of each adapted layer's inputs, in fp64; answered by a dict layer -> Tensor."""

    model: Model
    data: str


@dataclass(frozen=True)
class Weights:
    """The base weights of some layers (server only); answered by a dict layer -> W, or (U, V) of a factored layer."""

    names: tuple[str, ...]
    spec: str | None = None


Request = Fit | Evaluate | Predict | Gradient | Calibrate | Weights
Answer = Fitted | Score | Predictions | dict[str, Any]
