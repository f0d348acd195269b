"""Local training: a stack is each client alone, and each client alone is the plain PyTorch loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference.training_loop import train_alone
from training.small import (
    EXACT,
    KEY,
    PLAIN,
    STEPS,
    answers,
    ask,
    base_of,
    bert,
    cohort,
    farthest,
    gpt2,
    groups,
    identical,
    llama,
    lora,
    stacked,
    stacks,
    tensors,
    texts,
)

from coterie.adapters.inject import eject
from coterie.errors import CoterieError, ModelError
from coterie.models.loading import Base
from coterie.protocol import Fit, LowRank, Model, ProductDistance
from coterie.training.asks import Done, TrainSettings

OPTIMIZERS = {
    "sgd": replace(STEPS, optimizer="sgd", lr=0.1),
    "momentum": replace(STEPS, optimizer="sgd", lr=0.1, momentum=0.9),
    "adam": replace(STEPS, optimizer="adam"),
    "adamw": STEPS,
}


@pytest.fixture(scope="module")
def base() -> Base:
    return base_of()


def reference_pair(base: Base, rank: int = 3) -> dict[str, LowRank]:
    return lora(base, rank, "reference")["lora"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_stack_of_unequal_clients_equals_the_plain_loop_for_each(base: Base, optimizer: str) -> None:
    settings = replace(OPTIMIZERS[optimizer], clip=0.5, warmup_steps=2, schedule="linear")
    penalty = ProductDistance(reference_pair(base), weight=0.3)
    asks = cohort(base, penalties=[penalty])
    done = answers(base, asks, settings, stacked(EXACT))
    network = bert().eval().double()
    for each, got in zip(asks, done, strict=True):
        assert farthest(tensors(got), train_alone(network, base.head, each, settings)) < 1e-10


# Llama's norms and rotary angles are computed in float32 whatever the dtype.
@pytest.mark.parametrize(("network", "tolerance"), [(gpt2, 1e-10), (llama, 1e-6)])
def test_a_decoder_equals_the_plain_loop(network, tolerance: float) -> None:
    targets = ("c_attn", "c_proj") if network is gpt2 else ("q_proj", "down_proj")
    base = base_of(network(), targets)
    asks = cohort(base, (2, 4))
    plain = network().eval().double()
    plain.config.use_cache = False
    for each, got in zip(asks, answers(base, asks, STEPS, stacked(EXACT)), strict=True):
        assert farthest(tensors(got), train_alone(plain, base.head, each, STEPS)) < tolerance


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_after_another_equals_all_at_once_without_a_common_padding_rank(base: Base, optimizer: str) -> None:
    settings = OPTIMIZERS[optimizer]
    free = replace(EXACT, padding_rank=0)
    alone, together = (answers(base, cohort(base), settings, stacked(free, n)) for n in (1, 16))
    assert max(farthest(tensors(a), tensors(b)) for a, b in zip(alone, together, strict=True)) < 1e-10


def test_one_after_another_equals_all_at_once_in_float32() -> None:
    base = base_of()
    free = replace(PLAIN, padding_rank=0)
    settings = OPTIMIZERS["sgd"]
    alone, together = (answers(base, cohort(base), settings, stacked(free, n)) for n in (1, 16))
    assert max(farthest(tensors(a), tensors(b)) for a, b in zip(alone, together, strict=True)) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "attention", "batch_size"),
    [
        *(("float32", "eager", size) for size in (1, 3, 8)),
        *(("float64", "eager", size) for size in (1, 3, 8)),
        *(("bfloat16", "eager", size) for size in (3, 8)),
        ("float32", "sdpa", 8),
    ],
)
def test_company_changes_no_bit_at_one_padding_rank(dtype: str, attention: str, batch_size: int) -> None:
    base = base_of()
    plan = replace(PLAIN, dtype=dtype, attention=attention)
    settings = replace(STEPS, steps=3, batch_size=batch_size, dropout=0.1, clip=0.3)
    penalty = ProductDistance(reference_pair(base, 8), weight=0.3)
    asks = cohort(base, (2, 4, 16, 3, 5), penalties=[penalty])
    alone = answers(base, asks, settings, plan)
    for order, size in (([0, 1, 2, 3, 4], 5), ([4, 3, 2, 1, 0], 5), ([2, 0, 4, 1, 3], 2), ([3, 1], 2)):
        with stacks() as seen:
            done = answers(base, [asks[i] for i in order], settings, stacked(plan, size))
        assert max(seen) == size
        assert all(identical(alone[i], got) for i, got in zip(order, done, strict=True))


def test_company_changes_no_bit_on_several_threads() -> None:
    base = base_of(bert(hidden_size=384, intermediate_size=1536, num_attention_heads=12))
    asks = [ask(base, Fit(lora(base, 4, f"c{i}", 0.5), steps=2), f"c{i}", texts(18, f"c{i}", 16, 17)) for i in range(3)]
    before = torch.get_num_threads()
    try:
        for size, company in ((5, 1), (6, 1), (8, 3), (9, 1)):
            settings = replace(STEPS, optimizer="sgd", batch_size=size)
            plan = replace(PLAIN, threads=2)
            alone = answers(base, asks, settings, plan)
            with groups() as seen, stacks() as whole:
                together = answers(base, asks, settings, stacked(plan))
            assert max(seen) == company and whole == [3]
            assert all(identical(one, other) for one, other in zip(alone, together, strict=True)), size
    finally:
        torch.set_num_threads(before)


def test_clients_that_train_different_parts_stack_and_do_not_notice(base: Base) -> None:
    asks = [
        ask(base, Fit(lora(base, 4, f"c{i}"), train=train, head=head, steps=4), f"c{i}")
        for i, (train, head) in enumerate([(("lora.*",), True), (("lora.*.B",), True), ((), True), (("*.A",), False)])
    ]
    alone = answers(base, asks)
    together = answers(base, asks, plan=stacked(EXACT))
    assert all(identical(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_no_pattern_names_comes_back_bit_for_bit(base: Base, optimizer: str) -> None:
    settings = replace(OPTIMIZERS[optimizer], weight_decay=0.1)
    model = lora(base, 4, dtype=torch.float32)
    frozen = ask(base, Fit(model, train=("lora.*.B",), head=False))
    free = ask(base, Fit(lora(base, 4, "other")), "other")
    done, _ = answers(base_of(), [frozen, free], settings, stacked(PLAIN))
    for name, value in done.answer.model.parameters.items():
        assert torch.equal(value, model.parameters[name]) == name.endswith(".A")
    assert all(torch.equal(value, base.head[name]) for name, value in done.head.items())


def test_the_base_is_never_changed(base: Base) -> None:
    before = {name: value.clone() for name, value in base.network.state_dict().items()}
    answers(base, cohort(base), replace(STEPS, lr=1.0))
    after = base.network.state_dict()
    assert all(torch.equal(value.double(), after[name].double()) for name, value in before.items())


def test_a_model_of_several_terms_trains_only_the_named_one(base: Base) -> None:
    both = Model(shared=lora(base, 2, "s")["lora"], lora=lora(base, 4)["lora"])
    (done,) = answers(base, [ask(base, Fit(both, train=("lora.*",)))])
    moved = {
        name for name, value in done.answer.model.parameters.items() if not torch.equal(value, both.parameters[name])
    }
    assert moved == {name for name in both.parameters if name.startswith("lora.")}


def test_a_frozen_term_counts_as_part_of_the_base(base: Base) -> None:
    shared = lora(base, 2, "s")["lora"]
    (done,) = answers(base, [ask(base, Fit(Model(shared=shared, lora=lora(base, 4)["lora"])))])
    patched = bert().eval().double()
    for layer, term in shared.items():
        patched.get_submodule(layer).weight.data += term.product()
    expected = train_alone(patched, base.head, ask(base, Fit(lora(base, 4))), STEPS)
    got = {name: value for name, value in tensors(done).items() if not name.startswith("shared.")}
    assert farthest(got, expected) < 1e-10


def test_a_learning_rate_factor_of_zero_freezes_and_of_two_doubles_an_sgd_step(base: Base) -> None:
    settings = replace(OPTIMIZERS["sgd"], clip=None, weight_decay=0.0)
    plain, scaled = answers(
        base,
        [
            ask(base, Fit(lora(base, 4), steps=1)),
            ask(base, Fit(lora(base, 4), steps=1, lr_scale={"lora.*.B": 2.0, "lora.*.A": 0.0, "head.*": 3.0})),
        ],
        settings,
    )
    start = {**lora(base, 4).parameters, **{f"head.{n}": v.double() for n, v in base.head.items()}}
    for name, value in start.items():
        factor = 3.0 if name.startswith("head.") else 2.0 if name.endswith(".B") else 0.0
        once, more = tensors(plain)[name] - value, tensors(scaled)[name] - value
        assert torch.allclose(more.double(), factor * once.double(), rtol=1e-6, atol=1e-7)


def test_a_client_that_diverges_is_named_and_the_others_do_not_notice(base: Base) -> None:
    asks = cohort(base, (4, 4, 4))
    sick = lora(base, 4, "sick")
    next(iter(sick["lora"].values())).A[0, 0] = float("nan")
    with_sick = [asks[0], ask(base, Fit(sick), "sick"), *asks[1:]]
    healthy = answers(base, asks, plan=stacked(EXACT))
    one, bad, *rest = answers(base, with_sick, plan=stacked(EXACT))
    assert isinstance(bad, CoterieError) and "client sick" in str(bad) and "step 1 of 5" in str(bad)
    assert all(identical(a, b) for a, b in zip(healthy, [one, *rest], strict=True))


def test_a_learning_rate_that_explodes_is_reported_with_its_step(base: Base) -> None:
    (bad,) = answers(
        base, [ask(base, Fit(lora(base, 4)))], TrainSettings(optimizer="sgd", lr=1e200, clip=None, steps=6)
    )
    assert isinstance(bad, CoterieError) and "lower lr" in str(bad)


def test_a_finished_client_gets_no_penalty_and_no_decay(base: Base) -> None:
    penalty = ProductDistance(reference_pair(base), weight=5.0)
    short = ask(base, Fit(lora(base, 4, "a"), steps=1, penalties=[penalty]), "a")
    long = ask(base, Fit(lora(base, 4, "b"), steps=9, penalties=[penalty]), "b")
    (alone,) = answers(base, [short])
    together, _ = answers(base, [short, long], plan=stacked(EXACT))
    assert identical(alone, together) and together.answer.steps_taken == 1


def test_penalties_are_reported_at_start_and_end(base: Base) -> None:
    reference = reference_pair(base)
    model = lora(base, 4)
    (done,) = answers(base, [ask(base, Fit(model, penalties=[ProductDistance(reference, weight=0.5)]))])

    def dense(at: Model) -> float:
        gaps = [(at["lora"][n].unscaled_product() - reference[n].unscaled_product()).square().sum() for n in reference]
        return 0.5 * float(sum(gaps))

    assert done.answer.penalty_before == pytest.approx(dense(model), rel=1e-9)
    assert done.answer.penalty_after == pytest.approx(dense(done.answer.model), rel=1e-9)


def test_a_large_penalty_pulls_the_product_to_its_reference(base: Base) -> None:
    penalty = ProductDistance(reference_pair(base, 2), weight=20.0)
    (done,) = answers(base, [ask(base, Fit(lora(base, 4), steps=60, penalties=[penalty]))])
    assert done.answer.penalty_after < 0.02 * done.answer.penalty_before


def test_dropout_changes_training_and_no_dropout_generator_moves_without_it(base: Base) -> None:
    each = ask(base, Fit(lora(base, 4)))
    (without,) = answers(base, [each])
    (some,) = answers(base, [each], replace(STEPS, dropout=0.3))
    (again,) = answers(base, [each], replace(STEPS, dropout=0.3))
    assert identical(some, again) and farthest(tensors(without), tensors(some)) > 1e-4


def test_results_do_not_depend_on_the_global_generator(base: Base) -> None:
    asks, settings = cohort(base), replace(STEPS, dropout=0.2)
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        runs.append(answers(base, asks, settings, stacked(EXACT)))
        left = torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(left, torch.rand(1)), "training drew from the global generator"
    assert all(identical(a, b) for a, b in zip(*runs, strict=True))


def test_steps_and_epochs_of_a_fit_override_the_settings(base: Base) -> None:
    data = texts(10, "ten")
    by_steps, by_epochs, plain = answers(
        base, [ask(base, Fit(lora(base, 2), **work), data=data) for work in ({"steps": 2}, {"epochs": 2}, {})]
    )
    assert (by_steps.answer.steps_taken, by_steps.answer.examples_seen) == (2, 8)
    assert (by_epochs.answer.steps_taken, by_epochs.answer.examples_seen) == (6, 20)
    assert plain.answer.steps_taken == STEPS.steps


def test_training_lowers_the_loss_in_bfloat16_too() -> None:
    base = base_of()
    each = ask(base, Fit(lora(base, 4, dtype=torch.float32), steps=60), data=texts(40, "learn"))
    settings = replace(STEPS, batch_size=8)
    plan = replace(PLAIN, dtype="bfloat16")
    (first,) = answers(base, [replace(each, request=replace(each.request, steps=5))], settings, plan)
    (long,) = answers(base, [each], settings, plan)
    assert long.answer.mean_loss < 0.8 * first.answer.mean_loss
    assert all(value.dtype == torch.float32 for value in long.answer.model.parameters.values())


def test_the_model_comes_back_in_its_own_rank_and_dtype_with_its_scale() -> None:
    base = base_of()
    model = lora(base, 3, dtype=torch.float32, scale=0.7)
    (done,) = answers(base, [ask(base, Fit(model))], plan=PLAIN)
    for layer, term in done.answer.model["lora"].items():
        assert (term.rank, term.scale, term.B.dtype) == (3, 0.7, torch.float32)
        assert term.B.shape == model["lora"][layer].B.shape and not term.B.requires_grad


def test_without_a_head_of_its_own_a_client_trains_under_the_frozen_first_head(base: Base) -> None:
    (done,) = answers(base, [ask(base, Fit(lora(base, 4)), head=False)])
    frozen = ask(base, Fit(lora(base, 4), head=False))
    (with_head,) = answers(base, [frozen])
    assert done.head is None
    assert farthest(done.answer.model.parameters, with_head.answer.model.parameters) == 0


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        (lambda base: Fit(lora(base, 2), train=("lara.*",)), "matches no parameter"),
        (lambda base: Fit(Model(), train=(), head=False), "trains nothing"),
        (lambda base: Fit(Model(lora={"nowhere": LowRank(torch.ones(2, 1), torch.ones(1, 2))})), "no adapted layer"),
        (
            lambda base: Fit(Model(lora={next(iter(base.layers)): LowRank(torch.ones(2, 1), torch.ones(1, 2))})),
            "do not fit a layer of 32 x 32",
        ),
    ],
)
def test_a_request_that_cannot_be_is_answered_by_a_one_line_error(base: Base, request_of, message: str) -> None:
    bad, good = answers(base, [ask(base, request_of(base)), ask(base, Fit(lora(base, 2)))])
    assert isinstance(bad, ModelError) and message in str(bad) and "\n" not in str(bad)
    assert isinstance(good, Done)


def test_no_examples_is_an_error_that_names_the_client(base: Base) -> None:
    (bad,) = answers(base, [ask(base, Fit(lora(base, 2)), "empty", texts(5).select(np.array([], dtype=np.int64)))])
    assert isinstance(bad, CoterieError) and "client empty" in str(bad)


def test_eject_restores_the_very_modules_after_training() -> None:
    network = bert()
    before = dict(network.named_modules())
    base = base_of(network)
    answers(base, [ask(base, Fit(lora(base, 2)))], plan=PLAIN)
    eject(network)
    after = dict(network.named_modules())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)


def test_the_key_alone_decides_the_batches(base: Base) -> None:
    each = ask(base, Fit(lora(base, 2), steps=2))
    same, other = answers(base, [each, replace(each, key=KEY.fold("another"))])
    (again,) = answers(base, [each])
    assert identical(same, again) and not identical(same, other)
