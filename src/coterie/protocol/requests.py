"""What a client's or the server's program may ask of whoever runs it: frozen data, answered by the engine.

No request has a field named like a field of its answer, so a forgotten `yield` raises at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from coterie.maths.weak_to_strong import Hardening
from coterie.protocol.penalties import FeaturePenalty, Penalty, RoutingPenalty
from coterie.protocol.prototypes import ClassMeans
from coterie.protocol.terms import Model
from coterie.protocol.top_logits import TopLogits

AnyPenalty = Penalty | RoutingPenalty | FeaturePenalty
"""What a Fit's loss may have beside that of its task."""


@dataclass(frozen=True)
class Task:
    """The task's own loss: cross-entropy on labels, mean over the examples of a mini-batch."""


@dataclass(frozen=True, eq=False)
class WeakToStrong:
    """Learn from a teacher's distributions instead of labels (FedSLM, Eqs. 10-11 and Appendix B).

    One distribution for each example: over the classes of a text, or over a question's options, of which each has
    its log-likelihood for a score (as in `Predictions` of questions), normalised by a softmax; the loss is the mean
    over the examples of a mini-batch. Of sequences, which have neither, one for each token of the answers, over the
    vocabulary; the loss is the mean over these. Classes and right options are never looked at.

    targets: (n, C) the teacher's probabilities for each example of the set, in its order; C is the largest number of
    options, beyond an example's own number they are 0. Of sequences (m, V), a row for each token as in `Predictions`,
    or with `ids` (m, k) the probabilities of these tokens alone, which sum to 1.
    form: "confidence" is (1 - alpha) CE(f_w, f_s) + alpha CE(f_hat, f_s) (Eq. 10), where `hardening` says how f_hat
    comes from f_s (see `coterie.maths.weak_to_strong.hardened`); "entropy" is CE(f_w, f_s) + alpha H(f_s) (Appendix B).
    warmup: the part of the steps during which alpha rises linearly from 0 (0.2 in Burns et al.; none in FedSLM).
    """

    targets: Tensor
    alpha: float = 0.5
    form: Literal["confidence", "entropy"] = "confidence"
    hardening: Hardening = "median"
    warmup: float = 0.0
    ids: Tensor | None = None

    def alpha_at(self, progress: float) -> float:
        """alpha after this part of the steps, in [0, 1]."""
        return self.alpha * min(1.0, progress / self.warmup) if self.warmup > 0 else self.alpha


@dataclass(frozen=True, eq=False)
class Distillation:
    """Learn from labels and from a distribution for each of them: gold * CE(label) + (1 - gold) * KL(target || model).

    The mean over the labels of a mini-batch: one for each text, or each token of the answers. A target is ids (n, k)
    with their probabilities (n, k), other classes or tokens having none; rows as those of `Predictions` of the same
    data set. No id with a probability stands twice in a row.
    """

    ids: Tensor
    probabilities: Tensor
    gold: float


@dataclass(frozen=True, eq=False)
class Imitation:
    """Learn from another model at hand, on a base of its own, that answers the same examples (FedBiOT).

    The distance of the hidden states that enter the block `at` of both networks, plus kd * KL(teacher || model) of the
    predictions; means over an example's tokens and labels, and over the examples of a mini-batch. distance: "l2" is
    ||H - H_teacher||^2 / ||H_teacher||^2 of each token, "cosine" 1 - cos. Labels are only places here.
    """

    teacher: Model
    at: str
    kd: float = 0.9
    distance: Literal["l2", "cosine"] = "l2"


@dataclass(frozen=True)
class Fit:
    """Train what the patterns name, everything else frozen. None means the experiment's setting.

    Patterns are of `term.layer.parameter`; `lr_scale` maps such patterns to factors of the learning rate. `head`: at
    the server also the name of a head group (`Algorithm.head_group`), whose head is used and trained in place of the
    head of all; at a client that of a group between which it chooses (`Algorithm.head_choices`). `times`: the
    experiment's steps are taken so many times over, its epochs are not, since they grow with the data anyway; without
    effect on `steps` and `epochs` given here. `collect`: whether features are averaged by class while the last epoch
    (or what of it there was) is trained on, each as the model of its own step gives it.
    """

    initial: Model
    train: tuple[str, ...] = ("lora.*",)
    head: bool | str = True
    loss: Task | WeakToStrong | Distillation | Imitation = Task()
    penalties: tuple[AnyPenalty, ...] | list[AnyPenalty] = ()
    data: str = "train"
    steps: int | None = None
    epochs: int | None = None
    lr_scale: Mapping[str, float] = field(default_factory=dict)
    times: int = 1
    collect: bool = False


@dataclass(frozen=True)
class Fitted:
    """The trained model; `mean_loss` is the Fit's loss averaged over the steps taken, penalties apart.

    `penalty_before`, `penalty_after`: of the penalties that the model alone decides.
    """

    model: Model
    mean_loss: float
    examples_seen: int
    steps_taken: int
    penalty_before: float = 0.0
    penalty_after: float = 0.0
    collected: ClassMeans | None = None


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

    Of sequences, n counts the answers' tokens; `examples` (n,) says of which example each row is. Of questions with
    options, a logit is an option's log-likelihood, -inf where there is none. classes: the class of each row's example,
    (n,): of texts the label, of an answer that is an option that option's place; None where there are none. losses: the
    cross-entropy of each label, (n,), of texts with labels and of sequences.
    """

    logits: Tensor
    labels: Tensor
    ids: Tensor | None = None
    embeddings: Tensor | None = None
    examples: Tensor | None = None
    classes: Tensor | None = None
    losses: Tensor | None = None


@dataclass(frozen=True)
class Translate:
    """What a model with another base said of the same examples, written in this party's own classes or tokens.

    said: of the data set `data`/`source`, `data` in the tokens of the base model with the spec `source`; it is answered
    by the same of `data` itself. Tokens are aligned by minimum edit (see `coterie.maths.alignment`). Nothing changes
    where the party's base is that of the source, or has equal tokens.
    """

    said: TopLogits
    source: str
    data: str


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


Request = Fit | Evaluate | Predict | Translate | Gradient | Calibrate | Weights
Answer = Fitted | Score | Predictions | TopLogits | dict[str, Any]
