"""Options beside each other in one row: what a model says of them and learns from them is that of sequences alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from training.small import (
    EXACT,
    KEY,
    PLAIN,
    STEPS,
    WORDS,
    answers,
    ask,
    farthest,
    filled,
    gpt2_lm,
    identical,
    language_base_of,
    llama,
    llama_lm,
    lora,
    tensors,
)
from training.test_usage import routed
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from coterie.data.branches import branched
from coterie.data.sequences import ChoiceSet, SequenceSet
from coterie.models.language import takes_branches
from coterie.models.loading import Base, from_language_network, inputs_of
from coterie.protocol import Evaluate, Fit, Predict, UsageDivergence, WeakToStrong
from coterie.training.asks import Ask, Plan
from coterie.training.executor import Executor
from coterie.training.lower import rows_of

NETWORKS = [pytest.param(gpt2_lm, 1e-10, id="gpt2"), pytest.param(llama_lm, 1e-5, id="llama")]  # which norms in float32


def questions(count: int, name: str = "questions") -> ChoiceSet:
    """`count` questions of two, three or four options that follow one prompt; in every fifth one follows another."""
    parts: list[torch.Tensor] = []
    prompts: list[int] = []
    counts = [2 + number % 3 for number in range(count)]
    for number, options in enumerate(counts):
        key = KEY.fold(name, number)
        drawn = torch.from_numpy((1 + key.unit(60) * (WORDS - 1)).astype("int32"))
        size = 3 + number % 6
        for option in range(options):
            cut = 1 if number % 5 == 0 and option == 1 else 0
            parts.append(torch.cat([drawn[cut:size], drawn[20 + 5 * option :][: 1 + (number + option) % 4]]))
            prompts.append(size - cut)
    offsets = torch.tensor([0, *map(len, parts)]).cumsum(0)
    held = SequenceSet(torch.cat(parts), offsets, torch.tensor(prompts), torch.arange(len(parts)))
    labels = torch.tensor([number % options for number, options in enumerate(counts)])
    return ChoiceSet(held, torch.tensor([0, *counts]).cumsum(0), labels, torch.arange(count))


def single(base: Base, request, data: ChoiceSet, plan: Plan):
    (done,) = answers(base, [ask(base, request, data=data, head=False)], plan=plan)
    if isinstance(done, Exception):
        raise done
    return done.answer


def pair(network) -> tuple[Base, Base]:
    """The base as it is, which takes rows of options, and one that is asked option by option."""
    beside, alone = language_base_of(network()), language_base_of(network())
    assert beside.branches
    alone.branches = False
    return beside, alone


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("network", "tolerance"), NETWORKS)
@pytest.mark.parametrize("score", ["sum", "mean"])
def test_scores_of_options_are_those_of_each_alone(network, tolerance: float, attention: str, score: str) -> None:
    data = replace(questions(13), score=score).select([4, 0, 12, 5, 5, 7, 10, 1])
    found = []
    for base in pair(network):
        plan = replace(EXACT, eval_batch_size=7, attention=attention)
        scores = single(base, Predict(lora(base, 3), "test"), data, plan).logits
        found.append((scores, single(base, Evaluate(lora(base, 3), "test"), data, plan)))
    (beside, judged), (alone, expected) = found
    exists = torch.isfinite(alone)
    assert torch.equal(torch.isfinite(beside), exists) and not exists.all()
    assert torch.allclose(beside[exists], alone[exists], atol=max(tolerance, 1e-6), rtol=1e-6)
    assert judged.accuracy == expected.accuracy and judged.loss == pytest.approx(expected.loss, abs=10 * tolerance)


def student(base: Base, data: ChoiceSet, name: str = "student", **loss) -> Ask:
    counts = data.counts
    drawn = KEY.fold(name).normal((len(data), int(counts.max())), 1.0, torch.float64)
    targets = drawn.masked_fill(torch.arange(drawn.shape[1]) >= counts[:, None], -torch.inf).softmax(dim=1)
    fit = Fit(lora(base, 4, name), loss=WeakToStrong(targets, 0.5, **loss), steps=5)
    return ask(base, fit, name, replace(data, stored_labels=torch.full_like(data.stored_labels, -1)), head=False)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("buckets", [True, False])
@pytest.mark.parametrize("form", ["entropy", "confidence"])
@pytest.mark.parametrize(("network", "tolerance"), NETWORKS)
def test_a_student_is_that_of_options_alone(network, tolerance: float, form, buckets: bool, accumulation: int) -> None:
    # By plain gradient steps: AdamW makes whole steps of what is rounding alone.
    steps = replace(STEPS, optimizer="sgd", lr=0.1, buckets=buckets, accumulation=accumulation)
    beside, alone = (answers(base, [student(base, questions(13), form=form)], steps)[0] for base in pair(network))
    assert farthest(tensors(beside), tensors(alone)) < tolerance
    assert beside.answer.mean_loss == pytest.approx(alone.answer.mean_loss, abs=tolerance)


def test_a_student_with_a_penalty_on_routing_counts_every_option_s_tokens() -> None:
    beside, alone = pair(llama_lm)
    found = []
    for base in (beside, alone):
        made = student(base, questions(9))
        penalty = UsageDivergence(torch.full((3,), 1 / 3), 2.0)
        fit = replace(made.request, initial=routed(base), train=("experts.*",), penalties=(penalty,))
        found.append(answers(base, [replace(made, request=fit)], STEPS, PLAIN)[0])
    assert identical(*found)


def test_company_in_a_stack_changes_no_bit_of_a_student() -> None:
    base = language_base_of(gpt2_lm())
    asks = [student(base, questions(9, name), name) for name in ("one", "two", "three")]
    together = answers(base, asks, STEPS, replace(PLAIN, clients_per_step=3))
    for each, done in zip(asks, together, strict=True):
        assert identical(answers(base, [each], STEPS, PLAIN)[0], done)


def test_stored_activations_below_the_lowest_adapter_give_rows_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    network = llama(LlamaForCausalLM, layers=4)
    names = [name for name, _ in network.named_modules() if name.endswith("q_proj")]
    base = from_language_network(network, None, names[2:], attention="eager")
    assert base.branches
    data, model = questions(11), lora(base, 3)
    plain = single(base, Predict(model, "test"), data, PLAIN).logits
    executor = Executor({"base": base}, STEPS, replace(PLAIN, lower_memory=64, eval_batch_size=6))
    made = ask(base, Predict(model, "test"), "x", data, head=False)
    first = executor.answer([made])[0].answer.logits

    def computed(*_, **__) -> None:
        raise AssertionError("a row was computed again")

    monkeypatch.setattr("coterie.training.lower.lower_states", computed)
    assert torch.equal(executor.answer([made])[0].answer.logits, first)
    exists = torch.isfinite(plain)
    assert torch.allclose(first[exists], plain[exists], atol=1e-5)
    monkeypatch.undo()
    narrow, wide = (rows_of(inputs_of(base, branched(data).batch(range(11), size))) for size in (40, 48))
    assert len({row.key for row in narrow}) == 11 and narrow == wide


def mistral(**changes) -> nn.Module:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MistralConfig(vocab_size=WORDS, num_key_value_heads=2, head_dim=16, **shape, **changes)
    return filled(MistralForCausalLM(config)).eval()


def jamba() -> nn.Module:
    config = JambaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        num_experts=2,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=4,
        pad_token_id=0,
    )
    return filled(JambaForCausalLM(config)).eval()


def bloom() -> nn.Module:
    return filled(BloomForCausalLM(BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=2))).eval()


def test_rows_of_options_are_for_networks_whose_tokens_see_each_other_by_attention_to_all_before_alone() -> None:
    assert takes_branches(gpt2_lm().eval()) and takes_branches(llama_lm().eval())
    assert takes_branches(mistral(sliding_window=None))
    assert not takes_branches(mistral(sliding_window=8))  # a window
    assert not takes_branches(jamba())  # states
    assert not takes_branches(bloom())  # places in the row, not positions


@pytest.mark.parametrize("network", [gpt2_lm, llama_lm])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_is_told_in_any_precision(network, dtype: torch.dtype) -> None:
    assert takes_branches(network().eval().to(dtype))
