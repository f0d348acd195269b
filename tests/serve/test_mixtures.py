"""Models whose inputs share two adapters: written as two PEFT folders and a rule, served as they were measured."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from serve.conftest import settings
from serve.test_language import PROMPTS, folder_of
from training.small import llama_lm

import coterie
from coterie.adapters.mixture_folder import ANCHORS, RULE, load_mixture, save_mixture
from coterie.adapters.peft_folder import load_peft, save_peft
from coterie.data import load_task
from coterie.errors import ModelError
from coterie.experiments.exports import export
from coterie.experiments.folders import read_config, read_lines
from coterie.maths.keys import root_key
from coterie.protocol import Adapter, Mix, Model

TEXTS = ["a fine film", "dull", "the plot is clever and the cast is warm", "it was weak", "so lovely a story"]


@pytest.fixture(scope="module", params=["feddpa-f", "feddpa-t"])
def mixed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, reviews_csv: Path
) -> Path:
    """A finished run whose sites mix two adapters."""
    content = settings(tiny_base, reviews_csv, method=request.param, options={"lam": 0.9})
    return coterie.run(content, tmp_path_factory.mktemp("runs") / request.param).folder


def test_a_site_is_two_peft_folders_and_a_rule_and_the_server_one(mixed: Path) -> None:
    adapters = mixed / "adapters"
    assert load_peft(adapters / "global").adapter
    for name in ("client-00", "client-01", "client-02"):
        held = load_mixture(adapters / name)
        assert set(held.parts) == {"lora", "local"} and held.mix.weight == 0.9
        assert tuple(held.mix.anchors.shape) == (5, 32)
        assert (adapters / name / "lora" / "adapter_config.json").is_file()


def test_a_site_predicts_as_it_was_measured_in_the_run_and_out_of_an_export(mixed: Path, tmp_path: Path) -> None:
    config, _ = read_config(mixed)
    task = load_task("file", path=config.task.path, seed_key=root_key(config.seed).fold("task"))
    measured = read_lines(mixed / "metrics.jsonl")[-1]["personal"]["pooled"]
    test: Any = task.test
    labels, losses, right = torch.from_numpy(test.labels), [], []
    for name in ("00", "01", "02"):
        predictor = coterie.load(mixed, client=name)
        logits = predictor.logits(test.texts, batch_size=7)
        losses.append(float(F.cross_entropy(logits, labels)))
        right.append(float((logits.argmax(dim=1) == labels).double().mean()))
        export(mixed, tmp_path / name, client=name)
        assert torch.equal(coterie.load(tmp_path / name).logits(TEXTS), predictor.logits(TEXTS))
    assert sum(losses) / 3 == pytest.approx(measured["loss"], abs=1e-5)
    assert sum(right) / 3 == pytest.approx(measured["accuracy"])


def test_the_answers_are_the_two_adapters_in_each_texts_share(mixed: Path) -> None:
    """By one text at a time and by plain scales; PEFT's own sum of both in full is something else."""
    predictor = coterie.load(mixed, client="00")
    model = predictor.model
    found = predictor.logits(TEXTS)
    for place, text in enumerate(TEXTS):
        share = shares_of(predictor, text)
        scaled = {
            name: {layer: replace(term, scale=term.scale * part) for layer, term in model[name].items()}
            for name, part in (("lora", 1 - share), ("local", share))
        }
        alone = coterie.Predictor(
            predictor.base, Model(**scaled), predictor.head, predictor.labels, predictor.max_length, predictor.context
        )
        assert torch.allclose(alone.logits([text])[0], found[place], atol=1e-5)


def shares_of(predictor: coterie.Predictor, text: str) -> float:
    """lam * max(0, mean cosine) of one text, from a pass of the local adapter alone."""
    mix = predictor.model.mix
    assert mix is not None
    base = predictor.base
    tokens = base.tokenizer(text, truncation=True, max_length=predictor.max_length, return_tensors="pt")
    with torch.no_grad(), base.slots.bound(1, Model.stack([predictor.model.only("local")]), None) as binding:
        base.network(**tokens)
        assert binding.seen is not None
        alike = F.cosine_similarity(binding.seen, mix.anchors).mean()
    return float(mix.weight) * max(0.0, float(alike))


def test_merging_is_refused_and_so_is_a_damaged_rule(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="each input takes its own share of several adapters"):
        export(mixed, tmp_path / "merged", client="00", merged=True)
    export(mixed, tmp_path / "whole", client="00")
    for number, (name, content) in enumerate(
        ((RULE, b"{"), (RULE, json.dumps({"format": 2}).encode()), (ANCHORS, b"nothing"))
    ):
        place = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", place)
        (place / name).write_bytes(content)
        with pytest.raises(ModelError, match=r"mix\.json: cannot be read \(.+\); copy the folder again"):
            coterie.load(place)


def test_a_language_model_goes_on_with_each_prompt_in_its_own_share(tmp_path: Path) -> None:
    place = folder_of(llama_lm, tmp_path)
    held = load_peft(place / "adapter")
    far = {layer: replace(term, B=-term.B, A=term.A.flip(0)) for layer, term in held.adapter.items()}

    def write(folder: Path, adapter: Adapter) -> None:
        save_peft(folder, adapter, base_name=str(place / "base"), head=None, task_type="CAUSAL_LM")

    anchors = root_key(0).fold("anchors").normal((3, 32)).abs()
    save_mixture(tmp_path / "mixed", {"lora": far, "local": held.adapter}, Mix(anchors, 1.0), write)
    predictor = coterie.load(tmp_path / "mixed")
    prompts = [prompt for prompt in PROMPTS if prompt.strip()]
    together = predictor.generate(prompts, 6)
    for prompt, answer in zip(prompts, together, strict=True):
        share = shares_of_prompt(predictor, prompt)
        scaled = {
            name: {layer: replace(term, scale=term.scale * part) for layer, term in adapter.items()}
            for name, part, adapter in (("lora", 1 - share, far), ("local", share, held.adapter))
        }
        alone = coterie.Predictor(predictor.base, Model(**scaled), None, (), predictor.max_length, predictor.context)
        assert alone.generate([prompt], 6) == [answer]


def shares_of_prompt(predictor: coterie.Predictor, prompt: str) -> float:
    """lam * max(0, mean cosine) at the prompt's last token, from a pass of the local adapter alone."""
    mix = predictor.model.mix
    assert mix is not None
    base = predictor.base
    tokens = base.tokenizer(prompt, return_tensors="pt")["input_ids"]
    last = [torch.tensor([tokens.shape[1] - 1])]
    with torch.no_grad(), base.slots.bound(1, Model.stack([predictor.model.only("local")]), None) as binding:
        with base.slots.keeping(last):
            base.network(input_ids=tokens)
        assert binding.seen is not None
        alike = F.cosine_similarity(binding.seen, mix.anchors).mean()
    return float(mix.weight) * max(0.0, float(alike))
