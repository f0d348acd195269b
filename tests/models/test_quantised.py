"""Quantised bases: any linear-like layer adapts and trains; nothing is merged into one or read out of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models.quantised import Float8Linear, Int8Linear, PackedLinear, quantised
from torch import nn
from training.small import (
    KEY,
    PLAIN,
    STEPS,
    answers,
    ask,
    base_of,
    bert,
    farthest,
    gpt2_lm,
    identical,
    language_base_of,
    llama,
    llama_lm,
    lora,
    sequences,
    stacked,
    tensors,
    texts,
)

from coterie.adapters.inject import eject
from coterie.errors import ModelError
from coterie.models.loading import Base, from_network
from coterie.models.weights import plain_weight
from coterie.protocol import BaseLog, Evaluate, Fit, Weights
from coterie.training.probe import choose_plan

KINDS = [Int8Linear, PackedLinear, Float8Linear]
LAYER = "bert.encoder.layer.1.attention.self.query"


def dequantised(network: nn.Module) -> nn.Module:
    """The same function with plain layers."""
    for name, module in list(network.named_modules()):
        if isinstance(module, Int8Linear):
            parent, _, child = name.rpartition(".")
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            plain.weight.data.copy_(module.dense(torch.float32))
            if module.bias is not None:
                plain.bias.data.copy_(module.bias)
            setattr(network.get_submodule(parent), child, plain)
    return network


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_layer_has_no_plain_matrix_and_every_plain_one_has(kind: type[nn.Module]) -> None:
    plain, packed = bert(), quantised(bert(), kind)
    layers = base_of(bert(), "all-linear").layers
    for name, layer in layers.items():
        assert plain_weight(plain.get_submodule(name)).shape == (layer.d_out, layer.d_in)
        assert plain_weight(packed.get_submodule(name)) is None
    conv = gpt2_lm().get_submodule("transformer.h.0.attn.c_attn")
    assert torch.equal(plain_weight(conv), conv.weight.mT)


@pytest.mark.parametrize(
    ("make", "base_for", "data"),
    [(bert, base_of, texts), (gpt2_lm, language_base_of, sequences), (llama_lm, language_base_of, sequences)],
)
def test_training_on_a_quantised_base_is_training_on_its_dequantised_twin(make, base_for, data) -> None:
    base, twin = base_for(quantised(make())), base_for(dequantised(quantised(make())))
    shapes = [{n: (shape.d_out, shape.d_in) for n, shape in one.layers.items()} for one in (base, twin)]
    assert shapes[0] == shapes[1] and base.digest != twin.digest
    asks = [ask(base, Fit(lora(base, rank, f"c{rank}")), f"c{rank}", data(17, f"c{rank}")) for rank in (2, 4)]
    plan = stacked(replace(PLAIN, dtype="float64"))
    for one, other in zip(answers(base, asks, plan=plan), answers(twin, asks, plan=plan), strict=True):
        # The twin's weights are rounded to float32 once more.
        assert farthest(tensors(one), tensors(other)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_and_scales_are_never_cast_and_company_changes_no_bit(kind: type[nn.Module], dtype: str) -> None:
    base = base_of(quantised(bert(), kind), "all-linear")
    before = {name: value.clone() for name, value in base.network.state_dict().items()}
    plan = replace(PLAIN, dtype=dtype)
    asks = [ask(base, Fit(lora(base, rank, f"c{rank}")), f"c{rank}", texts(17, f"c{rank}")) for rank in (2, 4, 3)]
    alone = answers(base, asks, plan=plan)
    assert all(identical(a, b) for a, b in zip(alone, answers(base, asks, plan=stacked(plan)), strict=True))
    assert base.dtype == plan_dtype(dtype)
    for name, value in base.network.state_dict().items():
        if ".base." in name and not name.startswith("classifier"):
            assert value.dtype == before[name].dtype, name
            assert torch.equal(value.double(), before[name].double()), name


def plan_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


@pytest.mark.parametrize("kind", KINDS)
def test_merging_into_a_quantised_base_is_refused_with_the_reason_and_changes_nothing(kind: type[nn.Module]) -> None:
    base = base_of(quantised(bert(), kind))
    (before,) = answers(base, [ask(base, Evaluate(lora(base, 2), "test"))], plan=PLAIN)
    with pytest.raises(ModelError, match=r"never merge into a quantised base: layer .*; export the adapter") as caught:
        base.set_log(BaseLog().add(lora(base, 2)["lora"]))
    assert kind.__name__ in str(caught.value) and "\n" not in str(caught.value)
    assert base.version == 0 and not base.patches.current
    (after,) = answers(base, [ask(base, Evaluate(lora(base, 2), "test"))], plan=PLAIN)
    assert before.answer == after.answer


def test_one_quantised_layer_keeps_a_patch_of_others_out_too() -> None:
    network = bert()
    plain = network.get_submodule(LAYER)
    network.get_submodule(LAYER.rpartition(".")[0]).query = Int8Linear(plain.weight.detach(), plain.bias)
    base = base_of(network)
    original = {name: base.weight(name) for name in base.layers if name != LAYER}
    with pytest.raises(ModelError, match="never merge"):
        base.set_log(BaseLog().add(lora(base, 2)["lora"]))
    assert all(torch.equal(base.weight(name), value) for name, value in original.items())
    others = {name: term for name, term in lora(base, 2)["lora"].items() if name != LAYER}
    base.set_log(BaseLog().add(others))
    assert base.version == 1


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_not_given_and_no_dense_matrix_is_formed_on_the_way(kind: type[nn.Module]) -> None:
    base = base_of(quantised(bert(), kind))
    formed = [slot.base.formed for slot in base.slots.layers.values() if kind is Int8Linear]
    (bad,) = answers(base, [replace(ask(base, Weights((LAYER,))), party="server")], plan=PLAIN)
    assert isinstance(bad, ModelError) and "gives no weights" in str(bad) and LAYER in str(bad)
    assert formed == [slot.base.formed for slot in base.slots.layers.values() if kind is Int8Linear]


def test_a_quantised_head_is_replaced_by_a_plain_one() -> None:
    def base_with(packed: bool) -> Base:
        network = llama()
        if packed:
            network.score = PackedLinear(network.score.weight.detach(), None)
        return from_network(network, None, ("q_proj",), KEY.fold("head"), attention="eager")

    plain, packed = base_with(False), base_with(True)
    assert plain.head.keys() == packed.head.keys() == {"score.weight"}
    assert torch.equal(plain.head["score.weight"], packed.head["score.weight"]) and plain.digest == packed.digest


def test_a_plan_is_chosen_and_the_very_layers_come_back() -> None:
    network = quantised(bert())
    before = dict(network.named_modules())
    base = base_of(network)
    assert choose_plan(base, texts(20), STEPS, dtype="float32", attention="eager").dtype == "float32"
    eject(network)
    assert all(module is before[name] for name, module in network.named_modules())
