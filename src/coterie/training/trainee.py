"""One client made ready to train: what it trains, on which batches, with which random streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.data.batches import Batch, padded
from coterie.data.branches import Branches
from coterie.data.sequences import DataSet
from coterie.errors import DataError, ModelError
from coterie.models.loading import Base, moved
from coterie.protocol import Core, Distillation, Fit, LowRank, Model, Routed, RoutingPenalty, WeakToStrong, matching
from coterie.training.asks import Ask, Head, TrainSettings
from coterie.training.distilling import check_distillation
from coterie.training.evaluation import check_model, on_base, training_batches
from coterie.training.features import check_features
from coterie.training.mixing import require_unmixed
from coterie.training.objectives import check_kind, check_labels, laid_out, trainable
from coterie.training.routing import check_routing
from coterie.training.teaching import check_teaching, vocabulary_of

HEAD = "head."
"""What the names of head parameters begin with, beside those of the model, in masks and learning-rate patterns."""


@dataclass(frozen=True)
class Trainee:
    """One client of a stack, ready to train: its own model and head in the master dtype, batches and streams.

    data: its examples; rows: how they are laid out in batches.
    """

    ask: Ask
    fit: Fit
    model: Model
    head: Head
    trained: frozenset[str]
    rate_scale: dict[str, float]
    data: DataSet
    rows: DataSet | Branches
    batches: list[Batch]
    generator: torch.Generator

    @property
    def dropped(self) -> frozenset[str]:
        """The low-rank and routed terms and cores that this client trains: dropout acts on their input."""
        names = {name.partition(".")[0] for name in self.trained if not name.startswith(HEAD)}
        kinds = LowRank | Core | Routed
        return frozenset(
            name for name in names if any(isinstance(term, kinds) for term in self.model.terms[name].values())
        )


def attempted(base: Base, ask: Ask, settings: TrainSettings) -> Trainee | Exception:
    """`prepare`, with whatever it raises as its result."""
    try:
        return prepare(base, ask, settings)
    except Exception as error:
        return error


def prepare(base: Base, ask: Ask, settings: TrainSettings) -> Trainee:
    """Check one Fit and draw its batches.

    Raises:
        DataError: no examples, no labels, choices, or a teacher's targets that do not suit the data.
        ModelError: data of another kind than the base is for, a term that does not fit its layer, a pattern that
            matches nothing, nothing to train at all, or a penalty on routing where there is none.
    """
    request = ask.request
    assert isinstance(request, Fit)
    if ask.data is None or len(ask.data) == 0:
        raise DataError(f"client {ask.party}: there are no examples in {request.data!r} to train on")
    if isinstance(request.loss, WeakToStrong):
        check_kind(base, ask.data, f"client {ask.party}")
        check_teaching(request.loss, ask.data, vocabulary_of(base), f"client {ask.party}")
        data = ask.data
    elif isinstance(request.loss, Distillation):
        data = trainable(base, ask.data, f"client {ask.party}")
        check_labels(data, f"client {ask.party}")
        check_distillation(request.loss, data, f"client {ask.party}")
    else:
        data = trainable(base, ask.data, f"client {ask.party}")
        check_labels(data, f"client {ask.party}")
    check_model(base, request.initial, f"client {ask.party}")
    require_unmixed(request.initial, f"client {ask.party}")
    check_routing(request.initial, request.penalties, f"client {ask.party}")
    check_features(data, request.penalties, request.collect, f"client {ask.party}")
    names = list(request.initial.parameters)
    head = {HEAD + name: value for name, value in (ask.head or base.head).items()}
    trained = matching(names, request.train)
    if request.head and ask.head is not None:
        trained |= set(head)
    if not trained:
        raise ModelError(f"client {ask.party}: this Fit trains nothing; name some parameters, or train the head")
    rate_scale: dict[str, float] = {}
    for pattern, factor in request.lr_scale.items():
        for name in matching([*names, *head], [pattern]):
            rate_scale[name] = rate_scale.get(name, 1.0) * factor
    # A penalty on routing counts tokens, and a prompt's would count once in place of once for each option.
    counted = any(isinstance(penalty, RoutingPenalty) for penalty in request.penalties)
    rows = data if counted else laid_out(base, data)
    batches = training_batches(data, settings, ask.key, request.steps, request.epochs, request.times)
    if isinstance(rows, Branches):
        batches = padded([batch.indices for batch in batches], rows.lengths, settings.buckets)
    return Trainee(
        ask=ask,
        fit=request,
        model=on_base(base, request.initial),
        head=on_base(base, head),
        trained=frozenset(trained),
        rate_scale=rate_scale,
        data=data,
        rows=rows,
        batches=batches,
        generator=ask.key.fold("dropout").generator(),
    )


class Dropout:
    """Inverted dropout on the input of trained low-rank terms, drawn by each client's generator in its own shape."""

    def __init__(self, rate: float, generators: Sequence[torch.Generator], dropped: Sequence[frozenset[str]]) -> None:
        self.rate, self.generators, self.dropped = rate, generators, dropped

    def __call__(self, term: str, x: Tensor) -> Tensor:
        if not any(term in names for names in self.dropped):
            return x
        masks = [
            torch.empty(x.shape[1:], dtype=torch.float32).bernoulli_(1 - self.rate, generator=generator)
            if term in names
            else torch.full(x.shape[1:], 1 - self.rate)
            for generator, names in zip(self.generators, self.dropped, strict=True)
        ]
        return x * moved(torch.stack(masks).div_(1 - self.rate).to(x.dtype), x.device)
