"""A tiny random world for tests of training: networks from config, texts, models, asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from coterie.data.sequences import ChoiceSet, DataSet, SequenceSet
from coterie.data.text import TextSet
from coterie.maths.keys import Key, root_key
from coterie.models.loading import Base, from_language_network, from_network
from coterie.protocol import Fit, LowRank, Model
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.training.fit import _Stack, fit

KEY = root_key(7)
CLASSES = 3
WORDS = 60
TARGETS = ("query", "value")
EXACT = Plan(dtype="float64", padding_rank=16)
PLAIN = Plan(padding_rank=16)
STEPS = TrainSettings(batch_size=4, steps=5, lr=0.02)


def bert(**changes: Any) -> nn.Module:
    """Two layers of width 32, weights large enough for logits to depend on the input."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    sizes = {"vocab_size": WORDS, "max_position_embeddings": 40, "num_labels": CLASSES}
    config = BertConfig(**(sizes | shape | changes))
    return filled(BertForSequenceClassification(config))


def gpt2(kind: type[nn.Module] = GPT2ForSequenceClassification) -> nn.Module:
    config = GPT2Config(
        vocab_size=WORDS, n_positions=40, n_embd=32, n_layer=2, n_head=2, num_labels=CLASSES, pad_token_id=0
    )
    return filled(kind(config))


def llama(kind: type[nn.Module] = LlamaForSequenceClassification, layers: int = 2) -> nn.Module:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_labels=CLASSES,
        pad_token_id=0,
    )
    return filled(kind(config))


def gpt2_lm() -> nn.Module:
    """Its output layer is the table of embeddings."""
    return gpt2(GPT2LMHeadModel)


def llama_lm() -> nn.Module:
    return llama(LlamaForCausalLM)


def filled(network: nn.Module) -> nn.Module:
    """The network with every matrix drawn anew from a fixed key."""
    for name, value in network.named_parameters():
        if value.dim() > 1:
            value.data.copy_(KEY.fold("network", name).normal(value.shape, 0.2))
    return network


def base_of(network: nn.Module | None = None, targets: Sequence[str] | str | None = TARGETS) -> Base:
    return from_network(bert() if network is None else network, None, targets, KEY.fold("head"), attention="eager")


def language_base_of(network: nn.Module) -> Base:
    targets = ("c_attn", "c_proj") if isinstance(network, GPT2LMHeadModel) else ("q_proj", "v_proj", "down_proj")
    return from_language_network(network, None, targets, attention="eager")


def sequences(count: int, name: str = "sequences", low: int = 2, high: int = 9) -> SequenceSet:
    """`count` prompts and answers, each of `low` to `high` - 1 tokens; an answer repeats tokens of its prompt."""
    key = KEY.fold(name)
    prompts, answers = (
        low + (key.fold(part).unit(count) * (high - low)).astype(np.int64) for part in ("prompt", "answer")
    )
    ids = [1 + (key.fold("words", i).unit(int(n)) * (WORDS - 1)).astype(np.int32) for i, n in enumerate(prompts)]
    parts = [np.concatenate([own, np.resize(own, int(n))]) for own, n in zip(ids, answers, strict=True)]
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(prompts + answers)]))
    return SequenceSet(torch.from_numpy(np.concatenate(parts)), offsets, torch.from_numpy(prompts), torch.arange(count))


def choices(count: int, name: str = "choices") -> ChoiceSet:
    """`count` questions of two, three, two, … options."""
    numbers = [2 + i % 2 for i in range(count)]
    first = torch.tensor([0, *np.cumsum(numbers)])
    labels = torch.tensor([i % n for i, n in enumerate(numbers)])
    return ChoiceSet(sequences(int(first[-1]), name), first, labels, torch.arange(count))


def texts(count: int, name: str = "texts", low: int = 3, high: int = 20) -> TextSet:
    """`count` examples of `low` to `high` - 1 tokens whose first token hints at the class."""
    key = KEY.fold(name)
    lengths = low + (key.fold("length").unit(count) * (high - low)).astype(np.int64)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    labels = torch.from_numpy((key.fold("label").unit(count) * CLASSES).astype(np.int64))
    ids = torch.from_numpy((1 + key.fold("words").unit(int(offsets[-1])) * (WORDS - 1)).astype(np.int32))
    ids[offsets[:-1]] = (1 + labels).to(torch.int32)
    return TextSet(ids, offsets, labels, torch.arange(count), CLASSES)


def lora(base: Base, rank: int, name: str = "client", scale: float = 2.0, dtype: torch.dtype = torch.float64) -> Model:
    """Factors with both halves nonzero, so that every gradient is."""
    key = KEY.fold("lora", name)
    return Model(
        lora={
            layer: LowRank(
                key.fold("B", layer).normal((shape.d_out, rank), 0.1, dtype),
                key.fold("A", layer).normal((rank, shape.d_in), 0.1, dtype),
                scale,
            )
            for layer, shape in base.layers.items()
        }
    )


def ask(
    base: Base,
    request: Any,
    name: str = "client",
    data: DataSet | None = None,
    head: bool = True,
    key: Key | None = None,
) -> Ask:
    own = data if data is not None else texts(22, name)
    start = {part: value.double() for part, value in base.head.items()} if head else None
    return Ask(name, request, "base", start, own, key or KEY.fold("ask", name))


def cohort(base: Base, ranks: Sequence[int] = (2, 4, 16, 3), **fields: Any) -> list[Ask]:
    """Clients of unequal ranks, data and numbers of steps, whose batches are of unequal sizes too."""
    return [
        ask(
            base,
            Fit(lora(base, rank, f"c{i}"), steps=3 + i, **fields),
            f"c{i}",
            texts((22, 9, 17, 6)[i % 4], f"c{i}"),
        )
        for i, rank in enumerate(ranks)
    ]


def answers(base: Base, asks: Sequence[Ask], settings: TrainSettings = STEPS, plan: Plan = EXACT) -> list[Any]:
    return list(Executor({"base": base}, settings, plan).answer(asks))


@contextmanager
def stacks() -> Iterator[list[int]]:
    """How many clients were trained together, pass by pass: after one that fails each is trained alone, unnoticed."""
    seen: list[int] = []

    def noted(base: Base, asks: Sequence[Ask], *rest: Any) -> Any:
        done = fit(base, asks, *rest)
        seen.append(len(asks))
        return done

    with mock.patch("coterie.training.executor.fit", noted):
        yield seen


@contextmanager
def groups() -> Iterator[list[int]]:
    """How many clients shared each forward pass of training."""
    seen: list[int] = []
    shared = _Stack._forward_backward

    def noted(stack: _Stack, number: int, rows: list[int]) -> None:
        seen.append(len(rows))
        shared(stack, number, rows)

    with mock.patch.object(_Stack, "_forward_backward", noted):
        yield seen


def stacked(plan: Plan, clients: int = 16) -> Plan:
    return replace(plan, clients_per_step=clients)


def tensors(done: Done) -> dict[str, torch.Tensor]:
    """All that a Fit brought back: model and head."""
    assert isinstance(done, Done), done
    return done.answer.model.parameters | {f"head.{name}": value for name, value in (done.head or {}).items()}


def identical(one: Done, other: Done) -> bool:
    """Bit for bit: parameters, head, losses, penalties."""
    a, b = tensors(one), tensors(other)
    numbers = ("mean_loss", "examples_seen", "steps_taken", "penalty_before", "penalty_after")
    return (
        a.keys() == b.keys()
        and all(torch.equal(a[n], b[n]) for n in a)
        and all(getattr(one.answer, n) == getattr(other.answer, n) for n in numbers)
    )


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of any entry."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
