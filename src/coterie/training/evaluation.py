"""What a model says about a data set: loss and metrics, logits, gradients, second moments of activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.data import metrics
from coterie.data.batches import Batch, evaluation_batches, plan
from coterie.data.branches import Branches
from coterie.data.sequences import ChoiceSet, Classified, DataSet, SequenceSet
from coterie.errors import DataError, ModelError
from coterie.maths.keys import Key
from coterie.models.loading import Base, inputs_of
from coterie.protocol import Dense, Model, Predictions, Score, matching
from coterie.protocol.messages import map_tensors
from coterie.training.asks import TrainSettings
from coterie.training.features import example_features, nearest_scores
from coterie.training.mixing import pooled, require_unmixed
from coterie.training.objectives import (
    TrainSet,
    check_kind,
    check_labels,
    label_count,
    label_losses,
    labelled,
    laid_out,
    option_losses,
    row_losses,
    trainable,
)

_TOKENS = 2048


def master_dtype(base: Base) -> torch.dtype:
    """The dtype of what is trained: float64 on a float64 base, else float32."""
    return torch.float64 if base.dtype == torch.float64 else torch.float32


def on_base(base: Base, tree: Any) -> Any:
    """A message with its floating tensors in the master dtype, on the base's device."""
    wide = master_dtype(base)
    return map_tensors(
        tree, lambda tensor: tensor.detach().to(base.device, wide if tensor.is_floating_point() else None)
    )


def check_model(base: Base, model: Model, who: str) -> None:
    """Raises ModelError when a term is for no adapted layer of the base, or of another shape than its layer."""
    for name, terms in model.terms.items():
        for layer, term in terms.items():
            if layer not in base.layers:
                raise ModelError(f"{who}: {name!r} has a term for {layer!r}, which is no adapted layer of this base")
            if not isinstance(term, Dense):  # whose own check is of what travels
                term.check(f"{who}, {name}.{layer}", base.layers[layer], None)


def alone(base: Base, model: Model, head: Mapping[str, Tensor] | None) -> tuple[Model, dict[str, Tensor] | None]:
    """A stack of one client, on the base's device.

    Raises:
        ModelError: a term that does not fit its layer.
    """
    check_model(base, model, "the model")
    stacked = Model.stack([on_base(base, model)])
    return stacked, None if head is None else {name: on_base(base, value)[None] for name, value in head.items()}


@torch.no_grad()
def evaluate(
    base: Base,
    model: Model,
    head: Mapping[str, Tensor] | None,
    data: DataSet,
    batch_size: int,
    judged_by: Sequence[str] = ("accuracy",),
) -> Score:
    """Mean loss, accuracy and the metrics `judged_by` over all labels, in one pass of batches bucketed by length.

    Of texts with classes: cross-entropy and right answers, per example. Of sequences: per token of the answers. Of
    questions with options: see `choice_score`. All metrics are of the same predictions, of which one whole number a
    label is kept.

    Raises:
        ConfigError: an unknown metric.
        DataError: no examples, no labels, or a metric of classes where there are answers' tokens.
        ModelError: data of another kind than the base is for, or a term that does not fit its layer.
    """
    if len(data) == 0:
        raise DataError("there are no examples to evaluate on")
    check_kind(base, data, "evaluation")
    check_labels(data, "evaluation")
    if isinstance(data, ChoiceSet):
        scored = _option_scores if model.nearest is None else _nearest_options
        return choice_score(scored(base, model, data, batch_size), data, judged_by)
    if not isinstance(data, Classified) and (other := [name for name in judged_by if name != "accuracy"]):
        raise DataError(f"evaluation: {other[0]!r} is a metric of classes; of answers' tokens there is accuracy only")
    stacked, own_head = alone(base, model, head)
    loss = torch.zeros((), dtype=torch.float64, device=base.device)
    answers: list[Tensor] = []
    with base.slots.bound(1, stacked, own_head) as binding:
        for batch in _batches(data, batch_size):
            found = labelled(base, batch)
            if stacked.nearest is not None and isinstance(data, Classified):
                features = example_features(base, binding.seen, batch)
                found = replace(found, logits=nearest_scores(stacked.nearest, features, data.num_classes))
            loss += label_losses(found).double().sum()
            answers.append(torch.stack([found.logits.argmax(dim=1), found.targets]))
    given, true = torch.cat(answers, dim=1).cpu()
    return _judged(float(loss) / len(true), given, true, len(data), judged_by)


@torch.no_grad()
def predict(
    base: Base,
    model: Model,
    head: Mapping[str, Tensor] | None,
    data: DataSet,
    batch_size: int,
    top_k: int | None = None,
    features: bool = False,
) -> Predictions:
    """Logits (n, C) float32, or the `top_k` largest with their ids, in the order of `data`; on the CPU.

    Of sequences, n counts the answers' tokens, sequence after sequence, and C is the vocabulary; of questions with
    options, a logit is an option's score, -inf where there is none. features: also what enters the head's last linear
    layer, or the output layer, (n, d) float32.

    Raises:
        DataError: no examples, or features of options, which have none.
    """
    if len(data) == 0:
        raise DataError("there are no examples to predict")
    check_kind(base, data, "prediction")
    if isinstance(data, ChoiceSet):
        if features:
            raise DataError("options have no features: they are scored by all their tokens")
        return Predictions(*_top(_option_scores(base, model, data, batch_size), data.labels.clone(), top_k))
    stacked, own_head = alone(base, model, head)
    known = isinstance(data, SequenceSet) or int(data.labels.min()) >= 0
    pieces: list[tuple[Tensor, Tensor, Tensor | None]] = []
    losses: list[Tensor] = []
    held: list[Tensor] = []
    order: list[Tensor] = []
    with base.slots.bound(1, stacked, own_head) as binding:
        for planned in _planned(data, batch_size):
            batch = data.batch(planned.indices, planned.pad_to)
            found = labelled(base, batch)
            pieces.append(_top(found.logits.float().cpu(), found.targets.cpu(), top_k))
            if known:
                losses.append(label_losses(found).float().cpu())
            rows = found.places.cpu() // (batch["labels"].numel() // len(planned.indices))
            order.append(torch.as_tensor(planned.indices)[rows])
            if features:
                held.append(pooled(base, binding.seen, batch).float().cpu())
    examples, back = torch.cat(order).sort(stable=True)
    logits, targets = (torch.cat(parts)[back] for parts in list(zip(*pieces, strict=True))[:2])
    ids = [piece[2] for piece in pieces if piece[2] is not None]
    found_features = torch.cat(held)[back] if features else None
    classes = data.labels if isinstance(data, Classified) else data.classes
    return Predictions(
        logits,
        targets,
        torch.cat(ids)[back] if ids else None,
        found_features,
        examples,
        None if classes is None else classes[examples],
        torch.cat(losses)[back] if known else None,
    )


@torch.no_grad()
def _option_scores(base: Base, model: Model, data: ChoiceSet, batch_size: int) -> Tensor:
    """(n, C) float64 on the CPU: log-probabilities of each option's tokens after the prompt, -inf where there is none.

    Summed or averaged over the tokens, as the set says.
    """
    stacked, _ = alone(base, model, None)
    rows = data if model.mix is not None else laid_out(base, data)
    if isinstance(rows, Branches):
        scores = torch.zeros(len(data), int(data.counts.max()), dtype=torch.float64)
        with base.slots.bound(1, stacked, None):
            for planned in _planned(rows, batch_size):
                losses = option_losses(base, rows.batch(planned.indices, planned.pad_to))
                scores[torch.as_tensor(planned.indices)] = data.arranged(-losses.double().cpu(), planned.indices)
        return scores
    options = data.sequences()
    summed = torch.zeros(len(options), dtype=torch.float64)
    with base.slots.bound(1, stacked, None):
        for planned in _planned(options, batch_size):
            losses = row_losses(base, options.batch(planned.indices, planned.pad_to))
            summed[torch.as_tensor(planned.indices)] = -losses.double().cpu()
    return data.arranged(summed)


@torch.no_grad()
def _nearest_options(base: Base, model: Model, data: ChoiceSet, batch_size: int) -> Tensor:
    """(n, C) float64 on the CPU: how near each option's prototype is to the question, -inf where there is no option."""
    prompts = data.options.select(data.first[data.rows])  # all options of a question follow one prompt
    stacked, _ = alone(base, model, None)
    assert stacked.nearest is not None
    counts = data.counts
    scores = torch.zeros(len(data), stacked.nearest.held.shape[-1], dtype=torch.float64)
    with base.slots.bound(1, stacked, None) as binding:
        for planned in _planned(prompts, batch_size):
            batch = prompts.batch(planned.indices, planned.pad_to)
            labelled(base, batch)
            features = example_features(base, binding.seen, batch)
            found = nearest_scores(stacked.nearest, features, scores.shape[1])
            scores[torch.as_tensor(planned.indices)] = found.double().cpu()
    exists = torch.arange(scores.shape[1]) < counts[:, None]
    return scores.masked_fill(~exists, -torch.inf)


def choice_score(scores: Tensor, data: ChoiceSet, judged_by: Sequence[str] = ("accuracy",)) -> Score:
    """How often the option of the highest score (n, C) is the right one; of equal scores the first counts.

    The loss is the mean cross-entropy of the right option, with the scores as logits. For metrics, an option's place
    is its class.
    """
    loss = float(F.cross_entropy(scores, data.labels))
    return _judged(loss, scores.argmax(dim=1), data.labels, len(data), judged_by)


def _judged(loss: float, given: Tensor, true: Tensor, examples: int, judged_by: Sequence[str]) -> Score:
    """The score of predictions (m,) for labels (m,), int64 on the CPU."""
    found = metrics.scores(judged_by, given.numpy(), true.numpy())
    return Score(loss, metrics.accuracy(given.numpy(), true.numpy()), examples, found)


def _top(logits: Tensor, labels: Tensor, top_k: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """float32 logits with labels; where asked for, the largest only, falling, with their ids."""
    if top_k is None:
        return logits.float(), labels, None
    if top_k < logits.shape[1]:
        values, ids = torch.topk(logits, top_k, dim=1)
    else:
        values, ids = torch.sort(logits, dim=1, descending=True)
    return values.float(), labels, ids


def gradient(
    base: Base,
    model: Model,
    head: Mapping[str, Tensor] | None,
    data: DataSet,
    wrt: Sequence[str],
    which: Literal["first", "all"],
    settings: TrainSettings,
    batch_size: int,
    key: Key,
) -> dict[str, Tensor]:
    """The gradient of the mean task loss by the model's parameters that `wrt` names, without dropout; on the CPU.

    which="first": on the first mini-batch of the Fit that has this key; "all": over the whole set.

    Raises:
        DataError, ModelError: data that the base cannot be trained on.
    """
    chosen = trainable(base, data, "gradient")
    check_labels(chosen, "gradient")
    require_unmixed(model, "gradient")
    names = sorted(matching(list(model.parameters), wrt))
    batches = training_batches(chosen, settings, key)[:1] if which == "first" else _planned(chosen, batch_size)
    stacked, own_head = alone(base, model, head)
    leaves = {name: value.clone() for name, value in stacked.parameters.items()}
    wanted = [leaves[name].requires_grad_() for name in names]
    bound = stacked.with_parameters(leaves)
    count = sum(label_count(chosen, batch.indices) for batch in batches)
    total = [torch.zeros_like(leaf) for leaf in wanted]
    with base.slots.bound(1, bound, own_head):
        for planned in batches:
            loss = row_losses(base, chosen.batch(planned.indices, planned.pad_to)).sum()
            grads = torch.autograd.grad(loss / count, wanted)
            total = [sum_ + grad for sum_, grad in zip(total, grads, strict=True)]
    return {name: value[0].cpu() for name, value in zip(names, total, strict=True)}


@torch.no_grad()
def calibrate(
    base: Base, model: Model, head: Mapping[str, Tensor] | None, data: DataSet, batch_size: int
) -> dict[str, Tensor]:
    """X X^T (d_in, d_in) float64 of each adapted layer's inputs at all positions that hold a token; on the CPU.

    Of images at all their positions.
    """
    chosen = trainable(base, data, "calibration")
    require_unmixed(model, "calibration")
    stacked, own_head = alone(base, model, head)
    grams: dict[str, Tensor] = {}
    seen: list[tuple[Tensor, Tensor]] = []
    mask: Tensor | None = None

    def hook(name: str) -> Any:
        def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            # Query, key and value share one input: its Gram matrix is computed once.
            found = next((gram for other, gram in seen if other is x), None)
            if found is None:
                tokens = x.flatten(0, -2) if mask is None or x.dim() != 3 else x[mask]
                wide = tokens.double()
                found = wide.mT @ wide
                seen[:] = [(x, found)]
            grams[name] = grams[name] + found if name in grams else found

        return before

    hooks = [slot.register_forward_pre_hook(hook(name)) for name, slot in base.slots.layers.items()]
    try:
        # A language model's output layer is not adapted, and its logits are of no use here.
        nowhere = [torch.empty(0, dtype=torch.int64, device=base.device)] if base.is_language else None
        with base.slots.bound(1, stacked, own_head), base.slots.keeping(nowhere), base.slots.everywhere():
            for batch in _batches(chosen, batch_size):
                held = batch.get("attention_mask")
                mask = None if held is None else held.bool().to(base.device)
                seen.clear()
                base.network(**inputs_of(base, batch))
    finally:
        for handle in hooks:
            handle.remove()
    return {name: gram.cpu() for name, gram in grams.items()}


def first_batch(data: DataSet, settings: TrainSettings, key: Key) -> DataSet:
    """The examples of the first mini-batch of the Fit that has this key (FedPA-LoRA's xi^(t,0), Appendix F)."""
    return data.select(training_batches(data, settings, key)[0].indices)


def training_batches(
    data: DataSet,
    settings: TrainSettings,
    key: Key,
    steps: int | None = None,
    epochs: int | None = None,
    times: int = 1,
) -> list[Batch]:
    """The mini-batches of the Fit that has this key; `steps` or `epochs` override the settings.

    `times` multiplies the settings' steps, not their epochs.
    """
    if steps is None and epochs is None:
        steps, epochs = settings.steps, settings.epochs
        steps = None if steps is None else steps * times
    return plan(
        data.lengths,
        settings.batch_size,
        steps=steps,
        epochs=epochs,
        key=key.fold("batches"),
        buckets=settings.buckets,
    )


def _planned(data: TrainSet | Branches, batch_size: int) -> list[Batch]:
    """Every example once. Of sequences, few enough for logits of a whole vocabulary at each of their tokens."""
    if isinstance(data, Classified):
        return evaluation_batches(data.lengths, batch_size)
    if isinstance(data, Branches):
        # A row stands for several sequences, and options are more of it.
        size = max(1, batch_size * len(data) // int(data.choices.counts.sum()))
        return evaluation_batches(data.lengths, size, tokens=_TOKENS // 2)
    return evaluation_batches(data.lengths, batch_size, tokens=_TOKENS)


def _batches(data: TrainSet, batch_size: int) -> Iterator[dict[str, Tensor]]:
    for planned in _planned(data, batch_size):
        yield data.batch(planned.indices, planned.pad_to)
