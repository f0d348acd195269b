"""Encoders that compute no padding say what they said before, of fewer positions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from training import small
from training.small import CLASSES, KEY, WORDS, base_of, bert, filled, gpt2, lora, texts
from transformers import (
    BertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    EsmConfig,
    EsmForSequenceClassification,
    LayoutLMv3Config,
    LayoutLMv3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.bert.modeling_bert import BertSelfAttention

from coterie.adapters.inject import eject
from coterie.adapters.packed import attended
from coterie.adapters.places import computed, places_of
from coterie.models.loading import Base, inputs_of
from coterie.protocol import Fit, Model
from coterie.training.asks import Plan

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
SIZES = {"vocab_size": WORDS, "max_position_embeddings": 48, "num_labels": CLASSES, "pad_token_id": 0}
TARGETS = ("query", "key", "value", "output.dense", "intermediate.dense")


def roberta() -> nn.Module:
    return filled(RobertaForSequenceClassification(RobertaConfig(**SIZES, **SHAPE)))


def electra() -> nn.Module:
    return filled(ElectraForSequenceClassification(ElectraConfig(**SIZES, **SHAPE, embedding_size=32)))


class Averaging(BertForSequenceClassification):
    """Its head reads the mean of all tokens' states."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SequenceClassifierOutput:
        states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1)
        return SequenceClassifierOutput(logits=self.classifier((states * mask).sum(dim=1) / mask.sum(dim=1)))


def made(network: Callable[[], nn.Module], attention: str = "eager", dtype: str = "float64") -> Base:
    base = base_of(network(), TARGETS)
    base.prepare(dtype, attention)
    return base


def batch(count: int = 12, short: int = 0) -> dict[str, Tensor]:
    """Texts of very unequal lengths; short: how many more are cut to two tokens."""
    data = texts(count, "packed")
    rows = data.batch(range(count), int(data.lengths.max()))
    rows["attention_mask"][:short, 2:] = 0
    return rows


def stacked(base: Base, clients: int) -> Model:
    return Model.stack([lora(base, 3, f"c{i}", 0.4) for i in range(clients)])


def answers(base: Base, model: Model, clients: int, rows: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the gradients of a sum of their squares by all factors."""
    leaves = {name: value.clone().requires_grad_() for name, value in model.parameters.items()}
    with base.slots.bound(clients, model.with_parameters(leaves), None):
        logits = base.network(**inputs_of(base, rows)).logits
        return logits.detach(), list(torch.autograd.grad(logits.square().sum(), list(leaves.values())))


@contextmanager
def shapes(base: Base, *names: str) -> Iterator[dict[str, tuple[int, ...]]]:
    """The shapes that these layers' inputs have had last."""
    seen: dict[str, tuple[int, ...]] = {}

    def noted(name: str) -> Any:
        return lambda _, args: seen.update({name: tuple(args[0].shape)})

    hooks = [base.network.get_submodule(name).register_forward_pre_hook(noted(name)) for name in names]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("network", [bert, roberta, electra])
@pytest.mark.parametrize("clients", [1, 3])
def test_logits_and_gradients_are_those_of_all_positions(network: Any, attention: str, clients: int) -> None:
    base = made(network, attention)
    assert base.packs
    model, rows = stacked(base, clients), batch(short=3)
    logits, gradients = answers(base, model, clients, rows)
    with base.slots.everywhere():
        plain, slopes = answers(base, model, clients, rows)
    assert torch.allclose(logits, plain, atol=1e-12) and not torch.equal(logits, torch.zeros_like(logits))
    for one, other in zip(gradients, slopes, strict=True):
        assert torch.allclose(one, other, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("network", [bert, roberta, electra])
def test_a_bound_network_without_terms_is_the_plain_network(network: Any) -> None:
    base, rows = made(network), batch(short=5)
    plain = base.network(**inputs_of(base, rows)).logits
    with base.slots.bound(1, None, None):
        packed = base.network(**inputs_of(base, rows)).logits
    assert torch.allclose(packed, plain, atol=1e-13)


def test_dense_layers_see_tokens_only_and_the_last_block_first_ones() -> None:
    base, rows = made(bert), batch(short=6)
    tokens, whole = int(rows["attention_mask"].sum()), rows["attention_mask"].numel()
    blocks = [f"bert.encoder.layer.{i}" for i in (0, 1)]
    layers = [f"{block}.{part}" for block in blocks for part in ("attention.self.query", "intermediate.dense")]
    with shapes(base, *layers, f"{blocks[1]}.attention.self.key") as seen, base.slots.bound(1, None, None):
        base.network(**inputs_of(base, rows))
    n = computed(tokens, 12, whole // 12)
    assert tokens <= n < tokens + 16 + whole // 16 and n < whole
    assert [seen[name] for name in layers] == [(1, n, 32)] * 2 + [(12, 1, 32)] * 2
    assert seen[f"{blocks[1]}.attention.self.key"] == (1, n, 32)


def test_everywhere_and_unbound_all_positions_are_computed() -> None:
    base, rows = made(bert), batch(short=6)
    name = "bert.encoder.layer.1.intermediate.dense"
    whole = (*rows["attention_mask"].shape, 32)
    with shapes(base, name) as seen:
        base.network(**inputs_of(base, rows))
        assert seen.pop(name) == whole
        with base.slots.bound(1, None, None), base.slots.everywhere():
            base.network(**inputs_of(base, rows))
        assert seen[name] == whole


def test_texts_that_begin_with_padding_are_computed_as_they_lie() -> None:
    base, rows = made(bert), batch(short=6)
    rows["attention_mask"] = rows["attention_mask"].flip(1)
    plain = base.network(**inputs_of(base, rows)).logits
    with base.slots.bound(1, None, None):
        assert torch.allclose(base.network(**inputs_of(base, rows)).logits, plain, atol=1e-13)


def test_a_head_that_reads_other_tokens_is_noticed() -> None:
    base, rows = base_of(filled(Averaging(bert().config)), TARGETS), batch(short=6)
    assert not base.packs
    plain = base.network(**inputs_of(base, rows)).logits
    with base.slots.bound(1, None, None):
        assert torch.equal(base.network(**inputs_of(base, rows)).logits, plain)


def esm() -> nn.Module:
    kind = {"position_embedding_type": "rotary", "mask_token_id": 1, "token_dropout": False}
    return EsmForSequenceClassification(EsmConfig(**SIZES, **SHAPE, **kind))


def layout() -> nn.Module:
    """Its attention takes a bias by position."""
    sizes = {"coordinate_size": 6, "shape_size": 4, "visual_embed": False}
    return LayoutLMv3ForSequenceClassification(LayoutLMv3Config(**SIZES, **SHAPE, **sizes))


def patched() -> nn.Module:
    network = bert()
    inner = network.get_submodule("bert.encoder.layer.0.attention.self")
    inner.forward = inner.forward
    return network


class Windowed(BertSelfAttention):
    """Might see near tokens only, which short texts do not tell."""


def windowed() -> nn.Module:
    network = bert()
    for layer in network.get_submodule("bert.encoder.layer"):
        layer.attention.self.__class__ = Windowed
    return network


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("network", [gpt2, esm, layout, patched, windowed])
def test_networks_of_another_make_go_on_as_they_are(network: Any, dtype: torch.dtype) -> None:
    targets = None if network is gpt2 else ("query", "value")
    assert not base_of(network().to(dtype), targets).packs and base_of(bert().to(dtype)).packs


def test_an_ejected_network_has_its_own_modules_and_bits() -> None:
    base, rows = made(bert), batch(short=6)
    plain = base.network(**inputs_of(base, rows)).logits
    eject(base.network)
    assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in base.network.modules())
    assert torch.equal(base.network(**inputs_of(base, rows)).logits, plain)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_packs_too_and_by_itself(copied: Callable[[Any], Any]) -> None:
    base, rows = made(bert), batch(short=6)
    model = stacked(base, 2)
    expected, _ = answers(base, model, 2, rows)
    other = copied(base)
    assert other.slots.binding is not base.slots.binding
    with shapes(other, "bert.encoder.layer.1.intermediate.dense") as seen:
        found, _ = answers(other, model, 2, rows)
    assert seen["bert.encoder.layer.1.intermediate.dense"] == (12, 1, 32) and torch.equal(found, expected)


@given(st.integers(1, 40), st.integers(1, 70), st.data())
def test_what_is_computed_holds_all_tokens_and_spares_an_eighth_or_nothing(
    texts_: int, length: int, data: st.DataObject
) -> None:
    whole = texts_ * length
    tokens = data.draw(st.integers(texts_, whole))
    n = computed(tokens, texts_, length)
    assert tokens <= n <= whole and (n == whole or (8 * n < 7 * whole and n % 16 == 0))
    assert n == whole or n - tokens < 16 * -(-whole // 256)


@given(st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1, max_size=4))
def test_states_come_back_where_tokens_are(lengths: list[list[int]]) -> None:
    clients, each = len(lengths), torch.tensor(lengths).flatten()
    mask = (torch.arange(12) < each.unsqueeze(1)).long()
    places = places_of(mask, clients)
    states = KEY.fold("states").normal((len(each), 12, 2))
    packed = places.packed(states)
    back = places.spread(packed)
    assert torch.equal(back[mask.bool()], states[mask.bool()])
    assert bool(((back == states) | (back == 0)).all())
    assert torch.equal(places.ending(packed), states[:, :1])
    if places.rows is not None:
        assert packed.shape == (clients, computed(int(mask.view(clients, -1).sum(1).max()), 3, 12), 2)
        assert places.packed(packed) is packed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_company_changes_no_bit_where_batches_have_more_and_less_padding(dtype: Any) -> None:
    base = made(bert, dtype="float32")
    asks = [
        small.ask(base, Fit(lora(base, 4, f"c{i}"), steps=3), f"c{i}", texts(40, f"c{i}", 3, 8 + 10 * (i % 2)))
        for i in range(4)
    ]
    asks.append(small.ask(base, Fit(lora(base, 4, "long"), steps=3), "long", texts(40, "long", 16, 18)))
    settings = replace(small.STEPS, batch_size=16, dropout=0.1, buckets=False)
    plan = Plan(dtype=dtype, padding_rank=4)
    alone = small.answers(base, asks, settings, plan)
    with small.stacks() as seen, small.groups() as company:
        together = small.answers(base, asks, settings, small.stacked(plan))
    assert seen == [5] and 1 < max(company) < 5
    assert all(small.identical(one, other) for one, other in zip(alone, together, strict=True))


def textbook(q: Tensor, k: Tensor, v: Tensor, seen: int) -> Tensor:
    """Attention to the first `seen` keys, one head and query at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for place in product(*map(range, q.shape[:3])):
        keys, values = k[place[:2]][:seen], v[place[:2]][:seen]
        out[place] = (keys @ q[place] / q.shape[-1] ** 0.5).softmax(dim=0) @ values
    return out


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_attention_is_the_textbook_one(dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = (KEY.fold("attention", i).normal((2, 3, 7, 16)).to(dtype) for i in range(3))
    exact = textbook(q.double(), k.double(), v.double(), 5)
    seen = torch.arange(7) < 5
    added = torch.zeros(7, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min).expand(2, 1, 7, 7)
    for kind, mask in (("eager", added), ("sdpa", added), ("sdpa", seen.expand(2, 1, 7, 7))):
        assert torch.allclose(attended(q, k, v, mask, kind).double(), exact, atol=tolerance)
    first = attended(q[:, :, :1], k, v, added[:, :, :1], "eager")
    assert torch.allclose(first.double(), exact[:, :, :1], atol=tolerance)
