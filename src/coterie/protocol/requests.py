"""What a client's or the server's program may ask of whoever runs it: frozen data, answered by the engine.

No request has a field named like a field of its answer, so a forgotten `yield` raises at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from coterie.protocol.penalties import Penalty, RoutingPenalty
from coterie.protocol.terms import Model


@dataclass(frozen=True)
class Task:
    """The task's own loss: cross-entropy on labels, mean over the examples of a mini-batch."""


@dataclass(frozen=True)
class Fit:
    """Train what the patterns name, everything else frozen. None means the experiment's setting.

    Patterns are of `term.layer.parameter`; `lr_scale` maps such patterns to factors of the learning rate. `head`: at
    the server also the name of a head group (`Algorithm.head_group`), whose head is used and trained in place of the
    head of all; at a client that of a group between which it chooses (`Algorithm.head_choices`). `times`: the
    experiment's steps are taken so many times over, its epochs are not, since they grow with the data anyway; without
    effect on `steps` and `epochs` given here.
    """

    initial: Model
    train: tuple[str, ...] = ("lora.*",)
    head: bool | str = True
    loss: Task = Task()
    penalties: tuple[Penalty | RoutingPenalty, ...] | list[Penalty | RoutingPenalty] = ()
    data: str = "train"
    steps: int | None = None
    epochs: int | None = None
    lr_scale: Mapping[str, float] = field(default_factory=dict)
    times: int = 1


@dataclass(frozen=True)
class Fitted:
    """The trained model; `mean_loss` is the task loss averaged over the steps taken, penalties apart.

    `penalty_before`, `penalty_after`: of the penalties that the model alone decides.
    """

    model: Model
    mean_loss: float
    examples_seen: int
    steps_taken: int
    penalty_before: float = 0.0
    penalty_after: float = 0.0


@dataclass(frozen=True)
class Evaluate:
    """Loss and metrics on a data set of the party's own; `limit` takes the first so many examples.

    `judged_by` names metrics of predicted against true classes (`coterie.data.metrics.METRICS`), the one that counts
    first. All are of the same predictions. batch="first" takes the coming Fit's first mini-batch, without dropout, in
    place of the whole set; the batches of that Fit do not move. `group` names a head group, whose head is used.
    """

    model: Model
    data: str
    limit: int | None = None
    judged_by: tuple[str, ...] = ("accuracy",)
    batch: Literal["first", "all"] = "all"
    group: str | None = None


@dataclass(frozen=True)
class Score:
    """Loss and accuracy, means over the examples, and the metrics asked for, in that order."""

    loss: float
    accuracy: float
    examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """The first of the metrics, by which the model is judged; the accuracy where none was asked for."""
        return next(iter(self.metrics.values()), self.accuracy)


@dataclass(frozen=True)
class Predict:
    """Logits of every example (or its `top_k` largest), with pooled features when asked for.

    `sample` takes so many examples only, drawn anew for each request; all where there are fewer.
    """

    model: Model
    data: str
    top_k: int | None = None
    features: bool = False
    sample: int | None = None


@dataclass(frozen=True)
class Predictions:
    """logits (n, C) or (n, k) with class ids (n, k); labels (n,); embeddings (n, d) when asked for.

    Of sequences, n counts the answers' tokens; `examples` (n,) says of which example each row is.
    """

    logits: Tensor
    labels: Tensor
    ids: Tensor | None = None
    embeddings: Tensor | None = None
    examples: Tensor | None = None


@dataclass(frozen=True)
class Gradient:
    """The task gradient by the parameters that `wrt` names, on one mini-batch or the whole set; answered by a dict.

    batch="first" takes the coming Fit's first mini-batch (FedPA-LoRA, Appendix F). `examples` takes so many of the
    set only, drawn anew for each request; all where there are fewer.
    """

    model: Model
    data: str
    wrt: tuple[str, ...] = ("lora.*",)
    batch: Literal["first", "all"] = "all"
    examples: int | None = None


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
