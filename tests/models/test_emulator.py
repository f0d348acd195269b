"""An emulator: the base without some of its middle blocks, under the same names."""

from __future__ import annotations

import pytest
import torch
from training.small import KEY, ask, bert, filled, sequences, texts
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from coterie.errors import ModelError
from coterie.models.emulator import Passing, emulator
from coterie.models.loading import Base, from_language_network, from_network
from coterie.protocol import Evaluate, Model
from coterie.training.asks import Plan, TrainSettings
from coterie.training.executor import Executor

HEAD = KEY.fold("head")


def encoder(blocks: int) -> Base:
    return from_network(bert(num_hidden_layers=blocks), None, ("query", "value"), HEAD, attention="eager")


def decoders(blocks: int) -> dict[str, Base]:
    llama = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        pad_token_id=0,
    )
    gpt2 = GPT2Config(vocab_size=60, n_positions=40, n_embd=32, n_layer=blocks, n_head=2, pad_token_id=0)
    return {
        "llama": from_language_network(filled(LlamaForCausalLM(llama)), None, ("q_proj",), attention="eager"),
        "gpt2": from_language_network(filled(GPT2LMHeadModel(gpt2)), None, ("c_attn",), attention="eager"),
    }


def loss(base: Base) -> float:
    data = sequences(6) if base.is_language else texts(6)

    request = ask(base, Evaluate(Model(), "test"), data=data, head=not base.is_language)
    (done,) = Executor({"base": base}, TrainSettings(), Plan()).answer([request])
    assert not isinstance(done, Exception), done
    return float(done.answer.loss)  # type: ignore[union-attr]


def places(base: Base, whole: Base) -> list[int]:
    """The blocks that are passed over."""
    return [
        int(name.rpartition(".")[2]) for name, module in base.network.named_modules() if isinstance(module, Passing)
    ]


def test_blocks_0_2_and_5_of_six_between_two_outer_ones_stay_under_their_names() -> None:
    whole = encoder(10)
    found = emulator(whole, ("query", "value"), 0.5, 2, HEAD)
    assert places(found, whole) == [3, 5, 6]  # of 2 … 7, those at 0, 2 and 5 stay
    assert set(found.layers) < set(whole.layers) and not any(".layer.3." in name for name in found.layers)
    assert found.layers["bert.encoder.layer.9.attention.self.query"].d_out == 32
    assert all(torch.equal(found.head[name], value) for name, value in whole.head.items())


@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2"])
def test_without_dropping_it_is_the_base_and_with_it_another_model(kind: str) -> None:
    whole = encoder(5) if kind == "bert" else decoders(5)[kind]
    targets = {"bert": ("query", "value"), "llama": ("q_proj",), "gpt2": ("c_attn",)}[kind]
    before = loss(whole)
    assert loss(emulator(whole, targets, 0.0, 1, HEAD)) == before
    assert loss(emulator(whole, targets, 0.6, 1, HEAD)) != before
    assert loss(whole) == before  # the base itself is as it was


def test_an_emulator_is_what_the_network_is_without_those_blocks() -> None:
    """A network of the same weights with the blocks taken out of its list."""
    whole = decoders(5)["llama"]
    found = emulator(whole, ("q_proj",), 0.6, 1, HEAD)
    dropped = places(found, whole)
    short = decoders(5)["llama"]
    layers = short.network.model.layers
    for place in reversed(dropped):
        del layers[place]
    short.network.config.num_hidden_layers = len(layers)
    assert len(dropped) == 2 and loss(short) == pytest.approx(loss(found), abs=1e-6)


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(ModelError, match="3 are too few for outer=2"):
        emulator(encoder(3), ("query",), 0.5, 2, HEAD)
