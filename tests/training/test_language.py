"""Language models: losses are those of a pass per token, and neither padding nor company moves them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference.token_losses import answers as answers_of
from reference.token_losses import next_token_logits, token_losses, with_products
from reference.training_loop import train_alone
from training.small import (
    EXACT,
    PLAIN,
    STEPS,
    WORDS,
    answers,
    ask,
    base_of,
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

from coterie.adapters.inject import Binding
from coterie.data.sequences import IGNORED, SequenceSet
from coterie.errors import DataError, ModelError
from coterie.models.loading import Base
from coterie.protocol import Calibrate, Evaluate, Fit, Gradient, Model, Predict, ProductDistance
from coterie.training.evaluation import choice_score
from coterie.training.objectives import labelled, row_losses
from coterie.training.probe import choose_plan

DATA = sequences(14, "evaluation")
# Llama's norms and rotary angles are computed in float32 whatever the dtype.
NETWORKS = [pytest.param(gpt2_lm, 1e-10, id="gpt2"), pytest.param(llama_lm, 1e-5, id="llama")]


def exact_base(network) -> Base:
    base = language_base_of(network())
    base.prepare("float64", "eager")
    return base


def single(base: Base, request, data=DATA, plan=EXACT):
    (done,) = answers(base, [ask(base, request, data=data, head=False)], plan=plan)
    if isinstance(done, Exception):
        raise done
    return done.answer


@pytest.mark.parametrize(("network", "tolerance"), NETWORKS)
def test_the_loss_of_each_sequence_is_the_sum_over_its_answer_token_by_token(network, tolerance: float) -> None:
    base = exact_base(network)
    model = lora(base, 3)
    expected = torch.stack([losses.sum() for losses in token_losses(with_products(network(), model), DATA)])
    with torch.no_grad(), base.slots.bound(1, Model.stack([model]), None):
        found = row_losses(base, DATA.batch(range(len(DATA)), 24))
    assert torch.allclose(found, expected, rtol=0, atol=tolerance)


def padded(data: SequenceSet, width: int, side: str) -> dict[str, torch.Tensor]:
    """The whole set; on the left with positions that count from each sequence's own first token."""
    batch = data.batch(range(len(data)), width)
    if side == "right":
        return batch
    shifts = (width - data.lengths).tolist()
    left = {
        name: torch.stack([row.roll(shift) for row, shift in zip(value, shifts, strict=True)])
        for name, value in batch.items()
    }
    return left | {"position_ids": (left["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)}


@pytest.mark.parametrize("network", [gpt2_lm, llama_lm])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_side_and_the_amount_of_padding_change_no_logit_no_loss_and_no_gradient(network, attention: str) -> None:
    base = language_base_of(network())
    base.prepare("float32", attention)
    model = Model.stack([lora(base, 3, dtype=torch.float32)])
    leaves = {name: value.requires_grad_() for name, value in model.parameters.items()}
    longest = int(DATA.lengths.max())
    results = []
    for side, width in (("right", longest), ("right", longest + 9), ("left", longest), ("left", longest + 9)):
        with base.slots.bound(1, model.with_parameters(leaves), None):
            batch = padded(DATA, width, side)
            found = labelled(base, batch)
            losses = row_losses(base, batch)
            grads = torch.autograd.grad(losses.mean(), list(leaves.values()))
        results.append((found.targets, found.logits, losses, *grads))
    for targets, *others in results[1:]:
        assert torch.equal(targets, results[0][0])
        for other, first in zip(others, results[0][1:], strict=True):
            assert torch.allclose(other, first, rtol=1e-5, atol=1e-5)


def test_the_token_that_fills_padding_changes_nothing() -> None:
    base = exact_base(gpt2_lm)
    one, other = (single(base, Evaluate(lora(base, 3), "test"), replace(DATA, pad_id=pad)) for pad in (0, WORDS - 1))
    assert one == other


def test_logits_are_computed_only_where_a_labelled_token_follows() -> None:
    base = exact_base(gpt2_lm)
    rows: list[int] = []
    handle = base.slots.output.base.register_forward_hook(lambda _, given, __: rows.append(given[0].shape[0]))
    with torch.no_grad(), base.slots.bound(2, None, None):
        labelled(base, DATA.batch(range(8), 20), clients=2)
    handle.remove()
    per_client = [int(DATA.select(part).labelled.sum()) for part in (range(4), range(4, 8))]
    assert rows == per_client and base.slots.binding == Binding()


def test_evaluation_is_the_mean_over_the_answers_tokens() -> None:
    base = exact_base(gpt2_lm)
    model = lora(base, 3)
    network = with_products(gpt2_lm(), model)
    losses = torch.cat(token_losses(network, DATA))
    best = torch.cat([logits.argmax(dim=1) for logits in next_token_logits(network, DATA)])
    score = single(base, Evaluate(model, "test"), plan=replace(EXACT, eval_batch_size=5))
    assert score.loss == pytest.approx(float(losses.mean()), rel=1e-10)
    assert score.accuracy == pytest.approx(float((best == torch.cat(answers_of(DATA))).double().mean()))
    assert score.examples == len(DATA)


def test_predictions_are_the_logits_of_the_answers_tokens_in_the_order_of_the_data() -> None:
    base = exact_base(gpt2_lm)
    model = lora(base, 3)
    plan = replace(EXACT, eval_batch_size=5)
    full = single(base, Predict(model, "test", features=True), plan=plan)
    expected = torch.cat(next_token_logits(with_products(gpt2_lm(), model), DATA))
    assert torch.allclose(full.logits.double(), expected, atol=1e-5)
    assert torch.equal(full.labels, torch.cat(answers_of(DATA)))
    table = base.network.get_input_embeddings().weight
    assert torch.allclose(full.embeddings.double() @ table.mT, expected, atol=1e-5)
    top = single(base, Predict(model, "test", top_k=4), plan=plan)
    assert torch.equal(top.logits, full.logits.sort(dim=1, descending=True).values[:, :4])
    assert torch.equal(torch.gather(full.logits, 1, top.ids), top.logits)


@pytest.mark.parametrize("which", ["first", "all"])
def test_gradients_are_of_the_mean_over_labelled_tokens(which: str) -> None:
    base = exact_base(gpt2_lm)
    model = lora(base, 3)
    grads = single(base, Gradient(model, "train", batch=which))
    (step,) = answers(
        base,
        [ask(base, Fit(model, steps=1), data=DATA, head=False)],
        replace(STEPS, optimizer="sgd", lr=1.0, clip=None, weight_decay=0.0, batch_size=4 if which == "first" else 14),
    )
    for name, value in model.parameters.items():
        assert torch.allclose(grads[name], value - step.answer.model.parameters[name], atol=1e-9), name


@pytest.mark.parametrize("network", [gpt2_lm, llama_lm])
def test_calibration_sees_every_token_of_prompt_and_answer(network) -> None:
    base = exact_base(network)
    grams = single(base, Calibrate(lora(base, 2), "train"), plan=replace(EXACT, eval_batch_size=5))
    alone = [single(base, Calibrate(lora(base, 2), "train"), DATA.select([i])) for i in range(len(DATA))]
    for name, gram in grams.items():
        assert torch.allclose(gram, sum(one[name] for one in alone), rtol=1e-5, atol=1e-5)


def cohort(base: Base, ranks=(2, 4, 16, 3), **fields):
    """Clients of unequal ranks, data, steps and answers' lengths."""
    return [
        ask(
            base,
            Fit(lora(base, rank, f"c{i}"), steps=3 + i, **fields),
            f"c{i}",
            sequences((22, 9, 17, 6)[i % 4], f"c{i}"),
            head=i % 2 == 0,
        )
        for i, rank in enumerate(ranks)
    ]


@pytest.mark.parametrize(("network", "tolerance"), [(gpt2_lm, 1e-10), (llama_lm, 1e-6)])
def test_a_stack_of_unequal_clients_equals_the_plain_loop_for_each(network, tolerance: float) -> None:
    base = language_base_of(network())
    settings = replace(STEPS, clip=0.5, warmup_steps=2, schedule="linear")
    asks = [replace(each, head=None) for each in cohort(base)]
    plain = network().eval().double()
    plain.config.use_cache = False
    for each, got in zip(asks, answers(base, asks, settings, stacked(EXACT)), strict=True):
        assert got.head is None
        assert farthest(tensors(got), train_alone(plain, {}, each, settings)) < tolerance


@pytest.mark.parametrize("network", [gpt2_lm, llama_lm])
@pytest.mark.parametrize(
    ("dtype", "attention", "batch_size"),
    [
        ("float32", "eager", 1),
        ("float32", "eager", 8),
        ("float64", "eager", 3),
        ("bfloat16", "eager", 8),
        ("float32", "sdpa", 8),
    ],
)
def test_company_changes_no_bit_at_one_padding_rank(network, dtype: str, attention: str, batch_size: int) -> None:
    base = language_base_of(network())
    plan = replace(PLAIN, dtype=dtype, attention=attention)
    settings = replace(STEPS, steps=3, batch_size=batch_size, dropout=0.1, clip=0.3)
    penalty = ProductDistance(lora(base, 8, "reference")["lora"], weight=0.3)
    asks = [replace(each, head=None) for each in cohort(base, (2, 4, 16, 3, 5), penalties=[penalty])]
    alone = answers(base, asks, settings, plan)
    for order, size in (([0, 1, 2, 3, 4], 5), ([4, 3, 2, 1, 0], 5), ([2, 0, 4, 1, 3], 2)):
        done = answers(base, [asks[i] for i in order], settings, stacked(plan, size))
        assert all(identical(alone[i], got) for i, got in zip(order, done, strict=True))


def test_training_lowers_the_loss_and_a_head_is_an_empty_one() -> None:
    base = language_base_of(llama_lm())
    assert base.head == {}
    each = ask(base, Fit(lora(base, 4, dtype=torch.float32), steps=60), data=sequences(40, "learn"))
    (done,) = answers(base, [each], replace(STEPS, batch_size=8), PLAIN)
    before = single(base, Evaluate(each.request.initial, "test"), each.data, PLAIN)
    after = single(base, Evaluate(done.answer.model, "test"), each.data, PLAIN)
    assert after.loss < 0.8 * before.loss and after.accuracy > before.accuracy and done.head == {}


def slow_scores(base: Base, model: Model, network, data, mean: bool) -> list[list[float]]:
    losses = iter(token_losses(with_products(network, model), data.sequences()))
    return [
        [-float(one.mean() if mean else one.sum()) for one in (next(losses) for _ in range(int(count)))]
        for count in data.counts
    ]


@pytest.mark.parametrize(("network", "tolerance"), NETWORKS)
@pytest.mark.parametrize("score", ["sum", "mean"])
def test_an_option_s_score_is_its_tokens_log_probability(network, tolerance: float, score: str) -> None:
    base = exact_base(network)
    model = lora(base, 3)
    data = replace(choices(7), score=score).select([5, 0, 3, 3, 6])
    slow = slow_scores(base, model, network(), data, score == "mean")
    found = single(base, Predict(model, "test"), data, replace(EXACT, eval_batch_size=4))
    # Predictions are float32.
    for row, expected in zip(found.logits.tolist(), slow, strict=True):
        assert row[: len(expected)] == pytest.approx(expected, rel=1e-6) and row[len(expected) :] in ([], [-torch.inf])
    assert torch.equal(found.labels, data.labels)
    result = single(base, Evaluate(model, "test"), data)
    right = [scores.index(max(scores)) == int(label) for scores, label in zip(slow, data.labels, strict=True)]
    gaps = [
        -float(torch.tensor(scores, dtype=torch.float64).log_softmax(0)[label])
        for scores, label in zip(slow, data.labels.tolist(), strict=True)
    ]
    assert result.accuracy == sum(right) / 5 and result.examples == 5
    assert result.loss == pytest.approx(sum(gaps) / 5, abs=10 * tolerance)


def test_of_equally_likely_options_the_first_is_the_answer() -> None:
    data = replace(choices(2), stored_labels=torch.tensor([0, 1]))
    tied = torch.tensor([[-1.0, -1.0, -torch.inf], [-3.0, -2.0, -2.0]], dtype=torch.float64)
    assert choice_score(tied, data).accuracy == 1.0
    assert choice_score(tied, replace(data, stored_labels=torch.tensor([1, 2]))).accuracy == 0.0


def test_options_are_trained_on_by_their_right_answers() -> None:
    base = language_base_of(gpt2_lm())
    data = choices(12)
    (refused,) = answers(base, [ask(base, Fit(lora(base, 4)), data=data)])
    assert isinstance(refused, DataError) and "client client" in str(refused) and "answers()" in str(refused)
    right = ask(base, Fit(lora(base, 4), steps=40), data=data.answers(), head=False)
    (done,) = answers(base, [right], replace(STEPS, batch_size=6))
    before, after = (single(base, Evaluate(m, "test"), data) for m in (lora(base, 4), done.answer.model))
    assert after.accuracy > before.accuracy and after.loss < before.loss


def test_data_of_the_wrong_kind_for_a_base_is_refused_in_one_line() -> None:
    language, classifier = language_base_of(gpt2_lm()), base_of()
    for base, data in ((language, texts(4)), (classifier, sequences(4)), (classifier, choices(4))):
        for request in (Fit(lora(base, 2)), Evaluate(lora(base, 2), "x"), Predict(lora(base, 2), "x")):
            (bad,) = answers(base, [ask(base, request, data=data)])
            assert isinstance(bad, ModelError) and "do not suit" in str(bad) and "\n" not in str(bad)
    (bad,) = answers(language, [ask(language, Predict(lora(language, 2), "x", features=True), data=choices(4))])
    assert isinstance(bad, DataError) and "features" in str(bad)


def test_a_plan_is_chosen_on_sequences_too() -> None:
    base = language_base_of(llama_lm())
    plan = choose_plan(base, sequences(20), STEPS, dtype="float32", attention="eager")
    assert plan.clients_per_step > 1 and base.dtype == torch.float32


def test_labels_cover_the_answer_alone() -> None:
    data = DATA.select([3, 1])
    batch = data.batch([0, 1], 20)
    for row, (prompt, answer) in enumerate(zip(data.prompts[data.rows].tolist(), answers_of(data), strict=True)):
        assert torch.equal(batch["labels"][row][prompt : prompt + len(answer)], answer)
        assert int((batch["labels"][row] != IGNORED).sum()) == len(answer)
        assert int(batch["attention_mask"][row].sum()) == prompt + len(answer)


def test_sequences_longer_than_a_batch_of_logits_may_be_are_scored_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    base = exact_base(gpt2_lm)
    model = lora(base, 3)
    expected = single(base, Evaluate(model, data="train")), single(base, Predict(model, data="train"))
    monkeypatch.setattr("coterie.training.evaluation._TOKENS", 4)  # fewer than a sequence has
    found = single(base, Evaluate(model, data="train")), single(base, Predict(model, data="train"))
    assert found[0].loss == pytest.approx(expected[0].loss, abs=1e-12)
    assert torch.allclose(found[1].logits, expected[1].logits)
