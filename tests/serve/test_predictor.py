"""Classes of texts: the numbers of PEFT, whatever the batch, in the order of the texts."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import answers
from reference.tokenisers import write_tokenizer
from torch import Tensor, nn
from toy import BAD, FILLER, GOOD
from training.small import bert, gpt2, llama
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import coterie
from coterie.errors import DataError, ModelError
from coterie.experiments.exports import export

peft = pytest.importorskip("peft")

TEXTS = ["a fine film", "dull", "the plot is clever and the cast is warm but " * 3, "it was weak", "so lovely a story"]
text_lists = st.lists(st.lists(st.sampled_from(GOOD + BAD + FILLER), min_size=1, max_size=20).map(" ".join), max_size=9)


def by_peft(base: Path, adapter: Path, texts: list[str], *, labels: int = 2, max_length: int = 12) -> Tensor:
    """The logits of transformers with PEFT, one text at a time."""
    network = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    adapted = peft.PeftModel.from_pretrained(network, str(adapter)).eval()
    return answers.logits(adapted, AutoTokenizer.from_pretrained(base), texts, None, max_length)


@pytest.mark.parametrize("client", [None, "00", "01"])
def test_a_run_gives_the_logits_of_peft(finished: Path, tiny_base: Path, client: str | None) -> None:
    predictor = coterie.load(finished, client=client)
    expected = by_peft(tiny_base, finished / "adapters" / ("global" if client is None else f"client-{client}"), TEXTS)
    found = predictor.logits(TEXTS)
    assert found.dtype == torch.float32 and torch.allclose(found, expected, rtol=0, atol=1e-5)
    assert predictor.predict(TEXTS) == [("bad", "good")[place] for place in expected.argmax(dim=1)]
    assert torch.allclose(predictor.probabilities(TEXTS), expected.softmax(dim=1), rtol=0, atol=1e-5)


def test_clients_and_the_global_model_differ(finished: Path) -> None:
    first, second, common = (coterie.load(finished, client=name).logits(TEXTS) for name in ("00", "01", None))
    assert not torch.allclose(first, second, atol=1e-4) and not torch.allclose(first, common, atol=1e-4)


def test_a_run_predicts_as_it_was_measured(finished: Path) -> None:
    from coterie.data import load_task
    from coterie.experiments.folders import read_config, read_lines
    from coterie.maths.keys import root_key

    config, _ = read_config(finished)
    task = load_task("file", seed_key=root_key(config.seed).fold("task"), path=config.task.path)
    test: Any = task.test
    found = coterie.load(finished).logits(test.texts, batch_size=7)
    labels = torch.from_numpy(test.labels)
    measured = read_lines(finished / "metrics.jsonl")[-1]["global"]["pooled"]
    assert float((found.argmax(dim=1) == labels).double().mean()) == measured["accuracy"]
    assert float(nn.functional.cross_entropy(found, labels)) == pytest.approx(measured["loss"], abs=1e-5)


@pytest.fixture(scope="module")
def predictor(finished: Path) -> coterie.Predictor:
    return coterie.load(finished)


@given(text_lists, st.integers(1, 12))
@settings(max_examples=25)
def test_neither_batch_size_nor_company_nor_order_changes_an_answer(
    predictor: coterie.Predictor, texts: list[str], size: int
) -> None:
    together = predictor.logits(texts, batch_size=size)
    assert together.shape == (len(texts), 2)
    alone = [predictor.logits([text]) for text in texts]
    assert torch.allclose(together, torch.cat([*alone, torch.empty(0, 2)]), rtol=0, atol=1e-5)
    backwards = predictor.logits(texts[::-1], batch_size=size)
    assert torch.allclose(together, backwards.flip(0), rtol=0, atol=1e-5)


def test_no_texts_give_no_answers(predictor: coterie.Predictor) -> None:
    assert predictor.predict([]) == [] and predictor.probabilities([]).shape == (0, 2)


def test_an_adapter_inside_a_run_is_cut_as_the_run_cut(finished: Path) -> None:
    predictor = coterie.load(finished / "adapters" / "client-01")
    assert predictor.max_length == 12
    assert torch.equal(predictor.logits(TEXTS), coterie.load(finished, client="01").logits(TEXTS))


@pytest.mark.parametrize("merged", [False, True])
def test_an_export_gives_the_logits_of_its_run(finished: Path, tmp_path: Path, merged: bool) -> None:
    export(finished, tmp_path / "out", client="01", merged=merged)
    found, run = coterie.load(tmp_path / "out"), coterie.load(finished, client="01")
    assert found.labels == run.labels == ("bad", "good")
    assert found.max_length == run.max_length == 12
    assert torch.allclose(found.logits(TEXTS), run.logits(TEXTS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_an_adapter_of_peft_itself_gives_its_logits(make: Any, tmp_path: Path) -> None:
    base = make()
    base.config.pad_token_id = None
    base.save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base", pad_token="<pad>", eos_token="<end>")
    targets = {bert: ["query", "dense"], gpt2: ["c_attn", "c_proj"], llama: ["q_proj", "down_proj"]}[make]
    asked = peft.LoraConfig(
        task_type="SEQ_CLS",
        r=3,
        lora_alpha=5,
        use_rslora=True,
        target_modules=targets,
        rank_pattern={targets[1]: 2},
        init_lora_weights=False,
        fan_in_fan_out=make is gpt2,
    )
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    network.config.pad_token_id = 0
    adapted = peft.get_peft_model(network, asked).eval()
    for name, value in adapted.named_parameters():
        if "modules_to_save" in name:
            value.data.normal_(generator=torch.Generator().manual_seed(1))
    adapted.save_pretrained(tmp_path / "adapter")
    predictor = coterie.load(tmp_path / "adapter")
    assert predictor.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    texts = ["the film is good", "why", "bad bad bad one two", "yes no"]
    expected = answers.logits(adapted, AutoTokenizer.from_pretrained(tmp_path / "base"), texts, None, 30)
    assert torch.allclose(predictor.logits(texts), expected, rtol=0, atol=1e-5)


def test_pairs_are_typed_as_the_tokeniser_types_them(finished: Path, tiny_base: Path) -> None:
    predictor = coterie.load(finished)
    network = AutoModelForSequenceClassification.from_pretrained(tiny_base, num_labels=2)
    adapted = peft.PeftModel.from_pretrained(network, str(finished / "adapters/global")).eval()
    pairs = TEXTS[::-1]
    expected = answers.logits(adapted, AutoTokenizer.from_pretrained(tiny_base), TEXTS, pairs, 12)
    assert torch.allclose(predictor.logits(TEXTS, pairs, batch_size=2), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(expected, predictor.logits(TEXTS), atol=1e-4)
    with pytest.raises(DataError, match="4 second texts"):
        predictor.predict(TEXTS, pairs[1:])


def test_white_space_round_a_text_is_dropped_as_in_training(predictor: coterie.Predictor) -> None:
    assert torch.equal(predictor.logits(["\n a fine film "]), predictor.logits(["a fine film"]))


def test_dtypes_agree_to_their_precision(finished: Path) -> None:
    plain = coterie.load(finished).logits(TEXTS)
    assert torch.allclose(coterie.load(finished, dtype="float64").logits(TEXTS), plain, rtol=0, atol=1e-5)
    half = coterie.load(finished, dtype=torch.bfloat16)
    assert half.base.dtype == torch.bfloat16
    assert torch.allclose(half.logits(TEXTS), plain, rtol=0, atol=0.1 * float(plain.abs().max()))
    with pytest.raises(ModelError, match="no dtype 'float'; did you mean"):
        coterie.load(finished, dtype="float")


@pytest.mark.parametrize(
    ("given", "told"),
    [("a fine film", "is one text; give a list"), (["fine", None], r"texts\[1\] is None"), ([1], r"texts\[0\] is 1")],
)
def test_what_is_no_list_of_texts_is_refused(predictor: coterie.Predictor, given: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        predictor.predict(given)


def test_a_classifier_neither_generates_nor_chooses(predictor: coterie.Predictor) -> None:
    for call in (predictor.generate, lambda texts: predictor.choose(texts, ["a", "b"])):
        with pytest.raises(ModelError, match="use predict"):
            call(["a film"])


def test_nothing_is_written(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    coterie.load(finished).predict(TEXTS)
    assert not list(tmp_path.iterdir())
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_peft_need_not_be_installed(finished: Path, reviews_csv: Path) -> None:
    with reviews_csv.open(encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)][:8]
    script = (
        "import sys; sys.modules['peft'] = None\n"
        "import coterie\n"
        f"for name in coterie.load({str(finished)!r}).predict({texts!r}): print(name)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.split() == coterie.load(finished).predict(texts)
