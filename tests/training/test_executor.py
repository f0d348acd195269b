"""What the executor answers besides Fit, and how it keeps asks apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from training.small import (
    CLASSES,
    EXACT,
    KEY,
    PLAIN,
    STEPS,
    answers,
    ask,
    base_of,
    bert,
    farthest,
    gpt2,
    identical,
    lora,
    stacked,
    texts,
)

from coterie.adapters.inject import Binding
from coterie.data.batches import plan
from coterie.errors import CoterieError, DataError, ModelError
from coterie.models.loading import Base
from coterie.protocol import (
    BaseLog,
    Calibrate,
    Dense,
    Evaluate,
    Fit,
    Gradient,
    Model,
    Predict,
    Weights,
)
from coterie.training.asks import Done
from coterie.training.executor import Executor

DATA = texts(30, "evaluation")


@pytest.fixture(scope="module")
def base() -> Base:
    return base_of()


def dense_network(model: Model):
    """The unwrapped float64 network with the model's products in its weights."""
    network = bert().eval().double()
    for layer, term in model["lora"].items():
        network.get_submodule(layer).weight.data += term.product()
    return network


def dense_outputs(base: Base, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n, C) and pooled features (n, d), one example at a time."""
    network = dense_network(model)
    for name, value in base.head.items():
        network.get_parameter(name).data.copy_(value)
    logits, pooled = [], []
    with torch.no_grad():
        for i in range(len(DATA)):
            batch = DATA.batch([i], int(DATA.lengths[i]))
            labels = batch.pop("labels")
            assert int(labels) == int(DATA.labels[i])
            logits.append(network(**batch).logits)
            pooled.append(network.bert(**batch).pooler_output)
    return torch.cat(logits), torch.cat(pooled)


def test_evaluation_is_the_mean_over_examples_one_by_one(base: Base) -> None:
    model = lora(base, 4)
    (done,) = answers(base, [ask(base, Evaluate(model, "test"), data=DATA)], plan=replace(EXACT, eval_batch_size=7))
    logits, _ = dense_outputs(base, model)
    assert done.answer.loss == pytest.approx(float(F.cross_entropy(logits, DATA.labels)), rel=1e-10)
    assert done.answer.accuracy == pytest.approx(float((logits.argmax(1) == DATA.labels).double().mean()))
    assert done.answer.examples == len(DATA)


def test_a_limit_takes_the_first_examples(base: Base) -> None:
    model = lora(base, 2)
    limited, first = answers(
        base,
        [
            ask(base, Evaluate(model, "test", limit=11), data=DATA),
            ask(base, Evaluate(model, "test"), data=DATA.select(range(11))),
        ],
    )
    assert limited.answer == first.answer and limited.answer.examples == 11


def test_the_model_that_was_trained_is_the_one_that_is_evaluated(base: Base) -> None:
    (fitted,) = answers(base, [ask(base, Fit(lora(base, 4), steps=40), data=DATA)], replace(STEPS, batch_size=8))
    trained = replace(ask(base, Evaluate(fitted.answer.model, "test"), data=DATA), head=fitted.head)
    before, after = answers(base, [ask(base, Evaluate(lora(base, 4), "test"), data=DATA), trained])
    assert after.answer.loss < before.answer.loss and after.answer.accuracy > before.answer.accuracy


def test_predictions_come_in_the_order_of_the_data_with_pooled_features(base: Base) -> None:
    model = lora(base, 4)
    (done,) = answers(
        base, [ask(base, Predict(model, "test", features=True), data=DATA)], plan=replace(EXACT, eval_batch_size=7)
    )
    logits, pooled = dense_outputs(base, model)
    assert torch.allclose(done.answer.logits.double(), logits, atol=1e-6)
    assert torch.allclose(done.answer.embeddings.double(), pooled, atol=1e-6)
    assert torch.equal(done.answer.labels, DATA.labels) and done.answer.ids is None


@pytest.mark.parametrize("k", [1, 2, CLASSES, CLASSES + 4])
def test_top_k_are_the_largest_logits_with_their_classes(base: Base, k: int) -> None:
    full, top = answers(base, [ask(base, Predict(lora(base, 4), "test", top_k=some), data=DATA) for some in (None, k)])
    kept = min(k, CLASSES)
    assert top.answer.logits.shape == (len(DATA), kept)
    assert torch.equal(torch.gather(full.answer.logits, 1, top.answer.ids), top.answer.logits)
    assert torch.equal(top.answer.logits, full.answer.logits.sort(dim=1, descending=True).values[:, :kept])


def test_a_decoder_is_evaluated_at_its_last_token_whatever_the_padding() -> None:
    base = base_of(gpt2(), ("c_attn",))
    one, many = (
        answers(
            base,
            [ask(base, Predict(lora(base, 2), "test", features=True), data=DATA)],
            plan=replace(EXACT, eval_batch_size=n),
        )[0]
        for n in (1, 30)
    )
    assert torch.allclose(one.answer.logits, many.answer.logits, atol=1e-6)
    assert one.answer.embeddings.shape == (len(DATA), 32)
    head = base.head["score.weight"]
    assert torch.allclose(many.answer.embeddings @ head.T, many.answer.logits, atol=1e-5)


def dense_gradient(base: Base, model: Model, indices) -> dict[str, torch.Tensor]:
    """By autograd through W0 + s B A."""
    network = bert().eval().double()
    for name, value in base.head.items():
        network.get_parameter(name).data.copy_(value)
    own = {name: value.clone().requires_grad_() for name, value in model.parameters.items()}
    weights = {
        f"{layer}.weight": network.get_parameter(f"{layer}.weight").detach()
        + term.scale * own[f"lora.{layer}.B"] @ own[f"lora.{layer}.A"]
        for layer, term in model["lora"].items()
    }
    batch = DATA.batch(indices, int(DATA.lengths.max()))
    labels = batch.pop("labels")
    loss = F.cross_entropy(torch.func.functional_call(network, weights, kwargs=batch).logits, labels)
    return dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))


def test_the_gradient_over_all_equals_autograd(base: Base) -> None:
    model = lora(base, 4)
    asked = ask(base, Gradient(model, "test"), data=DATA)
    (done,) = answers(base, [asked], plan=replace(EXACT, eval_batch_size=7))
    assert farthest(done.answer, dense_gradient(base, model, range(len(DATA)))) < 1e-12


def test_the_first_batch_gradient_is_that_of_the_coming_fit(base: Base) -> None:
    model, key = lora(base, 4), KEY.fold("coming")
    settings = replace(STEPS, optimizer="sgd", lr=1.0, clip=None, weight_decay=0.0)
    gradient, fitted = answers(
        base,
        [
            ask(base, Gradient(model, "train", batch="first"), data=DATA, key=key),
            ask(base, Fit(model, steps=1), data=DATA, key=key),
        ],
        settings,
    )
    first = plan(DATA.lengths, settings.batch_size, steps=1, key=key.fold("batches"))[0]
    assert farthest(gradient.answer, dense_gradient(base, model, first.indices)) < 1e-12
    moved = {name: model.parameters[name] - value for name, value in fitted.answer.model.parameters.items()}
    assert farthest(gradient.answer, moved) < 1e-12


def test_a_gradient_is_by_the_named_parameters_only(base: Base) -> None:
    (done,) = answers(base, [ask(base, Gradient(lora(base, 4), "test", wrt=("lora.*.B",)), data=DATA)])
    assert done.answer.keys() == {f"lora.{layer}.B" for layer in base.layers}


def test_calibration_is_the_gram_matrix_of_inputs_at_real_tokens() -> None:
    base = base_of(targets="all-linear")
    model = Model(lora={layer: term for layer, term in lora(base, 4)["lora"].items() if "query" in layer})
    (done,) = answers(base, [ask(base, Calibrate(model, "test"), data=DATA)], plan=replace(EXACT, eval_batch_size=7))
    network = dense_network(model)
    expected = {name: torch.zeros(layer.d_in, layer.d_in, dtype=torch.float64) for name, layer in base.layers.items()}

    def add(name: str):
        def hook(_, inputs) -> None:
            rows = inputs[0].reshape(-1, inputs[0].shape[-1])
            expected[name] += rows.T @ rows

        return hook

    for name in expected:
        network.get_submodule(name).register_forward_pre_hook(add(name))
    with torch.no_grad():
        for i in range(len(DATA)):
            batch = DATA.batch([i], int(DATA.lengths[i]))
            del batch["labels"]
            network(**batch)
    assert done.answer.keys() == expected.keys() and "bert.pooler.dense" in expected
    for name, gram in done.answer.items():
        assert torch.allclose(gram, expected[name], rtol=1e-10, atol=1e-9)


def test_weights_are_those_of_the_current_version_and_conv1d_is_turned() -> None:
    base = base_of(gpt2(), ("c_attn",))
    executor = Executor({"base": base}, STEPS, EXACT)
    names = tuple(base.layers)
    original = gpt2().double()
    patch = lora(base, 2, "patch")["lora"]
    for log, added in ((BaseLog(), 0), (BaseLog().add(patch), 1)):
        executor.set_base(log, "base")
        (done,) = executor.answer([replace(ask(base, Weights(names)), data=None)])
        for name in names:
            expected = original.get_submodule(name).weight.mT + added * patch[name].product()
            assert done.answer[name].shape == (96, 32) and torch.allclose(done.answer[name], expected, atol=1e-12)


def test_a_patched_base_is_what_everything_runs_on(base: Base) -> None:
    model = lora(base, 4)
    executor = Executor({"base": base_of()}, STEPS, EXACT)
    executor.set_base(BaseLog().add(model["lora"]), "base")
    (patched,) = executor.answer([ask(base, Evaluate(Model(), "test"), data=DATA)])
    (adapted,) = answers(base, [ask(base, Evaluate(model, "test"), data=DATA)])
    assert patched.answer.loss == pytest.approx(adapted.answer.loss, rel=1e-10)


def test_a_dense_term_is_evaluated_like_its_factors(base: Base) -> None:
    factors = lora(base, 4)
    dense = Model(delta={layer: Dense(term.product()) for layer, term in factors["lora"].items()})
    a, b = answers(base, [ask(base, Evaluate(model, "test"), data=DATA) for model in (factors, dense)])
    assert a.answer.loss == pytest.approx(b.answer.loss, rel=1e-10)


def test_answers_keep_the_order_of_asks_that_do_not_stack(base: Base) -> None:
    few = Model(lora=dict(list(lora(base, 4)["lora"].items())[:2]))
    asks = [
        ask(base, Fit(lora(base, 4, "a")), "a"),
        ask(base, Evaluate(lora(base, 2), "test"), "b", DATA),
        ask(base, Fit(few), "c"),
        ask(base, Fit(lora(base, 2, "d")), "d", head=False),
        ask(base, Fit(lora(base, 4, "e")), "e"),
    ]
    together = answers(base, asks, plan=stacked(EXACT, 3))
    apart = [answers(base, [each])[0] for each in asks]
    assert together[1].answer == apart[1].answer
    assert all(identical(together[i], apart[i]) for i in (0, 2, 3, 4))


def test_a_broken_request_in_a_stack_fails_alone(base: Base) -> None:
    odd = {f"{name}x": value for name, value in base.head.items()}
    good = ask(base, Fit(lora(base, 2)))
    broken = replace(good, party="odd", head=odd)
    bad, fine = answers(base, [broken, good], plan=stacked(EXACT))
    assert isinstance(bad, CoterieError) and isinstance(fine, Done)


@pytest.mark.parametrize(
    ("request_of", "kind", "message"),
    [
        (lambda base: Evaluate(Model(spec="other"), "test"), ModelError, "no base model 'other'"),
        (lambda base: Weights(("nowhere",)), ModelError, "'nowhere'"),
        (lambda base: Gradient(lora(base, 2), "test", wrt=("core.*",)), ModelError, "matches no parameter"),
    ],
)
def test_an_exception_in_one_ask_is_its_answer(base: Base, request_of, kind, message: str) -> None:
    bad, good = answers(base, [ask(base, request_of(base)), ask(base, Evaluate(Model(), "test"), data=DATA)])
    assert isinstance(bad, kind) and message in str(bad) and isinstance(good, Done)


def test_no_data_is_an_error_that_names_the_party(base: Base) -> None:
    empty, none = answers(
        base,
        [
            ask(base, Evaluate(Model(), "test"), "siteA", DATA.select([])),
            replace(ask(base, Predict(Model(), "u"), "siteB"), data=None),
        ],
    )
    assert isinstance(empty, DataError) and "siteA" in str(empty)
    assert isinstance(none, DataError) and "siteB" in str(none)


def test_two_executors_may_share_a_base_and_threads_are_pinned(base: Base) -> None:
    first, second = (Executor({"base": base}, STEPS, EXACT) for _ in range(2))
    assert torch.get_num_threads() == EXACT.threads
    each = ask(base, Fit(lora(base, 2)))
    assert identical(first.answer([each])[0], second.answer([each])[0])


def test_nothing_stays_bound_after_an_answer(base: Base) -> None:
    answers(base, [ask(base, Fit(lora(base, 2))), ask(base, Evaluate(lora(base, 2), "test"), data=DATA)])
    assert base.slots.binding == Binding()


def test_a_base_in_bfloat16_is_not_widened_again() -> None:
    base = base_of()
    Executor({"base": base}, STEPS, replace(PLAIN, dtype="bfloat16"))
    with pytest.raises(ModelError, match="load it again"):
        Executor({"base": base}, STEPS, EXACT)
