"""Penalties on features while training, their means by class, and classes by the nearest prototype."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from training.small import (
    CLASSES,
    EXACT,
    KEY,
    STEPS,
    answers,
    ask,
    base_of,
    choices,
    gpt2_lm,
    identical,
    language_base_of,
    llama_lm,
    lora,
    sequences,
    stacked,
    texts,
)

from coterie.data.sequences import ChoiceSet, DataSet, SequenceSet
from coterie.errors import DataError, ModelError
from coterie.models.loading import Base
from coterie.protocol import (
    ClassMeans,
    Evaluate,
    Fit,
    Fitted,
    Model,
    Predict,
    PrototypeDistance,
    Prototypes,
    input_features,
)
from coterie.training.asks import TrainSettings

NETWORKS = [pytest.param(base_of, id="texts"), pytest.param(lambda: language_base_of(gpt2_lm()), id="answers")]


def points(base: Base, name: str = "points", width: int | None = None) -> Prototypes:
    """Of three classes, the last one without a prototype; in a projection to `width` where that is given."""
    d = base.width
    projection = None if width is None else KEY.fold(name, "P").normal((width, d), width**-0.5, torch.float64)
    means = KEY.fold(name).normal((CLASSES, width or d), 1.0, torch.float64)
    return Prototypes(means, torch.tensor([True, True, False]), projection)


def data_for(base: Base, name: str = "client") -> DataSet:
    return choices(12, name).answers() if base.is_language else texts(12, name)


def questions(count: int) -> ChoiceSet:
    """Of two, three, two, … options of one to three tokens, which follow one prompt."""
    rows, kept, first = [], [], [0]
    for i in range(count):
        prompt = 1 + (KEY.fold("prompt", i).unit(4 + i % 3) * 58).astype(np.int32)
        options = [1 + (KEY.fold("option", i, c).unit(1 + c) * 58).astype(np.int32) for c in range(2 + i % 2)]
        rows += [np.concatenate([prompt, option]) for option in options]
        kept += [len(prompt)] * len(options)
        first.append(len(rows))
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    held = SequenceSet(torch.from_numpy(np.concatenate(rows)), offsets, torch.tensor(kept), torch.arange(len(rows)))
    return ChoiceSet(held, torch.tensor(first), torch.arange(count) % 2, torch.arange(count))


def single(base: Base, request, data: DataSet, settings: TrainSettings = STEPS):
    (done,) = answers(base, [ask(base, request, data=data, head=not base.is_language)], settings)
    if isinstance(done, Exception):
        raise done
    return done.answer


def features_of(base: Base, model: Model, data: DataSet) -> tuple[torch.Tensor, torch.Tensor]:
    seen = single(base, Predict(model, "train", features=True), data)
    return input_features(seen.embeddings, seen.examples).double(), input_features(seen.classes, seen.examples)


def mean_distance(base: Base, model: Model, held: Prototypes, data: DataSet) -> float:
    """The mean over examples of (1/w) ||P f - p_y||^2, 0 where the class has no prototype; one example at a time."""
    found = []
    for f, c in zip(*features_of(base, model, data), strict=True):
        point = f if held.projection is None else held.projection @ f
        found.append(float((point - held.means[c]).square().mean()) if held.held[c] else 0.0)
    return sum(found) / len(found)


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("width", [None, 5])
def test_one_step_goes_along_the_gradient_of_the_loss_and_the_mean_distance(make, width: int | None) -> None:
    """By differences of the slow twin, in one direction of the parameters."""
    base = make()
    base.prepare("float64", "eager")
    data, model, held = data_for(base), lora(base, 2), points(base, width=width)
    step = TrainSettings(optimizer="sgd", lr=1.0, batch_size=12, steps=1, weight_decay=0.0, clip=None)
    ends = [
        single(base, Fit(model, penalties=penalties, head=False), data, step).model.parameters
        for penalties in ((), (PrototypeDistance(held, 0.7),))
    ]
    name = next(iter(model.parameters))
    gradient = ends[0][name] - ends[1][name]  # of the penalty alone
    direction = gradient / gradient.norm()
    eps = 1e-4
    sides = [
        mean_distance(base, model.with_parameters({name: model.parameters[name] + sign * eps * direction}), held, data)
        for sign in (1, -1)
    ]
    slope = 0.7 * (sides[0] - sides[1]) / (2 * eps)
    # Predictions give features in float32.
    assert float(gradient.norm()) > 1e-3 and abs(slope - float(gradient.norm())) < 2e-3 * max(1.0, abs(slope))


@pytest.mark.parametrize("make", NETWORKS)
def test_a_large_weight_brings_features_to_their_prototypes(make) -> None:
    base = make()
    data, model = data_for(base), lora(base, 4)
    held = replace(points(base), means=features_of(base, model, data)[0][:CLASSES] + 0.3)
    settings = replace(STEPS, steps=40)
    ends = [
        mean_distance(base, single(base, Fit(model, penalties=made), data, settings).model, held, data)
        for made in ((), (PrototypeDistance(held, 30.0),))
    ]
    assert ends[1] < 0.6 * ends[0]


@pytest.mark.parametrize("make", NETWORKS)
def test_company_changes_no_bit_and_parts_only_rounding(make) -> None:
    base = make()
    asks = [
        ask(
            base,
            Fit(
                lora(base, 2 + i, f"c{i}"), penalties=(PrototypeDistance(points(base, f"p{i}"), 0.5 + i),), collect=True
            ),
            f"c{i}",
            data_for(base, f"c{i}"),
            head=not base.is_language,
        )
        for i in range(3)
    ]
    together, alone = answers(base, asks, plan=stacked(EXACT)), answers(base, asks)
    for one, other in zip(together, alone, strict=True):
        assert identical(one, other)
        assert torch.equal(one.answer.collected.means, other.answer.collected.means)
    parts = answers(base, asks, replace(STEPS, accumulation=2))
    for one, other in zip(parts, alone, strict=True):
        mine, theirs = one.answer.model.parameters, other.answer.model.parameters
        assert all(torch.allclose(mine[name], theirs[name], atol=1e-7) for name in mine)


def test_collected_means_are_of_the_last_epoch_alone() -> None:
    base = base_of()
    data, model = texts(11, "client"), lora(base, 2)
    still = TrainSettings(optimizer="sgd", lr=1e-300, batch_size=4, steps=None, epochs=3, weight_decay=0.0)
    found = single(base, Fit(model, collect=True), data, still)
    assert isinstance(found, Fitted) and found.collected is not None
    expected = ClassMeans.of(*features_of(base, model, data))
    assert found.collected.classes == expected.classes and found.collected.counts == expected.counts
    assert torch.allclose(found.collected.means, expected.means, atol=1e-5)
    assert single(base, Fit(model), data, still).collected is None


@pytest.mark.parametrize("make", [*NETWORKS, pytest.param(lambda: language_base_of(llama_lm()), id="llama")])
def test_the_nearest_prototype_decides_whatever_the_head_says(make) -> None:
    """Against one example at a time; classes without a prototype, and options that do not exist, are never chosen."""
    base = make()
    model, held = lora(base, 3), points(base, width=5)
    data = questions(9) if base.is_language else texts(9, "asked")
    features, _ = features_of(base, model, data.answers() if base.is_language else data)  # type: ignore[union-attr]
    right = 0
    for i, f in enumerate(features):
        count = int(data.counts[i]) if base.is_language else CLASSES  # type: ignore[union-attr]
        apart = [float((held.projection @ f - held.means[c]).square().sum()) for c in range(2)][:count]
        right += int(data.labels[i]) == apart.index(min(apart))  # type: ignore[union-attr]
    judged = single(base, Evaluate(Model(nearest=held, lora=model["lora"]), "test"), data)
    assert judged.accuracy == pytest.approx(right / 9) and judged.loss < 1e9


def test_a_model_judged_by_prototypes_is_not_trained() -> None:
    base = base_of()
    with pytest.raises(ModelError, match=r"judged by prototypes.*nearest"):
        single(base, Fit(Model(nearest=points(base), lora=lora(base, 2)["lora"])), texts(8))


def test_open_answers_are_refused_where_features_are_looked_at_by_class() -> None:
    base = language_base_of(gpt2_lm())
    for options in ({"collect": True}, {"penalties": (PrototypeDistance(points(base), 1.0),)}):
        with pytest.raises(DataError, match=r"client client: open answers have no classes"):
            single(base, Fit(lora(base, 2), **options), sequences(8))  # type: ignore[arg-type]


def test_a_class_beyond_the_prototypes_is_refused() -> None:
    base = base_of()
    few = Prototypes(torch.zeros(2, base.width), torch.ones(2, dtype=torch.bool))
    with pytest.raises(ModelError, match=r"prototypes of 2 classes, but examples of 2"):
        single(base, Fit(lora(base, 2), penalties=(PrototypeDistance(few, 1.0),)), texts(20))
