"""Language models go on with prompts and choose by likelihood: as PEFT and a plain loop do, whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import answers
from reference.tokenisers import write_tokenizer
from training.small import gpt2_lm, llama_lm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import coterie
from coterie.adapters.peft_folder import load_peft, save_peft
from coterie.errors import DataError, ModelError

peft = pytest.importorskip("peft")

PROMPTS = ["the film is", "a", "why is the film very very bad", "", "one two "]
CHOICES = ["good", "bad", "very very good"]


def folder_of(make: Any, place: Path, **special: str) -> Path:
    """A base of which one knows when it ends, and an adapter for it that PEFT has written."""
    network = make()
    # Sampling, and more that would change greedy answers, as checkpoints recommend.
    network.generation_config = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=3.0)
    network.save_pretrained(place / "base")
    write_tokenizer(place / "base", **{"eos_token": "<end>", **special})
    targets = ["c_attn", "c_proj"] if make is gpt2_lm else ["q_proj", "down_proj"]
    asked = peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, target_modules=targets, init_lora_weights=False, fan_in_fan_out=make is gpt2_lm
    )
    torch.manual_seed(2)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(place / "base"), asked)
    adapted.save_pretrained(place / "adapter")
    return place


@pytest.fixture(scope="module", params=[gpt2_lm, llama_lm], ids=["gpt2", "llama"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(request.param, tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="module")
def predictor(place: Path) -> coterie.Predictor:
    return coterie.load(place / "adapter")


@pytest.fixture(scope="module")
def plain(place: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(place / "base", attn_implementation="eager")
    return peft.PeftModel.from_pretrained(base, str(place / "adapter")).eval()


@pytest.fixture(scope="module")
def tokenizer(place: Path) -> Any:
    return AutoTokenizer.from_pretrained(place / "base")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) or [tokenizer.eos_token_id]


@pytest.mark.parametrize("size", [1, 2, 32])
def test_greedy_answers_are_those_of_a_plain_loop(
    predictor: coterie.Predictor, plain: Any, tokenizer: Any, size: int
) -> None:
    expected = []
    for prompt in PROMPTS:
        found = answers.greedy(plain, ids_of(tokenizer, prompt), 9, tokenizer.eos_token_id)
        said = tokenizer.decode(found, skip_special_tokens=True)
        expected.append(said if prompt.endswith(" ") else said.removeprefix(" "))
    assert predictor.generate(PROMPTS, 9, batch_size=size) == expected
    assert len(set(expected)) > 1


def test_an_answer_ends_with_the_end_token(place: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    end = AutoTokenizer.from_pretrained(place / "base").eos_token_id
    # An output layer to which the end token is the likeliest everywhere.
    base.get_output_embeddings().weight.data[end] = 0
    for module in base.modules():
        if type(module).__name__ in ("LayerNorm", "LlamaRMSNorm"):
            module.weight.data.zero_()
    base.get_output_embeddings().weight.data.clamp_(max=0)
    if hasattr(base, "transformer"):
        base.transformer.ln_f.bias.data.fill_(1)
    base.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, eos_token="<end>")
    assert answers.greedy(base, [3, 4], 5, end) == [end]
    assert coterie.load(tmp_path).generate(["the film", "a"], 5) == ["", ""]


def test_a_long_prompt_loses_its_beginning(predictor: coterie.Predictor) -> None:
    seen = predictor.context
    assert seen == (40 if "h.0" in str(sorted(predictor.base.layers)) else 2048)
    long = "the film is good " * (seen // 4) + "why is it"
    tail = predictor.base.tokenizer.decode(ids_of(predictor.base.tokenizer, long)[-(seen - 5) :])
    assert predictor.generate([long], 5) == predictor.generate([tail], 5)
    with pytest.raises(ModelError, match=f"max_new_tokens is {seen}, but this model sees no more than {seen}"):
        predictor.generate(["a"], seen)
    with pytest.raises(DataError, match="at least 1"):
        predictor.generate(["a"], 0)


@pytest.mark.parametrize("score", ["sum", "mean"])
@pytest.mark.parametrize("size", [1, 4])
def test_scores_are_log_likelihoods_of_the_tokens_after_the_prompt(
    predictor: coterie.Predictor, plain: Any, tokenizer: Any, score: Any, size: int
) -> None:
    expected = []
    for prompt in PROMPTS:
        options = [choice if prompt[-1:] in ("", " ") else f" {choice}" for choice in CHOICES]
        tokens = [ids_of(tokenizer, option) for option in options]
        summed = [answers.log_likelihood(plain, ids_of(tokenizer, prompt), own) for own in tokens]
        expected.append([s / (len(own) if score == "mean" else 1) for s, own in zip(summed, tokens, strict=True)])
    found = predictor.choice_scores(PROMPTS, CHOICES, score=score, batch_size=size)
    assert torch.allclose(found, torch.tensor(expected), rtol=0, atol=1e-4)
    best = [CHOICES[place] for place in torch.tensor(expected).argmax(dim=1)]
    assert predictor.choose(PROMPTS, CHOICES, score=score, batch_size=size) == best


def test_every_prompt_may_have_choices_of_its_own(predictor: coterie.Predictor) -> None:
    own = [["good", "bad"], ["yes", "no", "one"]]
    scores = predictor.choice_scores(PROMPTS[:2], own)
    assert torch.isneginf(scores[0, 2]) and torch.isfinite(scores[1]).all()
    assert torch.allclose(scores[:1, :2], predictor.choice_scores(PROMPTS[:1], own[0]), rtol=0, atol=1e-5)
    chosen = predictor.choose(PROMPTS[:2], own)
    assert chosen[0] in own[0] and chosen[1] in own[1]
    with pytest.raises(DataError, match="5 prompts and 2 lists"):
        predictor.choose(PROMPTS, own)
    with pytest.raises(DataError, match="two at least"):
        predictor.choose(PROMPTS, ["good"])
    with pytest.raises(DataError, match="choices is one text"):
        predictor.choose(PROMPTS, "good")


def test_no_prompts_give_no_answers(predictor: coterie.Predictor) -> None:
    assert predictor.generate([], 8) == [] and predictor.choose([], CHOICES) == []


def test_a_language_model_has_no_classes(predictor: coterie.Predictor) -> None:
    assert predictor.is_language and predictor.labels == ()
    with pytest.raises(ModelError, match="use generate or choose"):
        predictor.predict(["a film"])


def test_an_adapter_written_here_is_the_same_as_that_of_peft(
    place: Path, predictor: coterie.Predictor, tmp_path: Path
) -> None:
    held = load_peft(place / "adapter")
    save_peft(
        tmp_path / "ours",
        held.adapter,
        base_name=str(place / "base"),
        head=None,
        task_type="CAUSAL_LM",
        fan_in_fan_out=bool(held.config["fan_in_fan_out"]),
    )
    found = coterie.load(tmp_path / "ours")
    assert torch.equal(found.choice_scores(PROMPTS, CHOICES), predictor.choice_scores(PROMPTS, CHOICES))


def test_a_whole_model_is_the_same_as_base_and_adapter(
    place: Path, plain: Any, predictor: coterie.Predictor, tmp_path: Path
) -> None:
    copy = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(place / "base"), str(place / "adapter")
    ).merge_and_unload()
    copy.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, eos_token="<end>")
    whole = coterie.load(tmp_path)
    assert whole.generate(PROMPTS, 6) == predictor.generate(PROMPTS, 6)
    found = whole.choice_scores(PROMPTS, CHOICES)
    assert torch.allclose(found, predictor.choice_scores(PROMPTS, CHOICES), rtol=0, atol=1e-4)


def test_without_an_end_token_there_is_no_generating(tmp_path: Path) -> None:
    folder_of(llama_lm, tmp_path)
    (tmp_path / "base/tokenizer_config.json").unlink()
    write_tokenizer(tmp_path / "base", pad_token="<pad>")
    with pytest.raises(ModelError, match="no end token"):
        coterie.load(tmp_path / "adapter").generate(["a"])
