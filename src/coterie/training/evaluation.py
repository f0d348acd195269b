"""What a model says about a data set: loss and accuracy, logits, gradients, second moments of activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.data.batches import Batch, evaluation_batches, plan
from coterie.data.text import TextSet
from coterie.errors import DataError, ModelError
from coterie.maths.keys import Key
from coterie.models.loading import Base, inputs_of
from coterie.protocol import LowRank, Model, Predictions, Score, matching
from coterie.protocol.messages import map_tensors
from coterie.training.asks import TrainSettings


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
            if isinstance(term, LowRank):
                term.check(f"{who}, {name}.{layer}", base.layers[layer], None)


def alone(base: Base, model: Model, head: Mapping[str, Tensor] | None) -> tuple[Model, dict[str, Tensor] | None]:
    """A stack of one client, on the base's device.

    Raises:
        ModelError: a term that does not fit its layer.
    """
    check_model(base, model, "the model")
    stacked = Model.stack([on_base(base, model)])
    return stacked, None if head is None else {name: on_base(base, value)[None] for name, value in head.items()}


def logits_of(base: Base, batch: Mapping[str, Tensor]) -> Tensor:
    """The network's logits (n, classes), in float32 at least."""
    logits: Tensor = base.network(**inputs_of(base, batch)).logits
    return logits if logits.dtype == torch.float64 else logits.float()


@torch.no_grad()
def evaluate(base: Base, model: Model, head: Mapping[str, Tensor] | None, data: TextSet, batch_size: int) -> Score:
    """Mean cross-entropy and accuracy over all examples, in batches bucketed by length.

    Raises:
        DataError: no examples.
    """
    if len(data) == 0:
        raise DataError("there are no examples to evaluate on")
    stacked, own_head = alone(base, model, head)
    loss = torch.zeros((), dtype=torch.float64, device=base.device)
    right = torch.zeros((), dtype=torch.int64, device=base.device)
    with base.slots.bound(1, stacked, own_head):
        for batch in _batches(data, batch_size):
            logits = logits_of(base, batch)
            labels = batch["labels"].to(base.device)
            loss += F.cross_entropy(logits, labels, reduction="none").double().sum()
            right += (logits.argmax(dim=1) == labels).sum()
    return Score(float(loss) / len(data), int(right) / len(data), len(data))


@torch.no_grad()
def predict(
    base: Base,
    model: Model,
    head: Mapping[str, Tensor] | None,
    data: TextSet,
    batch_size: int,
    top_k: int | None = None,
    features: bool = False,
) -> Predictions:
    """Logits (n, C) float32, or the `top_k` largest with their class ids, in the order of `data`; on the CPU.

    features: also what enters the head's last linear layer, (n, d) float32.
    """
    if len(data) == 0:
        raise DataError("there are no examples to predict")
    stacked, own_head = alone(base, model, head)
    pieces: list[Tensor] = []
    pooled: list[Tensor] = []
    order: list[Tensor] = []
    with base.slots.bound(1, stacked, own_head) as binding:
        for plan_batch in evaluation_batches(data.lengths, batch_size):
            batch = data.batch(plan_batch.indices, plan_batch.pad_to)
            pieces.append(logits_of(base, batch).float().cpu())
            order.append(torch.as_tensor(plan_batch.indices))
            if features:
                pooled.append(_features(binding.seen, batch).float().cpu())
    back = torch.argsort(torch.cat(order))
    logits = torch.cat(pieces)[back]
    ids = None
    if top_k is not None and top_k < logits.shape[1]:
        logits, ids = torch.topk(logits, top_k, dim=1)
    elif top_k is not None:
        logits, ids = torch.sort(logits, dim=1, descending=True)
    return Predictions(logits, data.labels.clone(), ids, torch.cat(pooled)[back] if features else None)


def gradient(
    base: Base,
    model: Model,
    head: Mapping[str, Tensor] | None,
    data: TextSet,
    wrt: Sequence[str],
    which: Literal["first", "all"],
    settings: TrainSettings,
    batch_size: int,
    key: Key,
) -> dict[str, Tensor]:
    """The gradient of the mean task loss by the model's parameters that `wrt` names, without dropout; on the CPU.

    which="first": on the first mini-batch of the Fit that has this key; "all": over the whole set.
    """
    names = sorted(matching(list(model.parameters), wrt))
    if which == "first":
        batches = training_batches(data, settings, key)[:1]
    else:
        batches = evaluation_batches(data.lengths, batch_size)
    stacked, own_head = alone(base, model, head)
    leaves = {name: value.clone() for name, value in stacked.parameters.items()}
    wanted = [leaves[name].requires_grad_() for name in names]
    bound = stacked.with_parameters(leaves)
    count = sum(len(batch.indices) for batch in batches)
    total = [torch.zeros_like(leaf) for leaf in wanted]
    with base.slots.bound(1, bound, own_head):
        for planned in batches:
            batch = data.batch(planned.indices, planned.pad_to)
            loss = F.cross_entropy(logits_of(base, batch), batch["labels"].to(base.device), reduction="sum")
            grads = torch.autograd.grad(loss / count, wanted)
            total = [sum_ + grad for sum_, grad in zip(total, grads, strict=True)]
    return {name: value[0].cpu() for name, value in zip(names, total, strict=True)}


@torch.no_grad()
def calibrate(
    base: Base, model: Model, head: Mapping[str, Tensor] | None, data: TextSet, batch_size: int
) -> dict[str, Tensor]:
    """X X^T (d_in, d_in) float64 of each adapted layer's inputs at all positions that hold a token; on the CPU."""
    stacked, own_head = alone(base, model, head)
    grams: dict[str, Tensor] = {}
    seen: list[tuple[Tensor, Tensor]] = []
    mask = torch.empty(0)

    def hook(name: str) -> Any:
        def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            # Query, key and value share one input: its Gram matrix is computed once.
            found = next((gram for other, gram in seen if other is x), None)
            if found is None:
                tokens = x[mask] if x.dim() == 3 else x
                wide = tokens.double()
                found = wide.mT @ wide
                seen[:] = [(x, found)]
            grams[name] = grams[name] + found if name in grams else found

        return before

    hooks = [slot.register_forward_pre_hook(hook(name)) for name, slot in base.slots.layers.items()]
    try:
        with base.slots.bound(1, stacked, own_head):
            for batch in _batches(data, batch_size):
                mask = batch["attention_mask"].bool().to(base.device)
                seen.clear()
                base.network(**inputs_of(base, batch))
    finally:
        for handle in hooks:
            handle.remove()
    return {name: gram.cpu() for name, gram in grams.items()}


def training_batches(
    data: TextSet, settings: TrainSettings, key: Key, steps: int | None = None, epochs: int | None = None
) -> list[Batch]:
    """The mini-batches of the Fit that has this key; `steps` or `epochs` override the settings."""
    if steps is None and epochs is None:
        steps, epochs = settings.steps, settings.epochs
    return plan(
        data.lengths,
        settings.batch_size,
        steps=steps,
        epochs=epochs,
        key=key.fold("batches"),
        buckets=settings.buckets,
    )


def _batches(data: TextSet, batch_size: int) -> Iterator[dict[str, Tensor]]:
    for planned in evaluation_batches(data.lengths, batch_size):
        yield data.batch(planned.indices, planned.pad_to)


def _features(seen: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
    """What entered the head's last linear layer; of a decoder, at each example's last token."""
    assert seen is not None
    if seen.dim() == 2:
        return seen
    last = batch["attention_mask"].sum(dim=1).to(seen.device) - 1
    return seen[torch.arange(seen.shape[0], device=seen.device), last]
