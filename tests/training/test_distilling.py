"""Learning from labels and distributions over them: one loop over labels, company, parts, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from training.small import (
    EXACT,
    KEY,
    STEPS,
    WORDS,
    answers,
    ask,
    base_of,
    choices,
    gpt2_lm,
    identical,
    language_base_of,
    lora,
    sequences,
    stacked,
    texts,
)

from coterie.data.sequences import DataSet, SequenceSet
from coterie.errors import DataError
from coterie.models.loading import Base
from coterie.protocol import Distillation, Fit, Model, Predict
from coterie.training.asks import TrainSettings
from coterie.training.distilling import target_rows

KINDS = [
    pytest.param(base_of, texts, id="texts"),
    pytest.param(lambda: language_base_of(gpt2_lm()), sequences, id="lm"),
]
ONE_STEP = TrainSettings(optimizer="sgd", lr=1.0, batch_size=9, steps=1, weight_decay=0.0, clip=None)


def targets(data: DataSet, classes: int, name: str = "targets", gold: float = 0.4) -> Distillation:
    """Two classes or tokens for each label, with odds."""
    rows = int(data.labelled.sum()) if isinstance(data, SequenceSet) else len(data)
    first = (KEY.fold(name).unit(rows) * (classes - 1)).astype("int64")
    ids = torch.from_numpy(first)[:, None] + torch.tensor([[0, 1]])
    p = torch.from_numpy(KEY.fold(name, "p").unit(rows))
    return Distillation(ids.to(torch.int32), torch.stack([p, 1 - p], dim=1).float(), gold)


def single(base: Base, request, data: DataSet, settings: TrainSettings = STEPS):
    (done,) = answers(base, [ask(base, request, data=data, head=not base.is_language)], settings)
    if isinstance(done, Exception):
        raise done
    return done.answer


def slow_loss(base: Base, model: Model, data: DataSet, loss: Distillation) -> float:
    """Label by label, from all logits."""
    seen = single(base, Predict(model, "train"), data)
    total = 0.0
    for row, (logits, label) in enumerate(zip(seen.logits.double(), seen.labels.tolist(), strict=True)):
        log_q = logits.log_softmax(0)
        apart = sum(
            float(p) * (float(p.log()) - float(log_q[i]))
            for i, p in zip(loss.ids[row].tolist(), loss.probabilities[row].double(), strict=True)
            if p > 0
        )
        total += -loss.gold * float(log_q[label]) + (1 - loss.gold) * apart
    return total / len(seen.labels)


@pytest.mark.parametrize(("make", "draw"), KINDS)
def test_the_loss_is_that_of_a_loop_over_labels(make, draw) -> None:
    base, data = make(), draw(9, "client")
    base.prepare("float64", "eager")
    loss = targets(data, WORDS if base.is_language else 3)
    found = single(base, Fit(lora(base, 2), loss=loss, head=False), data, ONE_STEP)
    assert found.mean_loss == pytest.approx(slow_loss(base, lora(base, 2), data, loss), rel=1e-5)


@pytest.mark.parametrize(("make", "draw"), KINDS)
def test_with_gold_one_it_is_plain_training_bit_for_bit_in_what_is_learnt(make, draw) -> None:
    base, data = make(), draw(9, "client")
    loss = targets(data, WORDS if base.is_language else 3, gold=1.0)
    plain, taught = (single(base, Fit(lora(base, 2), loss=one), data) for one in (Fit(lora(base, 2)).loss, loss))
    names = plain.model.parameters
    assert all(torch.allclose(names[n], taught.model.parameters[n], atol=1e-9) for n in names)


def test_a_model_that_is_its_own_target_has_nothing_to_learn() -> None:
    base, data, model = base_of(), texts(9), lora(base_of(), 2)
    base.prepare("float64", "eager")
    seen = single(base, Predict(model, "train", top_k=3), data)
    loss = Distillation(seen.ids, seen.logits.double().softmax(1), 0.0)
    found = single(base, Fit(model, loss=loss, head=False), data, ONE_STEP)
    assert abs(found.mean_loss) < 1e-6
    assert all(torch.allclose(v, found.model.parameters[n], atol=1e-4) for n, v in model.parameters.items())


@pytest.mark.parametrize(("make", "draw"), KINDS)
def test_company_changes_no_bit_and_parts_only_rounding(make, draw) -> None:
    base = make()
    classes = WORDS if base.is_language else 3
    asks = []
    for i in range(3):
        data = draw(12, f"c{i}")
        request = Fit(lora(base, 2 + i, f"c{i}"), loss=targets(data, classes, f"t{i}", 0.2 + 0.3 * i))
        asks.append(ask(base, request, f"c{i}", data, head=not base.is_language))
    together, alone = answers(base, asks, plan=stacked(EXACT)), answers(base, asks)
    assert all(identical(one, other) for one, other in zip(together, alone, strict=True))
    for one, other in zip(answers(base, asks, replace(STEPS, accumulation=2)), alone, strict=True):
        mine, theirs = one.answer.model.parameters, other.answer.model.parameters
        assert all(torch.allclose(mine[name], theirs[name], atol=1e-7) for name in mine)


def test_rows_of_labels_follow_a_selection_of_a_selection() -> None:
    data = sequences(10)
    part = data.select([7, 2, 5])
    counts = part.labelled.tolist()
    assert target_rows(part, [2, 0]).tolist() == [
        *range(counts[0] + counts[1], sum(counts)),
        *range(counts[0]),
    ]
    assert target_rows(texts(5), [3, 1]).tolist() == [3, 1]


def test_targets_that_are_none_are_refused_by_name() -> None:
    base, data = language_base_of(gpt2_lm()), sequences(6)
    good = targets(data, WORDS)
    wrong = {
        "one row each": replace(good, ids=good.ids[1:], probabilities=good.probabilities[1:]),
        "no distribution": replace(good, probabilities=good.probabilities * 2),
    }
    for told, loss in wrong.items():
        with pytest.raises(DataError, match=f"client client: .*{told}"):
            single(base, Fit(lora(base, 2), loss=loss), data)
    with pytest.raises(DataError, match="choices can be scored"):
        single(base, Fit(lora(base, 2), loss=good), choices(5))
