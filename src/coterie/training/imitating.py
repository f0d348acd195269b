"""Fits that learn from another model at hand: its hidden states where a block begins, and its predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.errors import ModelError, nearest
from coterie.models.loading import Base
from coterie.protocol import Imitation, Model
from coterie.training.evaluation import alone
from coterie.training.objectives import Labelled, by_row, labelled


@dataclass(frozen=True)
class Teacher:
    """A model on a base of its own, ready for passes; both as a stack of one."""

    base: Base
    model: Model
    head: dict[str, Tensor] | None
    loss: Imitation


def teacher_of(
    loss: Imitation, bases: Mapping[str, Base], learner: Base, head: Mapping[str, Tensor] | None, who: str
) -> Teacher:
    """Raises ModelError for a teacher without a base of its own, or a block that one of the two lacks."""
    spec = loss.teacher.spec
    if spec is None or spec not in bases or bases[spec] is learner:
        raise ModelError(f"{who}: a teacher must name a base that is not the learner's, not {spec!r}")
    for base in (learner, bases[spec]):
        names = [name for name, _ in base.network.named_modules()]
        if loss.at not in names:
            raise ModelError(f"{who}: there is no block {loss.at!r}{nearest(loss.at, names)}")
    return Teacher(bases[spec], *alone(bases[spec], loss.teacher, head), loss)


def imitation_losses(learner: Base, teacher: Teacher, batch: Mapping[str, Tensor]) -> Tensor:
    """The sum of the losses of a batch's examples, (1,): distance of hidden states + kd * KL(teacher || learner).

    Of each example the means over its tokens, and over its labels.
    """
    with torch.no_grad(), teacher.base.slots.bound(1, teacher.model, teacher.head):
        theirs, wanted = _passed(teacher.base, teacher.loss.at, batch)
    found, own = _passed(learner, teacher.loss.at, batch)
    mask = batch["attention_mask"].to(own.device)
    apart = hidden_distance(wanted.to(own.device, own.dtype), own, teacher.loss.distance)
    hidden = (apart * mask).sum(dim=1) / mask.sum(dim=1)
    target = theirs.logits.to(found.logits.device, found.logits.dtype).log_softmax(dim=-1)
    divergence = F.kl_div(found.logits.log_softmax(dim=-1), target, reduction="none", log_target=True).sum(dim=-1)
    labels = by_row(torch.ones_like(divergence), found, batch["labels"])
    rows = by_row(divergence, found, batch["labels"]) / labels.clamp(min=1)
    return (hidden + teacher.loss.kd * rows).sum().reshape(1)


def hidden_distance(wanted: Tensor, own: Tensor, kind: str) -> Tensor:
    """How far states are from those wanted, both (b, L, d), token by token (b, L).

    "l2": ||own - wanted||^2 / ||wanted||^2; "cosine": 1 - their cosine.
    """
    if kind == "cosine":
        return 1 - F.cosine_similarity(wanted, own, dim=-1)
    return (own - wanted).square().sum(dim=-1) / wanted.square().sum(dim=-1).clamp(min=1e-12)


def _passed(base: Base, at: str, batch: Mapping[str, Tensor]) -> tuple[Labelled, Tensor]:
    """What a model says at the labels, and what enters the block `at`, (b, L, d)."""
    with base.slots.everywhere(), _entering(base.network.get_submodule(at)) as entered:
        found = labelled(base, batch)
    return found, entered()


@contextmanager
def _entering(block: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """For passes inside: what the block was given last, by the function that is yielded."""
    seen: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs["hidden_states"]
        seen[:] = [given if given.dtype == torch.float64 else given.float()]

    hook = block.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield lambda: seen[0]
    finally:
        hook.remove()
