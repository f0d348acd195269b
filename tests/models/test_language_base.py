"""Language bases: loaded without a head, causal, with an output layer that is never adapted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from reference.tokenisers import write_tokenizer
from safetensors.torch import load_file, save_file
from torch import nn
from training.small import bert, gpt2, gpt2_lm, language_base_of, llama_lm, sequences
from transformers import BertConfig, BertLMHeadModel

from coterie.adapters.inject import OutputLayer, eject
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.models.loading import from_language_network, load_base, load_language_base
from coterie.models.targets import output_layer, select_layers

LLAMA_TARGETS = ("q_proj", "v_proj")


def folder_of(network: nn.Module, place: Path, **special: str) -> Path:
    network.save_pretrained(place)
    write_tokenizer(place, **special)
    return place


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(llama_lm(), tmp_path_factory.mktemp("llama"), eos_token="<end>")


def test_a_folder_loads_frozen_without_a_head(llama_folder: Path) -> None:
    base = load_language_base(llama_folder, targets=LLAMA_TARGETS)
    assert base.is_language and base.head == {} and not base.slots.heads and len(base.layers) == 4
    assert not base.network.training and not any(p.requires_grad for p in base.network.parameters())
    # Made for a fixed padding token: a tokeniser without one keeps none.
    assert base.tokenizer.pad_token is None
    assert base.digest == load_language_base(llama_folder, targets=("down_proj",)).digest


def test_the_same_folder_is_a_classifier_with_the_end_token_as_padding(llama_folder: Path) -> None:
    base = load_base(llama_folder, targets=LLAMA_TARGETS, num_labels=3, head_key=root_key(1))
    assert not base.is_language and set(base.head) == {"score.weight"}
    assert base.network.config.pad_token_id == base.tokenizer.pad_token_id == base.tokenizer.eos_token_id


def test_a_classifier_whose_tokeniser_has_no_token_for_padding_is_refused(tmp_path: Path) -> None:
    folder_of(llama_lm(), tmp_path)
    with pytest.raises(ModelError, match="no padding token") as caught:
        load_base(tmp_path, targets=LLAMA_TARGETS, num_labels=3, head_key=root_key(1))
    assert "\n" not in str(caught.value)
    assert load_language_base(tmp_path, targets=LLAMA_TARGETS).is_language


def test_loading_draws_nothing_from_the_global_generator(llama_folder: Path) -> None:
    torch.manual_seed(3)
    load_language_base(llama_folder, targets=LLAMA_TARGETS)
    left = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(left, torch.rand(1))


def test_a_checkpoint_without_an_output_layer_is_no_language_model(llama_folder: Path, tmp_path: Path) -> None:
    for file in llama_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="no weights of an output layer"):
        load_language_base(tmp_path, targets=LLAMA_TARGETS)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert load_language_base(tmp_path, targets=LLAMA_TARGETS).is_language


@pytest.mark.parametrize("network", [gpt2_lm, llama_lm])
def test_all_linear_spares_the_output_layer_and_no_target_reaches_it(network) -> None:
    chosen = select_layers(network(), "all-linear")
    assert "lm_head" not in chosen and len(chosen) == 2 * (4 if network is gpt2_lm else 7)
    with pytest.raises(ModelError, match="'lm_head'"):
        select_layers(network(), ["lm_head"])


def test_a_string_is_a_name_s_ending_or_peft_s_regular_expression() -> None:
    network = llama_lm()
    assert list(select_layers(network, r".*\.1\..*\.(q|v)_proj")) == [
        f"model.layers.1.self_attn.{part}_proj" for part in "qv"
    ]
    assert len(select_layers(network, "q_proj")) == 2
    for pattern in (r".*\.9\..*", "(", "q_pro"):
        with pytest.raises(ModelError, match="no linear layer is called"):
            select_layers(network, pattern)


@pytest.mark.parametrize("network", [gpt2_lm, llama_lm])
def test_an_unbound_network_gives_all_its_logits_and_comes_back_whole(network) -> None:
    plain, wrapped = network().eval(), network()
    before = dict(wrapped.named_modules())
    base = language_base_of(wrapped)
    batch = sequences(4).batch(range(4), 20)
    ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        assert torch.allclose(base.network(**ids).logits, plain(**ids).logits, atol=1e-5)
    assert isinstance(base.network.lm_head, OutputLayer) and base.slots.output is base.network.lm_head
    eject(wrapped)
    assert all(module is before[name] for name, module in wrapped.named_modules())
    assert output_layer(wrapped) == "lm_head"


def masked_bert() -> nn.Module:
    config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    return BertLMHeadModel(config)


@pytest.mark.parametrize(("network", "targets"), [(masked_bert, ("query",)), (bert, ("query",)), (gpt2, ("c_attn",))])
def test_what_looks_at_later_tokens_or_predicts_none_is_no_language_model(network, targets) -> None:
    with pytest.raises(ModelError, match="no causal language model"):
        from_language_network(network(), None, targets)
