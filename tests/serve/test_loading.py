"""What a folder may hold, and one line with the way out for what it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from safetensors.torch import load_file, save_file
from training.small import bert, llama, llama_lm
from transformers import RobertaConfig, RobertaForSequenceClassification

import coterie
from coterie.adapters.peft_folder import CONFIG, load_peft, save_peft
from coterie.assets import ASSETS
from coterie.errors import CoterieError, ModelError
from coterie.experiments.exports import export

TEXTS = ["a fine film", "dull and weak"]


def told(*arguments: Any, **options: Any) -> str:
    """The one line with which loading is refused."""
    with pytest.raises(CoterieError) as caught:
        coterie.load(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(source: Path, target: Path, **settings: Any) -> Path:
    """A copy of an adapter with other settings in its configuration."""
    shutil.copytree(source, target)
    content = json.loads((target / CONFIG).read_text(encoding="utf-8"))
    (target / CONFIG).write_text(json.dumps(content | settings), encoding="utf-8")
    return target


@pytest.fixture
def adapter(finished: Path, tmp_path: Path) -> Path:
    """The global adapter by itself, away from its run."""
    export(finished, tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_folder_without_a_model_is_told(tmp_path: Path, finished: Path) -> None:
    assert "there is no folder" in told(tmp_path / "none")
    assert "holds no run, no adapter and no model" in told(tmp_path)
    shutil.copytree(finished, tmp_path / "first")
    shutil.copytree(finished, tmp_path / "second")
    assert told(tmp_path).endswith("choose one of the runs in it: first, second")


def test_a_run_is_told_by_what_it_lacks(finished: Path, alone: Path, tmp_path: Path) -> None:
    assert "has no global model; choose a client's" in told(alone)
    assert coterie.load(alone, client="01").predict(TEXTS)
    assert "there is no client '1'; did you mean '01'?" in told(finished, client="1")
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run/partition.json").unlink()
    assert "partition.json: cannot be read" in told(tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    assert "is not finished; coterie resume" in told(tmp_path / "run")


def test_only_a_run_has_clients(adapter: Path) -> None:
    assert "is no run, so there is no client '01'" in told(adapter, client="01")


def test_a_base_that_is_gone_is_named_with_the_way_out(adapter: Path, tiny_base: Path, tmp_path: Path) -> None:
    expected = coterie.load(adapter).logits(TEXTS)
    gone = changed(adapter, tmp_path / "gone", base_model_name_or_path="/elsewhere/tiny")
    line = told(gone)
    assert "its base model '/elsewhere/tiny' is not on this machine; give it as base=… (on the command line" in line
    assert torch.equal(coterie.load(gone, base=tiny_base).logits(TEXTS), expected)
    assert "there is no model folder 'nowhere'" in told(gone, base="nowhere")
    assert "does not say which base" in told(changed(adapter, tmp_path / "none", base_model_name_or_path=""))


def test_an_asset_is_found_by_its_name_and_by_its_folder_on_another_machine(
    adapter: Path, toy_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(toy_assets))
    expected = coterie.load(adapter).logits(TEXTS)  # the asset of this test is the same toy base
    for number, name in enumerate(("minilm", f"/home/another/.cache/coterie/{ASSETS['minilm'].key}")):
        moved = changed(adapter, tmp_path / str(number), base_model_name_or_path=name)
        assert torch.equal(coterie.load(moved).logits(TEXTS), expected)
    assert torch.equal(coterie.load(adapter, base="minilm").logits(TEXTS), expected)


def test_another_base_than_the_adapters_is_refused(adapter: Path, tmp_path: Path) -> None:
    wide = toy.write_base(tmp_path / "wide", hidden=48)
    line = told(adapter, base=wide)
    assert str(adapter) in line and str(wide) in line and "B" in line
    llama_lm().save_pretrained(tmp_path / "llama")
    for path in wide.glob("token*"):
        shutil.copy(path, tmp_path / "llama")
    assert "no linear layer is called" in told(adapter, base=tmp_path / "llama")


def test_a_head_of_another_kind_of_model_or_shape_is_refused(adapter: Path, tmp_path: Path) -> None:
    held = load_peft(adapter)
    assert held.head is not None

    def saved(name: str, head: dict[str, torch.Tensor]) -> Path:
        options: dict[str, Any] = {"base_name": held.base_name, "task_type": "SEQ_CLS", "label_names": held.labels}
        save_peft(tmp_path / name, held.adapter, head=head, **options)
        return tmp_path / name

    other = {"score.weight": held.head["classifier.weight"]}
    assert "classifier.bias is in the base alone" in told(saved("other", other))
    wide = {**held.head, "classifier.weight": torch.zeros(2, 33)}
    assert "classifier.weight is (2, 33), not (2, 32)" in told(saved("wide", wide))


def test_other_kinds_of_adapters_are_refused(adapter: Path, tmp_path: Path) -> None:
    for kind in ("TOKEN_CLS", "FEATURE_EXTRACTION"):
        assert f"{kind} is not served" in told(changed(adapter, tmp_path / kind, task_type=kind))
    line = told(changed(adapter, tmp_path / "lm", task_type="CAUSAL_LM"))
    assert "CAUSAL_LM with layers trained whole" in line
    held = load_peft(adapter)
    save_peft(tmp_path / "bare", held.adapter, base_name="x", head=None, task_type="CAUSAL_LM")
    bare = changed(tmp_path / "bare", tmp_path / "headless", task_type="SEQ_CLS")
    assert "SEQ_CLS with no head" in told(bare)


def test_an_adapter_without_a_task_type_is_taken_by_its_head(adapter: Path, tmp_path: Path) -> None:
    plain = changed(adapter, tmp_path / "plain", task_type=None, modules_to_save=["classifier"])
    assert torch.equal(coterie.load(plain).logits(TEXTS), coterie.load(adapter).logits(TEXTS))


def test_a_whole_model_needs_no_base_and_must_be_whole(finished: Path, tiny_base: Path, tmp_path: Path) -> None:
    export(finished, tmp_path / "whole", merged=True)
    assert "leave the base out" in told(tmp_path / "whole", base=tiny_base)
    assert "a model of no architecture is not served" in told(tiny_base)
    weights = load_file(tmp_path / "whole/model.safetensors")
    del weights["classifier.bias"]
    save_file(weights, tmp_path / "whole/model.safetensors", metadata={"format": "pt"})
    assert "classifier.bias is in the base alone" in told(tmp_path / "whole")
    (tmp_path / "whole/model.safetensors").write_bytes(b"x")
    assert "does not load" in told(tmp_path / "whole")
    (tmp_path / "whole/config.json").write_text("{", encoding="utf-8")
    assert "config.json" in told(tmp_path / "whole")


def test_a_whole_model_in_several_files_is_read(finished: Path, tmp_path: Path) -> None:
    export(finished, tmp_path / "whole", merged=True)
    from transformers import AutoModelForSequenceClassification

    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole")
    network.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    for path in (tmp_path / "whole").glob("token*"):
        shutil.copy(path, tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    found = coterie.load(tmp_path / "parts")
    assert torch.equal(found.logits(TEXTS), coterie.load(tmp_path / "whole").logits(TEXTS))
    assert found.labels == ("bad", "good")


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_classes_without_names_are_counted_in_the_head(tiny_base: Path, tmp_path: Path, rows: int) -> None:
    from coterie.serve.loading import _classes

    held = load_peft(
        save(tmp_path / "one", {"classifier.weight": torch.zeros(rows, 32), "classifier.bias": torch.zeros(rows)})
    )
    assert _classes(held) == rows
    two = {"classifier.dense.weight": torch.zeros(32, 32), "classifier.out_proj.weight": torch.zeros(rows, 32)}
    assert _classes(load_peft(save(tmp_path / "two", two))) == rows


def save(place: Path, head: dict[str, torch.Tensor]) -> Path:
    from coterie.protocol import LowRank

    save_peft(
        place,
        {"layer": LowRank(torch.zeros(4, 1), torch.zeros(1, 4), 1.0)},
        base_name="x",
        head=head,
        task_type="SEQ_CLS",
    )
    return place


def test_the_context_is_what_tokeniser_and_positions_allow(tiny_base: Path, tmp_path: Path) -> None:
    def context(network: Any, name: str) -> int:
        network.config.id2label = {0: "a", 1: "b", 2: "c"}
        network.save_pretrained(tmp_path / name)
        for path in tiny_base.glob("token*"):
            shutil.copy(path, tmp_path / name)
        return coterie.load(tmp_path / name).context

    assert context(bert(), "bert") == 40  # of 64 that the tokeniser says
    assert context(llama(), "llama") == 64  # of 2048 positions
    kin = RobertaConfig(
        vocab_size=90,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
        num_labels=3,
    )
    assert context(RobertaForSequenceClassification(kin), "roberta") == 22
    long = coterie.load(tmp_path / "roberta").logits(["a film " * 30])
    assert torch.isfinite(long).all()


def test_a_device_that_is_not_there_is_told(finished: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ModelError, match="device 'cuda' cannot be used"):
        coterie.load(finished, device="cuda")
