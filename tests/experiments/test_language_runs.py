"""Language models from a configuration: what is trained on and scored, and what other tools make of the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.decoders import raw_config, write_answers, write_decoder, write_questions
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from coterie.adapters.peft_folder import load_peft
from coterie.data.sequences import ChoiceSet, SequenceSet
from coterie.errors import ModelError
from coterie.experiments.build import build
from coterie.experiments.config import parse
from coterie.experiments.exports import export
from coterie.experiments.folders import ADAPTERS, CONFIG
from coterie.experiments.runs import RunResult, resume, run
from coterie.protocol import Model
from coterie.training.asks import Plan

peft = pytest.importorskip("peft")

IDS = torch.arange(1, 25).reshape(3, 8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("decoders")
    return {kind: write_decoder(place / kind, kind) for kind in ("llama", "gpt2")}


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("questions") / "questions.jsonl")


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def choice_run(
    request: pytest.FixtureRequest, folders: dict[str, Path], questions: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunResult:
    task = {"name": "choices-file", "path": str(questions), "columns": {"group": "site"}}
    return run(raw_config(folders[request.param], request.param, task), tmp_path_factory.mktemp("runs") / "r")


@torch.no_grad()
def by_peft(folder: Path) -> Tensor:
    """Logits of the base with the adapter as PEFT loads both."""
    base = load_peft(folder).base_name
    network = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    logits: Tensor = peft.PeftModel.from_pretrained(network, str(folder)).eval()(input_ids=IDS).logits
    return logits


def test_training_is_on_the_right_answers_and_tests_are_of_all_choices(
    folders: dict[str, Path], questions: Path
) -> None:
    task = {"name": "choices-file", "path": str(questions), "columns": {"group": "site"}, "score": "mean"}
    config = parse(raw_config(folders["llama"], "llama", task, partition={"kind": "natural", "minimum": 5}))
    built = build(config, Plan())
    pooled = built.setting.pooled_test
    assert isinstance(pooled, ChoiceSet) and pooled.score == "mean" and len(pooled) == 24
    assert built.setting.heads == {"base": None} and built.setting.head == "frozen"
    for site in built.setting.sites.values():
        train, test = site.data["train"], site.data["test"]
        assert isinstance(train, SequenceSet) and isinstance(test, ChoiceSet)
        assert len(train) == site.card.examples and site.card.group in {"s0", "s1", "s2"}
        batch = train.batch(range(4), int(train.lengths.max()))
        told = {built.base.tokenizer.decode(row[row >= 0]) for row in batch["labels"]}
        assert told <= {" no", " yes very"}
    assert built.partition["classes"] == ["answer 1", "answer 2"]
    assert built.majority["pooled"] == pytest.approx(0.5, abs=0.05)


def test_a_choice_run_learns_and_is_scored_by_likelihood(choice_run: RunResult) -> None:
    first, last = choice_run.metrics
    assert last["train"]["loss"] < first["train"]["loss"] and not last["failed"]
    assert "head" not in last["bytes"] and last["global"]["pooled"]["examples"] == 24
    assert last["global"]["pooled"]["accuracy"] > 0.8 > choice_run.summary["majority"]["pooled"]
    assert set(last["personal"]["clients"]["accuracy"]) == {"00", "01", "02"}


@pytest.mark.parametrize("name", ["global", "client-00", "client-01"])
def test_peft_gives_the_logits_of_what_was_trained(choice_run: RunResult, name: str) -> None:
    folder = choice_run.folder / ADAPTERS / name
    held = load_peft(folder)
    conv = "gpt2" in choice_run.config.model.base
    assert held.task_type == "CAUSAL_LM" and held.head is None and held.labels is None
    assert held.config["fan_in_fan_out"] == conv and held.config["modules_to_save"] is None
    base = build(choice_run.config, Plan()).base
    with torch.no_grad(), base.slots.bound(1, Model.stack([Model(lora=held.adapter)]), None):
        here = base.network(input_ids=IDS).logits
    plain = AutoModelForCausalLM.from_pretrained(choice_run.config.model.base)(input_ids=IDS).logits
    assert torch.allclose(by_peft(folder), here, rtol=0, atol=1e-5)
    assert not torch.allclose(plain, here, rtol=0, atol=1e-2)


@torch.no_grad()
def test_a_merged_export_is_a_language_model_with_the_same_logits(choice_run: RunResult, tmp_path: Path) -> None:
    export(choice_run.folder, tmp_path / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    assert torch.allclose(merged(input_ids=IDS).logits, by_peft(choice_run.folder / ADAPTERS / "global"), atol=1e-4)
    assert merged.config.use_cache and not hasattr(merged, "score")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "<end>"


def test_an_exported_adapter_stays_one_of_a_language_model(choice_run: RunResult, tmp_path: Path) -> None:
    export(choice_run.folder, tmp_path / "out", client="01")
    assert load_peft(tmp_path / "out").task_type == "CAUSAL_LM"
    assert torch.equal(by_peft(tmp_path / "out"), by_peft(choice_run.folder / ADAPTERS / "client-01"))


def test_merging_into_what_the_run_quantised_is_refused(choice_run: RunResult, tmp_path: Path) -> None:
    place = choice_run.folder / CONFIG
    before = place.read_text(encoding="utf-8")
    place.write_text(before.replace("quantization: null", "quantization: 4bit"), encoding="utf-8")
    try:
        with pytest.raises(ModelError, match="never merge into a quantised base") as caught:
            export(choice_run.folder, tmp_path / "merged", merged=True)
    finally:
        place.write_text(before, encoding="utf-8")
    assert "\n" not in str(caught.value) and not (tmp_path / "merged").exists()


def test_a_language_run_is_resumed_bit_for_bit(choice_run: RunResult) -> None:
    before = (choice_run.folder / "metrics.jsonl").read_bytes()
    assert resume(choice_run.folder, round=1).metrics == choice_run.metrics
    assert (choice_run.folder / "metrics.jsonl").read_bytes() == before


def test_instructions_are_learnt_token_by_token(folders: dict[str, Path], tmp_path: Path) -> None:
    place = write_answers(tmp_path / "answers.jsonl")
    task = {"name": "instructions-file", "path": str(place), "columns": {"group": "site"}}
    natural = {"kind": "natural", "minimum": 5}
    result = run(
        raw_config(folders["llama"], "llama", task, method="fedit", partition=natural, clients={"count": 3}),
        tmp_path / "r",
    )
    first, last = result.metrics
    assert last["global"]["pooled"]["loss"] < first["global"]["pooled"]["loss"]
    # Two answers of one and two tokens, each with an end token.
    assert last["global"]["pooled"]["accuracy"] > 0.7 and last["global"]["pooled"]["examples"] == 24
    assert result.summary["majority"] == {"pooled": None, "own": None}
    assert result.summary["task"]["classes"] == ["s0", "s1", "s2"]
    config = json.loads((result.folder / ADAPTERS / "global" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_classes_are_learnt_by_a_decoder_without_a_padding_token(
    folders: dict[str, Path], reviews_csv: Path, tmp_path: Path, kind: str
) -> None:
    config = raw_config(folders[kind], kind, {"name": "file", "path": str(reviews_csv)}, rounds=1)
    result = run(config, tmp_path / "r")
    held = load_peft(result.folder / ADAPTERS / "global")
    assert held.task_type == "SEQ_CLS" and held.labels == ("bad", "good") and set(held.head or {}) == {"score.weight"}
    network = AutoModelForSequenceClassification.from_pretrained(folders[kind], num_labels=2, pad_token_id=0)
    loaded = peft.PeftModel.from_pretrained(network, str(result.folder / ADAPTERS / "global")).eval()
    base = build(result.config, Plan()).base
    head = {name: value[None] for name, value in (held.head or {}).items()}
    ids = torch.arange(1, 9)[None]
    with torch.no_grad(), base.slots.bound(1, Model.stack([Model(lora=held.adapter)]), head):
        assert torch.allclose(loaded(input_ids=ids).logits, base.network(input_ids=ids).logits, rtol=0, atol=1e-5)


def test_classes_are_learnt_as_choices(folders: dict[str, Path], reviews_csv: Path, tmp_path: Path) -> None:
    task = {"name": "choices:file", "path": str(reviews_csv), "template": "{text} is"}
    result = run(raw_config(folders["llama"], "llama", task, rounds=1), tmp_path / "r")
    assert result.summary["task"]["classes"] == ["bad", "good"] and not result.metrics[0]["failed"]


def test_an_encoder_is_refused_for_a_language_task(tiny_base: Path, questions: Path, tmp_path: Path) -> None:
    raw: dict[str, Any] = raw_config(tiny_base, "llama", {"name": "choices-file", "path": str(questions)})
    with pytest.raises(ModelError, match=r"task 'choices-file' \(choices\) needs a language model") as caught:
        run(raw, tmp_path / "r")
    assert "\n" not in str(caught.value) and not (tmp_path / "r").exists()


@pytest.mark.assets
def test_the_smallest_language_model_classifies_and_chooses(tmp_path: Path, questions: Path, reviews_csv: Path) -> None:
    pytest.importorskip("gguf")
    small = {
        "rounds": 1,
        "model": {"base": "smollm2", "targets": ["q_proj"], "max_length": 32},
        "clients": {"count": 2, "ranks": [1, 2]},
        "train": {"batch_size": 2, "steps": 1},
        "evaluate": {"objective_examples": 0, "pooled_limit": 4},
    }
    for name, path in (("file", reviews_csv), ("choices-file", questions)):
        task = {"name": name, "path": str(path), "train_limit": 24, "test_limit": 4}
        result = run(raw_config(Path(), "llama", task, **small), tmp_path / name)
        assert not result.metrics[0]["failed"] and result.metrics[0]["global"]["pooled"]["examples"] == 4


def test_unlabelled_questions_keep_all_their_choices_and_do_not_tell_which_is_right(
    folders: dict[str, Path], questions: Path
) -> None:
    task = {"name": "choices-file", "path": str(questions)}
    config = raw_config(folders["llama"], "llama", task, server_data={"public": 10, "unlabeled": 15})
    held = build(parse(config), Plan()).setting.server_data
    unlabelled = held["unlabeled"]
    assert isinstance(held["public/choices-file"], SequenceSet) and isinstance(unlabelled, ChoiceSet)
    assert len(unlabelled) == 15 and len(unlabelled.sequences()) == 30
    assert unlabelled.labels.tolist() == [-1] * 15 and set(unlabelled.stored_labels.tolist()) == {-1}
