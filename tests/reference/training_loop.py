"""The slow twin of stacked training: one client, dense W0 + s B A or W0 + D, autograd, torch.optim and clipping."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from reference.dense_weak_to_strong import taught_loss
from torch import Tensor, nn
from torch.func import functional_call

from coterie.data.batches import plan
from coterie.protocol import Fit, WeakToStrong
from coterie.training.asks import Ask, TrainSettings


def train_alone(network: nn.Module, head: Mapping[str, Tensor], ask: Ask, settings: TrainSettings) -> dict[str, Tensor]:
    """The trained parameters (`lora.layer.B`, …, `head.name`) of a Fit on an unwrapped float64 `network`.

    Knows LowRank terms without a diagonal called `lora`, Dense ones called `delta`, ProductDistance penalties, and no
    dropout.
    """
    request = ask.request
    assert isinstance(request, Fit) and ask.data is not None
    frozen = {name: value.detach() for name, value in network.named_parameters()}
    own = {name: value.detach().double().clone() for name, value in request.initial.parameters.items()}
    own |= {f"head.{name}": value.detach().double().clone() for name, value in head.items()}
    patterns = [*request.train, *(["head.*"] if request.head else [])]
    trained = {name: value for name, value in own.items() if any(fnmatchcase(name, p) for p in patterns)}
    for value in trained.values():
        value.requires_grad_()
    batches = plan(
        ask.data.lengths,
        settings.batch_size,
        steps=request.steps or settings.steps,
        key=ask.key.fold("batches"),
        buckets=settings.buckets,
    )
    optimizer = torch_optimizer(list(trained.values()), settings)
    for number, planned in enumerate(batches):
        weights = dict(frozen) | {name: own[f"head.{name}"] for name in head}
        addends = {
            layer: term.scale * (own[f"lora.{layer}.B"] @ own[f"lora.{layer}.A"])
            for layer, term in request.initial.terms.get("lora", {}).items()
        } | {layer: own[f"delta.{layer}.W"] for layer in request.initial.terms.get("delta", {})}
        for layer, addend in addends.items():
            # A Conv1D stores its weight transposed.
            stored = addend.mT if type(network.get_submodule(layer)).__name__ == "Conv1D" else addend
            weights[f"{layer}.weight"] = frozen[f"{layer}.weight"] + stored
        if isinstance(request.loss, WeakToStrong):
            progress = number / len(batches)
            loss = taught_loss(network, weights, ask.data, planned.indices.tolist(), request.loss, progress)
        else:
            loss = _task_loss(network, weights, ask.data.batch(planned.indices, planned.pad_to))
        for penalty in request.penalties:
            for layer, reference in penalty.reference.items():
                difference = own[f"lora.{layer}.B"] @ own[f"lora.{layer}.A"] - reference.B @ reference.A
                loss = loss + penalty.weight * difference.square().sum()
        optimizer.zero_grad()
        loss.backward()
        if settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(trained.values()), settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = scheduled(settings, number, len(batches))
        optimizer.step()
    return {name: value.detach() for name, value in own.items()}


def _task_loss(network: nn.Module, weights: Mapping[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The mean over all labels: an example's class, or each labelled token, predicted by those before."""
    labels = batch.pop("labels")
    logits = functional_call(network, dict(weights), kwargs=batch).logits
    if labels.dim() == 2:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    return F.cross_entropy(logits, labels)


def torch_optimizer(parameters: list[Tensor], settings: TrainSettings) -> torch.optim.Optimizer:
    decay = settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=decay)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=decay)


def scheduled(settings: TrainSettings, number: int, total: int) -> float:
    """A linear warm-up to lr, then constant, or a straight line that would reach zero after the last step."""
    warmup = settings.warmup_steps
    if number < warmup:
        return settings.lr * (number + 1) / warmup
    return settings.lr if settings.schedule == "constant" else settings.lr * (total - number) / (total - warmup)
