"""The base model by the kind of task, quantised ones, and examples as tokens."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.decoders import raw_config, write_decoder, write_questions
from models.quantised import PackedLinear, quantised
from reference.tokenisers import tokenizer
from training.small import gpt2_lm, language_base_of, llama_lm, lora

from coterie.algorithms import METHODS
from coterie.data.sequences import ChoiceSet, SequenceSet
from coterie.data.tasks import Instructions, Questions, Task
from coterie.errors import ModelError
from coterie.experiments import bases
from coterie.experiments.bases import check_method, to_train_on, tokens
from coterie.experiments.build import build
from coterie.experiments.config import parse
from coterie.experiments.runs import run
from coterie.maths.keys import root_key
from coterie.models.loading import Base
from coterie.protocol import Evaluate, Gradient
from coterie.training.asks import Ask, Done, Plan

CHANGES = replace(METHODS["fedit"].traits, title="Patching", changes_base=True)

PATCHING = """
from dataclasses import replace
from coterie.algorithms import FedIT

class Patching(FedIT):
    traits = replace(FedIT.traits, title="Patching", changes_base=True)
"""


def quantised_base() -> Base:
    return language_base_of(quantised(llama_lm(), PackedLinear))


@pytest.mark.parametrize("network", [llama_lm, gpt2_lm])
def test_a_plain_base_takes_every_method(network: Any) -> None:
    base = language_base_of(network())
    check_method(CHANGES, base)
    assert base.quantised == []


def test_a_method_that_patches_is_refused_on_a_quantised_base_and_others_are_not() -> None:
    base = quantised_base()
    assert base.quantised == list(base.layers)
    check_method(METHODS["fedit"].traits, base)
    with pytest.raises(ModelError) as caught:
        check_method(CHANGES, base)
    told = str(caught.value)
    assert "Patching" in told and "model.layers.0.self_attn.q_proj is quantised (PackedLinear)" in told
    assert "model.quantization=null" in told and "\n" not in told


def test_the_refusal_comes_before_any_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "patching.py").write_text(PATCHING, encoding="utf-8")
    base = write_decoder(tmp_path / "llama", "llama")
    task = {"name": "choices-file", "path": str(write_questions(tmp_path / "q.jsonl"))}
    config = raw_config(base, "llama", task, method=f"{tmp_path}/patching.py:Patching")
    assert build(parse(config), Plan()).base.quantised == []
    made = quantised_base()
    made.tokenizer = tokenizer(eos_token="<end>")
    monkeypatch.setattr(bases, "load_language_base", lambda *_, **__: made)
    with pytest.raises(ModelError, match="Patching changes the base model's weights"):
        build(parse(config), Plan())


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
@pytest.mark.parametrize("name", ["choices-file", "choices"])
def test_quantising_without_its_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reviews_csv: Path, kind: str, name: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else real(name, *rest)
    )
    task = (
        {"name": "file", "path": str(reviews_csv)}
        if name == "choices"
        else {"name": name, "path": str(write_questions(tmp_path / "q.jsonl"))}
    )
    raw = raw_config(write_decoder(tmp_path / "llama", "llama"), "llama", task)
    raw["model"] |= {"quantization": kind}
    with pytest.raises(ModelError, match=f"quantization={kind} needs bitsandbytes; install with") as caught:
        build(parse(raw), Plan())
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
def test_a_quantised_base_is_trained_on_and_refuses_patches(tmp_path: Path, kind: str, quantization: str) -> None:
    pytest.importorskip("bitsandbytes")
    task = {"name": "choices-file", "path": str(write_questions(tmp_path / "q.jsonl"))}
    raw = raw_config(write_decoder(tmp_path / kind, kind, width=64), kind, task)
    raw["model"] |= {"quantization": quantization}
    result = run(raw, tmp_path / "r")
    first, last = (line["train"]["loss"] for line in result.metrics)
    assert last < first
    built = build(parse(raw), Plan())
    base, data = built.base, built.setting.sites["00"].data["train"]
    assert base.quantised == list(base.layers)
    with pytest.raises(ModelError, match="is quantised"):
        check_method(CHANGES, base)
    model = lora(base, 2, dtype=torch.float32)
    asked = (Gradient(model, "train"), Evaluate(model, "train"), Gradient(model, "train"))
    before, _, after = built.executor.answer([Ask("00", one, "base", None, data, root_key(0)) for one in asked])
    # An inference must not leave weights behind that gradients do not pass.
    assert isinstance(before, Done) and isinstance(after, Done)
    for name, value in before.answer.items():
        assert torch.equal(value, after.answer[name]) and bool(value.any())


def base_with_tokens() -> Base:
    base = language_base_of(llama_lm())
    base.tokenizer = tokenizer(eos_token="<end>")
    return base


def test_choices_follow_their_prompt_after_a_space() -> None:
    labels = np.array([1, 0])
    asked = Questions(("why", "is it\n"), (("no", "yes"), ("good", "bad")), labels, score="mean")
    base = base_with_tokens()
    made = tokens(Task("t", asked, asked, ("1", "2"), "", ()), asked, base, 16)
    assert isinstance(made, ChoiceSet) and made.score == "mean" and made.labels.tolist() == [1, 0]
    batch = made.sequences().batch(range(4), 16)["labels"]
    assert [base.tokenizer.decode(row[row >= 0]) for row in batch] == [" no", " yes", "good", "bad"]
    right = to_train_on(made)
    assert isinstance(right, SequenceSet) and len(right) == 2
    assert torch.equal(right.batch([0, 1], 16)["labels"], batch[[1, 2]])


def test_answers_that_are_too_long_are_cut_and_choices_are_refused() -> None:
    base = base_with_tokens()
    told = Instructions(("why", ""), ("very " * 20, "good"), np.zeros(2, dtype=np.int64))
    made = tokens(Task("t", told, told, ("all",), "", ()), told, base, 8)
    assert isinstance(made, SequenceSet) and to_train_on(made) is made and made.lengths.tolist()[0] == 8
    end = base.tokenizer.eos_token_id
    rows = made.batch([0, 1], 8)["labels"]
    assert end not in rows[0] and rows[1][rows[1] >= 0].tolist()[-1] == end
    asked = Questions(("why",), (("very " * 20, "no"),), np.zeros(1, dtype=np.int64))
    with pytest.raises(Exception, match="leaves no room for a prompt"):
        tokens(Task("t", asked, asked, ("1", "2"), "", ()), asked, base, 8)
