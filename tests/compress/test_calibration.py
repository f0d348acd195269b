"""Text streamed block by block gives what the whole network gives, in memory that does not grow with it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from compress.worlds import frozen, windows
from torch import Tensor, nn
from training.small import bert, gpt2_lm, llama_lm
from transformers import AlbertConfig, AlbertModel, T5Config, T5ForConditionalGeneration

from coterie.compress import SVD, rank_layers
from coterie.compress.calibration import BATCH_TOKENS, Stream, batched, blocks
from coterie.compress.inputs import Inputs, energy
from coterie.errors import ModelError
from coterie.models.targets import linears, select_layers

NETWORKS = [llama_lm, gpt2_lm, bert]


def gathered(network: nn.Module, text: Tensor) -> dict[str, Tensor]:
    """The inputs (T, d_in) of every linear layer, from whole forward passes."""
    seen: dict[str, list[Tensor]] = {}

    def hook(name: str):
        def before(_, arguments) -> None:
            seen.setdefault(name, []).append(arguments[0].reshape(-1, arguments[0].shape[-1]).double())

        return before

    handles = [network.get_submodule(name).register_forward_pre_hook(hook(name)) for name in linears(network)]
    with torch.no_grad():
        for batch in batched(text):
            network(input_ids=batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


@pytest.mark.parametrize("make", NETWORKS)
def test_streamed_moments_are_those_of_all_inputs_at_once(make) -> None:
    network, text = frozen(make()), windows(6, 11)
    stream = Stream(network, text)
    names = [name for name in select_layers(network, "all-linear") if any(name.startswith(b) for b in stream.blocks)]
    kept = {name: Inputs() for name in names}
    for block in stream.blocks:
        stream.step(block, {name: inputs for name, inputs in kept.items() if name.startswith(f"{block}.")})
    for name, X in gathered(network, text).items():
        if name not in kept:
            continue
        assert kept[name].tokens == 66 == len(X)
        assert torch.allclose(kept[name].gram, X.mT @ X, rtol=1e-4, atol=1e-5)
        assert torch.allclose(kept[name].magnitude, X.abs().mean(dim=0), atol=1e-5)
        W = torch.eye(X.shape[1])[:3]
        assert energy(W, kept[name].gram) == pytest.approx(float((X @ W.double().mT).norm()), rel=1e-5)


def test_a_stream_holds_the_states_of_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    network, text = frozen(llama_lm()), windows(4, 11)
    stream = Stream(network, text)
    gone = [weakref.ref(states) for states in stream.states]
    stream.step(next(iter(stream.blocks)))
    gc.collect()
    assert all(states() is None for states in gone)
    assert sum(states.numel() for states in stream.states) == 4 * 11 * 32


def test_watching_moves_nothing() -> None:
    network, text = frozen(llama_lm()), windows(4, 11)
    stream, kept = Stream(network, text), Inputs()
    before = [states.clone() for states in stream.states]
    stream.watch("model.layers.0", {"model.layers.0.mlp.down_proj": kept})
    assert all(torch.equal(a, b) for a, b in zip(before, stream.states, strict=True)) and kept.tokens == 44


def test_hooks_and_settings_are_as_before() -> None:
    network = frozen(llama_lm())
    network.config.use_cache = True
    stream = Stream(network, windows(2, 5))
    stream.step("model.layers.0", {"model.layers.0.mlp.down_proj": Inputs()})
    assert network.config.use_cache
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in network.modules())


def test_batches_are_of_one_size() -> None:
    assert [len(batch) for batch in batched(windows(6, BATCH_TOKENS // 4))] == [3, 3]
    assert [len(batch) for batch in batched(windows(5, BATCH_TOKENS // 4))] == [1] * 5
    assert [len(batch) for batch in batched(windows(2, 2 * BATCH_TOKENS))] == [1, 1]


def test_networks_without_one_list_of_blocks_are_refused() -> None:
    with pytest.raises(ModelError, match="no list of blocks"):
        blocks(nn.Sequential(nn.Linear(2, 2)))
    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="several lists of blocks"):
        blocks(T5ForConditionalGeneration(config))


class Mindful(nn.Module):
    """Blocks that are each called with the embedded text as well, beside what the block before gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded = nn.Embedding(60, 8)
        self.layers = nn.ModuleList(Adding() for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        states = first = self.embedded(input_ids)
        for layer in self.layers:
            states = layer(states, first)
        return states


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, states: Tensor, first: Tensor) -> Tensor:
        return states + self.proj(first)


@pytest.mark.parametrize("count", [2, BATCH_TOKENS])  # of one batch, and of several
def test_blocks_that_look_at_other_things_of_a_batch_than_its_states_are_refused(count: int) -> None:
    network = frozen(Mindful())
    with pytest.raises(ModelError, match=r"^Mindful cannot be run block by block: .* alone$"):
        Stream(network, windows(count, 5))
    with pytest.raises(ModelError, match="cannot be run block by block"):
        rank_layers(network, ["layers.0.proj"], SVD(), windows(count, 5), 0.5)


def test_a_block_that_runs_more_than_once_is_refused() -> None:
    sizes = {"embedding_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    network = frozen(AlbertModel(AlbertConfig(vocab_size=60, num_hidden_layers=3, **sizes)))
    with pytest.raises(ModelError, match=r"^AlbertModel does not run each of its blocks once, one after another$"):
        rank_layers(network, list(select_layers(network, "all-linear")), SVD(), windows(4, 5), 0.5)
