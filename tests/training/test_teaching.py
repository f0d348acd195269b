"""Learning from a teacher's distributions: as the plain loop does, over every option, without the labels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference.training_loop import train_alone
from torch import Tensor
from training.small import (
    CLASSES,
    EXACT,
    KEY,
    PLAIN,
    STEPS,
    WORDS,
    answers,
    ask,
    base_of,
    bert,
    choices,
    farthest,
    gpt2_lm,
    identical,
    language_base_of,
    llama_lm,
    lora,
    sequences,
    stacked,
    tensors,
    texts,
)

from coterie.data.sequences import ChoiceSet, SequenceSet
from coterie.data.text import TextSet
from coterie.errors import DataError
from coterie.protocol import Dense, Evaluate, Fit, Model, Predict, ProductDistance, WeakToStrong
from coterie.training.asks import Done
from coterie.training.teaching import needs_whole

FORMS = [
    pytest.param({"form": "confidence"}, id="median"),
    pytest.param({"form": "confidence", "hardening": "quantile", "warmup": 0.6}, id="quantile"),
    pytest.param({"form": "confidence", "hardening": "argmax"}, id="argmax"),
    pytest.param({"form": "entropy", "alpha": 0.3}, id="entropy"),
]


def targets(data: ChoiceSet | TextSet, name: str = "teacher") -> Tensor:
    """A teacher's distributions over the options, or classes, of each example."""
    if isinstance(data, TextSet):
        return KEY.fold(name).normal((len(data), CLASSES), 1.0, torch.float64).softmax(dim=1)
    counts = data.counts
    drawn = KEY.fold(name).normal((len(data), int(counts.max())), 1.0, torch.float64)
    return drawn.masked_fill(torch.arange(drawn.shape[1]) >= counts[:, None], -torch.inf).softmax(dim=1)


def hidden(data: ChoiceSet) -> ChoiceSet:
    return replace(data, stored_labels=torch.full_like(data.stored_labels, -1))


def taught(base, name: str = "client", rank: int = 4, count: int = 11, data=None, steps: int = 5, **loss):
    data = hidden(choices(count, name)) if data is None else data
    own = loss.pop("penalties", ())
    fit = Fit(lora(base, rank, name), loss=WeakToStrong(targets(data, name), **loss), steps=steps, penalties=own)
    return ask(base, fit, name, data, head=not base.is_language)


def fitted(done) -> Done:
    if isinstance(done, Exception):
        raise done
    return done


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("score", ["sum", "mean"])
@pytest.mark.parametrize(("network", "tolerance"), [(gpt2_lm, 1e-10), (llama_lm, 1e-6)])
def test_a_student_of_choices_is_that_of_the_plain_loop(network, tolerance: float, score: str, form) -> None:
    base = language_base_of(network())
    data = hidden(replace(choices(11, "questions"), score=score)).select([4, 7, 0, 1, 10, 3, 2, 9, 5])
    each = taught(base, data=data, **form)
    # Options that share a prompt leave entries of the gradient near zero, which AdamW would blow up to whole steps.
    settings = replace(STEPS, clip=0.5, optimizer="sgd", lr=0.1)
    plain = network().eval().double()
    plain.config.use_cache = False
    expected = train_alone(plain, {}, replace(each, head=None), settings)
    (done,) = answers(base, [each], settings)
    assert farthest(tensors(fitted(done)), expected) < tolerance


@pytest.mark.parametrize("form", FORMS)
def test_a_student_of_texts_without_classes_is_that_of_the_plain_loop(form) -> None:
    base = base_of()
    data = replace(texts(22), stored_labels=torch.full((22,), -1))
    each = taught(base, data=data, **form)
    (done,) = answers(base, [each])
    assert farthest(tensors(fitted(done)), train_alone(bert().eval().double(), each.head, each, STEPS)) < 1e-9


def test_a_student_of_all_weights_is_that_of_the_plain_loop() -> None:
    base, settings = base_of(), replace(STEPS, clip=0.5, dropout=0.2)
    data = replace(texts(22), stored_labels=torch.full((22,), -1))
    zeros = {n: torch.zeros(layer.d_out, layer.d_in, dtype=torch.float64) for n, layer in base.layers.items()}
    start = Model(delta={name: Dense(W) for name, W in zeros.items()})
    fit = Fit(start, train=("delta.*",), head=False, loss=WeakToStrong(targets(data), 0.5))
    each = ask(base, fit, data=data)
    (done,) = answers(base, [each], settings)
    expected = train_alone(bert().eval().double(), each.head, each, replace(settings, dropout=0.0))
    got = tensors(fitted(done))
    assert farthest(got, expected) < 1e-9 and all(bool(got[f"delta.{name}.W"].any()) for name in zeros)


def by_token(data: SequenceSet, name: str = "teacher") -> Tensor:
    """A teacher's distribution for each token of the answers, sharp enough to differ."""
    return KEY.fold(name).normal((int(data.labelled.sum()), WORDS), 2.0, torch.float64).softmax(dim=1)


@pytest.mark.parametrize("form", [{"form": "confidence"}, {"form": "entropy", "alpha": 0.3}])
def test_a_student_of_sequences_learns_token_by_token(form) -> None:
    base = language_base_of(gpt2_lm())
    data = sequences(11).select([4, 7, 0, 1, 10, 3, 2])
    each = ask(base, Fit(lora(base, 3), loss=WeakToStrong(by_token(data), **form)), data=data, head=False)
    settings = replace(STEPS, optimizer="sgd", lr=0.1)
    plain = gpt2_lm().eval().double()
    plain.config.use_cache = False
    (done,) = answers(base, [each], settings)
    assert farthest(tensors(fitted(done)), train_alone(plain, {}, replace(each, head=None), settings)) < 1e-10
    (split,) = answers(base, [each], replace(settings, accumulation=2))
    assert farthest(tensors(fitted(split)), tensors(done)) < 1e-10


def test_the_likeliest_tokens_alone_are_the_same_where_they_are_all() -> None:
    base = language_base_of(gpt2_lm())
    data = sequences(6)
    whole = by_token(data)
    values, ids = whole.sort(dim=1, descending=True)
    asks = [
        ask(base, Fit(lora(base, 3), loss=loss), data=data, head=False)
        for loss in (
            WeakToStrong(whole),
            WeakToStrong(values, ids=ids),
            WeakToStrong(values[:, :2].softmax(1), ids=ids[:, :2]),
        )
    ]
    one, other, few = (fitted(done) for done in answers(base, asks))
    assert identical(one, other) and not identical(one, few)
    (refused,) = answers(base, [ask(base, Fit(lora(base, 3), loss=WeakToStrong(values, ids=ids[:, :2])), data=data)])
    assert isinstance(refused, DataError) and "at ids" in str(refused)


def test_the_loss_told_is_the_mean_over_examples() -> None:
    base = language_base_of(gpt2_lm())
    base.prepare("float64", "eager")
    data = hidden(choices(6))
    goal = targets(data)
    settings = replace(STEPS, optimizer="sgd", lr=1e-9, batch_size=6)
    each = ask(base, Fit(lora(base, 3), loss=WeakToStrong(goal, alpha=0.0), steps=2), data=data, head=False)
    (done,) = answers(base, [each], settings)
    (told,) = answers(base, [ask(base, Predict(lora(base, 3), "x"), data=data, head=False)])
    p = fitted(told).answer.logits.double().log_softmax(dim=1)
    assert fitted(done).answer.mean_loss == pytest.approx(
        -float(torch.where(goal > 0, goal * p, 0).sum()) / 6, rel=1e-6
    )
    assert done.answer.examples_seen == 12 and done.answer.steps_taken == 2


@pytest.mark.parametrize(
    ("network", "dtype", "batch_size", "form"),
    [
        *((gpt2_lm, "float32", 5, form.values[0]) for form in FORMS),
        (gpt2_lm, "float64", 3, {}),
        (llama_lm, "float32", 1, {}),
        (llama_lm, "bfloat16", 4, {"form": "entropy"}),
    ],
)
def test_company_changes_no_bit(network, dtype: str, batch_size: int, form) -> None:
    base = language_base_of(network())
    plan = replace(PLAIN, dtype=dtype)
    settings = replace(STEPS, batch_size=batch_size, dropout=0.1, clip=0.3)
    penalty = ProductDistance(lora(base, 8, "reference")["lora"], weight=0.3)
    asks = [
        taught(base, f"c{i}", rank, (11, 6, 9)[i % 3], steps=2 + i % 3, penalties=[penalty], **form)
        for i, rank in enumerate((2, 4, 16, 3))
    ]
    alone = answers(base, asks, settings, plan)
    for order, size in (([0, 1, 2, 3], 4), ([3, 1, 2, 0], 4), ([2, 0, 1, 3], 2)):
        done = answers(base, [asks[i] for i in order], settings, stacked(plan, size))
        assert all(identical(fitted(alone[i]), got) for i, got in zip(order, done, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_parts_of_a_mini_batch_change_rounding_alone(form, parts: int) -> None:
    base = language_base_of(gpt2_lm())
    asks = [taught(base, f"c{i}", count=9, **form) for i in range(2)]
    settings = replace(STEPS, batch_size=8)
    whole = answers(base, asks, settings)
    split = answers(base, asks, replace(settings, accumulation=parts), stacked(EXACT))
    for one, other in zip(whole, split, strict=True):
        assert farthest(tensors(fitted(one)), tensors(fitted(other))) < 1e-9


def test_only_a_threshold_among_pairs_needs_the_whole_mini_batch() -> None:
    pairs, longer = choices(8), choices(8).select([1, 3, 5, 7])  # of two and three options, and of three alone
    median, argmax = WeakToStrong(targets(pairs)), WeakToStrong(targets(pairs), hardening="argmax")
    assert needs_whole(median, pairs) and not needs_whole(median, longer) and not needs_whole(argmax, pairs)
    assert not needs_whole(WeakToStrong(targets(pairs), form="entropy"), pairs)
    assert not needs_whole(median, sequences(4)) and not needs_whole(median, texts(4))
    assert not needs_whole(median, choices(1)) and needs_whole(median, replace(texts(4), num_classes=2))


def test_recomputing_layers_changes_no_bit() -> None:
    base = language_base_of(llama_lm())
    each = taught(base)
    settings = replace(STEPS, dropout=0.2)
    (one,) = answers(base, [each], settings)
    (other,) = answers(base, [each], replace(settings, checkpointing=True))
    assert identical(fitted(one), fitted(other))


def test_labels_are_never_looked_at() -> None:
    base = language_base_of(gpt2_lm())
    data = choices(11)
    known, unknown = (answers(base, [taught(base, data=d)])[0] for d in (data, hidden(data)))
    assert identical(fitted(known), fitted(unknown))


def test_a_student_comes_to_answer_as_its_teacher() -> None:
    base = language_base_of(llama_lm())
    base.prepare("float64", "eager")
    data = choices(12)
    start, soft = lora(base, 4), targets(data)
    as_teacher = replace(data, stored_labels=soft.argmax(dim=1))
    request = Fit(start, loss=WeakToStrong(soft, alpha=0.0), steps=60)
    (done,) = answers(base, [ask(base, request, data=hidden(data), head=False)], replace(STEPS, batch_size=6))
    before, after = (
        fitted(answers(base, [ask(base, Evaluate(m, "x"), data=as_teacher, head=False)])[0]).answer
        for m in (start, fitted(done).answer.model)
    )
    assert after.accuracy > before.accuracy and after.loss < 0.5 * before.loss
    entropy = -float(torch.xlogy(soft, soft).sum(dim=1).mean())
    assert entropy < done.answer.mean_loss


def test_targets_that_are_none_are_refused_in_one_line() -> None:
    base = language_base_of(gpt2_lm())
    data = hidden(choices(4))
    good = targets(data)
    bad = [
        (good[:3], "targets (3, 3)"),
        (good[:, :2], "targets (4, 2)"),
        (good.log(), "row 0"),
        (good + torch.tensor([0.1, 0.0, 0.0]), "row 0"),
        (torch.full_like(good, 1 / 3), "row 0"),
        (torch.cat([good[:1], torch.tensor([[1.5, -0.5, 0.0]]), good[2:]]), "row 1"),
        (good.masked_fill(good == good[2, 1], torch.nan), "row 2"),
    ]
    for wrong, words in bad:
        (refused,) = answers(base, [ask(base, Fit(lora(base, 2), loss=WeakToStrong(wrong)), data=data, head=False)])
        assert isinstance(refused, DataError) and words in str(refused), refused
        assert "client client" in str(refused) and "\n" not in str(refused)
    spoken = ask(base, Fit(lora(base, 2), loss=WeakToStrong(good)), data=sequences(4), head=False)
    (refused,) = answers(base, [spoken])
    count = int(sequences(4).labelled.sum())
    assert isinstance(refused, DataError) and f"where the data have ({count}, {WORDS})" in str(refused)


def test_what_is_right_cannot_be_asked_of_questions_whose_answer_is_hidden() -> None:
    base = language_base_of(gpt2_lm())
    data = hidden(choices(4))
    with pytest.raises(DataError, match="not known"):
        data.answers()
    (refused,) = answers(base, [ask(base, Evaluate(lora(base, 2), "x"), data=data, head=False)])
    assert isinstance(refused, DataError) and "no labels" in str(refused)


def test_company_changes_no_bit_of_a_student_of_sequences() -> None:
    base = language_base_of(gpt2_lm())
    asks = []
    for name, count in (("a", 11), ("b", 6), ("c", 9)):
        data = sequences(count, name)
        fit = Fit(lora(base, 4, name), loss=WeakToStrong(by_token(data, name)), steps=3)
        asks.append(ask(base, fit, name, data, head=False))
    alone = answers(base, asks, plan=PLAIN)
    together = answers(base, asks[::-1], plan=stacked(PLAIN))[::-1]
    assert all(identical(fitted(one), other) for one, other in zip(alone, together, strict=True))
