"""Compressed models on disk: the same logits after loading, shared tensors once, damaged folders refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compress.worlds import frozen, windows
from experiments.decoders import write_decoder
from reference.tokenisers import tokenizer
from safetensors.torch import load_file, save_file
from torch import nn
from toy import write_base
from training.small import bert, gpt2_lm, llama_lm

from coterie.adapters.inject import eject
from coterie.compress import METHODS, QSVD, SVDLLM, FactoredLinear, cut, rank_layers
from coterie.compress.folder import CONFIG, WEIGHTS, Notes, is_compressed, read_notes, save
from coterie.compress.network import layers_in_blocks
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.models.loading import load_base, load_language_base, load_whole
from coterie.models.targets import select_layers

TEXT = windows(4, 9)


def compressed_to(place: Path, network: nn.Module, name: str = "svd-llm", ratio: float = 0.6) -> nn.Module:
    names = list(layers_in_blocks(network, list(select_layers(network, "all-linear"))))
    method = METHODS[name]()
    made = cut(network, rank_layers(network, names, method, TEXT, ratio), method, ratio)
    save(place, network, tokenizer(eos_token="<end>"), Notes(name, ratio, made.ranks, made.shared))
    return network


def logits(network: nn.Module) -> torch.Tensor:
    network.set_attn_implementation("eager")
    with torch.no_grad():
        return network(input_ids=TEXT).logits


@pytest.mark.parametrize("make", [llama_lm, gpt2_lm])
@pytest.mark.parametrize("name", ["svd-llm", "qsvd"])
def test_a_decoder_loads_again_with_the_same_bits(tmp_path: Path, make, name: str) -> None:
    network = compressed_to(tmp_path / "small", frozen(make()), name)
    base = load_language_base(tmp_path / "small", targets="all-linear")
    assert base.layers and all(layer.inner for layer in base.layers.values())
    eject(base.network)
    assert type(base.network) is type(network)
    before, after = network.state_dict(), base.network.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.allclose(logits(base.network), logits(network), atol=1e-5)
    again = load_language_base(tmp_path / "small", targets=list(base.layers)[:1])
    assert again.digest == base.digest


def test_tied_embeddings_and_a_shared_v_are_stored_once_and_shared_again(tmp_path: Path) -> None:
    network = compressed_to(tmp_path / "small", frozen(gpt2_lm()), "qsvd")
    stored = load_file(tmp_path / "small" / WEIGHTS)
    assert sum(value.numel() for value in stored.values()) == sum(value.numel() for value in network.parameters())
    compressed_to(tmp_path / "llama", frozen(llama_lm()), "qsvd")
    stored = load_file(tmp_path / "llama" / WEIGHTS)
    assert "model.layers.0.self_attn.q_proj.V" in stored and "model.layers.0.self_attn.k_proj.V" not in stored
    loaded, _ = load_whole(tmp_path / "llama")
    q, k = (loaded.get_submodule(f"model.layers.0.self_attn.{part}_proj") for part in "qk")
    assert q.V is k.V and q.U is not k.U


def test_an_encoder_without_a_head_becomes_a_classifier(tmp_path: Path) -> None:
    network, words = load_whole(write_base(tmp_path / "base"))
    assert type(network).__name__ == "BertModel"
    names = list(layers_in_blocks(network, list(select_layers(network, "all-linear"))))
    made = cut(network, rank_layers(network, names, SVDLLM(), TEXT, 0.6), SVDLLM(), 0.6)
    save(tmp_path / "small", network, words, Notes("svd-llm", 0.6, made.ranks, made.shared))
    base = load_base(tmp_path / "small", targets=["query", "value"], num_labels=3, head_key=root_key(1))
    assert {layer.inner for layer in base.layers.values()} == {9} and set(base.head) == {
        "classifier.weight",
        "classifier.bias",
    }
    with torch.no_grad():
        base.network.set_attn_implementation("eager")
        network.set_attn_implementation("eager")
        assert torch.equal(base.network.bert(input_ids=TEXT)[0], network(input_ids=TEXT)[0])


def test_a_classifier_keeps_its_head_and_a_decoder_may_become_one(tmp_path: Path) -> None:
    network = compressed_to(tmp_path / "classifier", frozen(bert()))
    loaded, _ = load_whole(tmp_path / "classifier")
    assert torch.equal(logits(loaded), logits(network))
    compressed_to(tmp_path / "decoder", frozen(llama_lm()))
    base = load_base(tmp_path / "decoder", targets=["q_proj"], num_labels=3, head_key=root_key(1))
    assert type(base.network).__name__ == "LlamaForSequenceClassification" and set(base.head) == {"score.weight"}
    assert isinstance(base.slots.layers["model.layers.0.self_attn.q_proj"].base, FactoredLinear)


def test_factors_load_in_another_dtype(tmp_path: Path) -> None:
    compressed_to(tmp_path / "small", frozen(llama_lm()))
    base = load_language_base(tmp_path / "small", targets="all-linear", dtype="bfloat16")
    assert {slot.base.V.dtype for slot in base.slots.layers.values()} == {torch.bfloat16}


def test_a_written_decoder_keeps_its_settings(tmp_path: Path) -> None:
    source = write_decoder(tmp_path / "base", "llama")
    network, words = load_whole(source)
    names = list(select_layers(network, ["down_proj"]))
    made = cut(network, rank_layers(network, names, SVDLLM(), TEXT, 0.5), SVDLLM(), 0.5)
    save(tmp_path / "small", network, words, Notes("svd-llm", 0.5, made.ranks))
    before, after = (json.loads((place / "config.json").read_text()) for place in (source, tmp_path / "small"))
    assert before == after
    assert read_notes(tmp_path / "small").ranks == made.ranks and is_compressed(tmp_path / "small")
    assert not list(tmp_path.glob(".*"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    compressed_to(tmp_path / "small", frozen(llama_lm()))
    return tmp_path / "small"


def refusal(place: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_language_base(place, targets="all-linear")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_is_there_is_never_written_into(small: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in small.iterdir()}
    with pytest.raises(ModelError, match="is there already"):
        save(small, frozen(llama_lm()), tokenizer(eos_token="<end>"), Notes("svd", 0.5, {}))
    assert {path.name: path.stat().st_mtime_ns for path in small.iterdir()} == before


def test_damaged_notes_and_other_formats_are_told_in_one_line(small: Path) -> None:
    content = json.loads((small / CONFIG).read_text())
    (small / CONFIG).write_text("{")
    assert "compression.json is damaged" in refusal(small)
    (small / CONFIG).write_text(json.dumps(content | {"format": 2}))
    assert "later format" in refusal(small)
    (small / CONFIG).write_text(json.dumps(content | {"ranks": {"model.layers.0.mlp.down_proj": 0}}))
    assert "is damaged" in refusal(small)


def test_ranks_and_layers_that_the_weights_do_not_have_are_refused(small: Path) -> None:
    content = json.loads((small / CONFIG).read_text())
    layer = "model.layers.0.mlp.down_proj"
    (small / CONFIG).write_text(json.dumps(content | {"ranks": content["ranks"] | {layer: 3}}))
    assert f"lack {layer}." in refusal(small) and "of the noted rank" in refusal(small)
    (small / CONFIG).write_text(json.dumps(content | {"ranks": content["ranks"] | {"model.layers.9.up": 3}}))
    assert "has no layer model.layers.9.up" in refusal(small)


def test_a_factor_that_is_missing_is_refused(small: Path) -> None:
    stored = load_file(small / WEIGHTS)
    del stored["model.layers.1.mlp.up_proj.V"]
    save_file(stored, small / WEIGHTS, metadata={"format": "pt"})
    assert "lack model.layers.1.mlp.up_proj.V" in refusal(small)


def test_a_checkpoint_that_lacks_weights_is_not_compressed(tmp_path: Path) -> None:
    source = write_decoder(tmp_path / "base", "llama")
    stored = load_file(source / WEIGHTS)
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, source / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"is no whole model: its files give no model\.layers\.1\.mlp\.up_proj"):
        load_whole(source)
    with pytest.raises(ModelError, match="there is no model folder"):
        load_whole(tmp_path / "nowhere")


def test_a_checkpoint_of_other_shapes_than_its_configuration_is_refused(tmp_path: Path, small: Path) -> None:
    place = write_decoder(tmp_path / "decoder", "llama")
    for folder, setting in ((place, "intermediate_size"), (small, "vocab_size")):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config[setting] += 8
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for load in (load_whole, lambda it: load_language_base(it, targets="all-linear")):
            with pytest.raises(ModelError, match=r"is damaged: its files give .* the shape"):
                load(str(folder))


def test_factors_are_not_quantised_as_well(small: Path) -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ModelError, match="is compressed"):
        load_language_base(small, targets="all-linear", quantization="8bit")


def test_qsvd_options_travel_with_the_notes(tmp_path: Path) -> None:
    save(
        tmp_path / "x", frozen(llama_lm()), tokenizer(eos_token="<end>"), Notes("qsvd", 1, {}, [], {"scaling": "none"})
    )
    notes = read_notes(tmp_path / "x")
    assert QSVD(**notes.options) == QSVD(scaling="none")
