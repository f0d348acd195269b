"""Classifying decoders: neither side nor token nor amount of padding changes a logit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference.tokenisers import tokenizer
from torch import nn
from training.small import KEY, gpt2, llama

from coterie.data.text import TextSet, tokenise
from coterie.models.loading import Base, from_network, inputs_of
from coterie.protocol import Model
from coterie.training.evaluation import predict

TEXTS = ["the film is good", "why", "a very very bad film", "yes no yes no", "one"]
PADS = {"own": {"pad_token": "<pad>"}, "end": {"pad_token": "<end>"}}


def base_with(network: Callable[[], nn.Module], by) -> Base:
    targets = ("c_attn",) if network is gpt2 else ("q_proj",)
    return from_network(network(), by, targets, KEY.fold("head"), attention="eager")


def data_with(by) -> TextSet:
    return tokenise(TEXTS, None, [0, 1, 2, 0, 1], by, 16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))


@pytest.mark.parametrize("network", [gpt2, llama])
@pytest.mark.parametrize("pad", PADS)
def test_a_batch_of_any_width_says_what_each_text_says_alone(network, pad: str) -> None:
    # The networks were made for padding with token 0, which here is a word's letter or another special token.
    by = tokenizer(eos_token="<end>", **PADS[pad])
    base, data = base_with(network, by), data_with(by)
    assert base.network.config.pad_token_id == by.pad_token_id == data.pad_id
    together = predict(base, Model(), base.head, data, 5, features=True)
    alone = [predict(base, Model(), base.head, data.select([i]), 1, features=True) for i in range(len(data))]
    assert torch.allclose(together.logits, torch.cat([one.logits for one in alone]), atol=1e-5)
    assert torch.allclose(together.embeddings, torch.cat([one.embeddings for one in alone]), atol=1e-5)
    assert torch.allclose(together.embeddings @ base.head["score.weight"].T, together.logits, atol=1e-5)


@pytest.mark.parametrize("network", [gpt2, llama])
@torch.no_grad()
def test_padding_on_the_left_with_its_positions_says_the_same(network) -> None:
    by = tokenizer(eos_token="<end>", pad_token="<end>", padding_side="left")
    base, data = base_with(network, by), data_with(by)
    width = int(data.lengths.max()) + 3
    right = data.batch(range(5), width)
    # A set pads on the right whatever the tokeniser prefers, since nothing depends on it.
    assert right["attention_mask"][:, 0].all()
    shifts = (width - data.lengths).tolist()
    left = {
        name: torch.stack([row.roll(shift) for row, shift in zip(right[name], shifts, strict=True)])
        for name in ("input_ids", "attention_mask")
    }
    left["position_ids"] = (left["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    one, other = (base.network(**inputs_of(base, batch)).logits for batch in (right, left))
    assert torch.allclose(one, other, atol=1e-5)
