"""Layers of two factors: what they compute, how bases and adapters see them."""

from __future__ import annotations

import pytest
import torch
from compress.worlds import frozen, key, windows
from training.small import TARGETS, bert, gpt2_lm, llama_lm

from coterie.adapters.inject import AdaptedLinear
from coterie.algorithms import METHODS
from coterie.compress import SVDLLM, FactoredLinear, cut, rank_layers
from coterie.errors import ModelError
from coterie.experiments.bases import check_method
from coterie.maths.keys import root_key
from coterie.models.loading import Base, from_language_network, from_network
from coterie.models.targets import linears, shape_of
from coterie.models.weights import plain_weight
from coterie.protocol import BaseLog, InnerCore, Layer, LowRank, Model

NAMES = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj"]


@pytest.fixture
def base() -> Base:
    network = frozen(llama_lm())
    cut(network, rank_layers(network, NAMES, SVDLLM(), windows(4, 9), 0.5), SVDLLM(), 0.5)
    return from_language_network(network, None, ["down_proj", "q_proj"], attention="eager")


def sizes(layer: Layer | None) -> tuple[int, int, int | None]:
    assert layer is not None
    return layer.d_out, layer.d_in, layer.inner


def logits(base: Base, model: Model | None = None) -> torch.Tensor:
    stacked = None if model is None else Model.stack([model])
    with torch.no_grad(), base.slots.bound(1, stacked, None):
        return base.network(input_ids=windows(2, 9)).logits


@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_the_product_of_its_factors(bias: bool) -> None:
    U, V, b = (key(name).normal(size) for name, size in {"U": (5, 2), "V": (2, 7), "b": (5,)}.items())
    layer = FactoredLinear(U, V, b if bias else None)
    x = key("x").normal((3, 4, 7))
    assert torch.allclose(layer(x), x @ (U @ V).mT + (b if bias else 0), atol=1e-5)
    assert sizes(shape_of(layer)) == (5, 7, 2) and plain_weight(layer) is None
    assert layer.weight is layer.U and not any(value.requires_grad for value in layer.parameters())


def test_no_matrix_stays_behind(base: Base) -> None:
    for name in NAMES:
        linear = base.slots.layers[name].base
        assert isinstance(linear, FactoredLinear)
        layer = base.layers[name]
        assert layer.inner is not None and linear.inner == layer.inner
        assert sum(value.numel() for value in linear.parameters()) == layer.inner * (layer.d_out + layer.d_in)
        assert all(value.untyped_storage().nbytes() == 4 * value.numel() for value in linear.parameters())
    # The other query layer was not compressed.
    assert sizes(base.layers["model.layers.0.self_attn.q_proj"]) == (32, 32, None)


def test_the_server_gives_the_factors_of_such_a_layer_and_the_matrix_of_others(base: Base) -> None:
    U, V = base.weight(NAMES[0])
    assert torch.equal(U, base.slots.layers[NAMES[0]].base.U) and V.shape == (base.layers[NAMES[0]].inner, 48)
    assert base.weight("model.layers.0.self_attn.q_proj").shape == (32, 32)
    assert sorted(base.factored) == sorted(NAMES) and base.quantised == []


def cores(base: Base, H: dict[str, torch.Tensor]) -> Model:
    return Model(core={name: InnerCore(H[name]) for name in base.factored})


def test_a_core_of_ones_on_the_diagonal_changes_nothing_and_another_stands_between_the_factors(base: Base) -> None:
    ones = {name: torch.eye(base.layers[name].inner) for name in base.factored}
    assert torch.allclose(logits(base, cores(base, ones)), logits(base), atol=1e-5)
    other = {name: one + 0.3 * key(name).normal(one.shape) for name, one in ones.items()}
    found = logits(base, cores(base, other))
    for name in base.factored:
        linear = base.slots.layers[name].base
        linear.U.data = linear.U.data @ other[name]
    assert torch.allclose(found, logits(base), atol=1e-4)
    assert not torch.allclose(found, logits(base, cores(base, other)), atol=1e-2)


def test_low_rank_terms_are_added_beside_the_factors(base: Base) -> None:
    name = NAMES[0]
    layer = base.layers[name]
    term = LowRank(key("B").normal((layer.d_out, 2)), key("A").normal((2, layer.d_in)), 0.5)
    x = key("x").normal((4, layer.d_in))
    slot = base.slots.layers[name]
    assert isinstance(slot, AdaptedLinear)
    with base.slots.bound(1, Model.stack([Model(lora={name: term})]), None):
        made = slot(x)
    assert torch.allclose(made, slot.base(x) + 0.5 * x @ (term.B @ term.A).mT, atol=1e-4)


def test_a_patch_of_a_compressed_layer_is_refused_in_one_line(base: Base) -> None:
    layer = base.layers[NAMES[0]]
    patch = {NAMES[0]: LowRank(torch.ones(layer.d_out, 1), torch.ones(1, layer.d_in))}
    with pytest.raises(ModelError, match="never merge into a compressed base") as caught:
        base.set_log(BaseLog((patch,)))
    assert "\n" not in str(caught.value) and base.version == 0


def test_a_method_that_patches_the_base_is_refused_before_its_first_round(base: Base) -> None:
    check_method(METHODS["fedit"].traits, base)
    with pytest.raises(ModelError, match=r"FLoRA changes the base .* holds two factors"):
        check_method(METHODS["flora"].traits, base)


def test_factors_are_cast_with_the_base(base: Base) -> None:
    before = logits(base)
    base.prepare("float64", "eager")
    assert base.slots.layers[NAMES[0]].base.U.dtype == torch.float64
    assert torch.allclose(logits(base).float(), before, atol=1e-4)


@pytest.mark.parametrize("make", [bert, gpt2_lm])
def test_encoders_and_conv1d_are_adapted_on_their_factors_too(make) -> None:
    network = frozen(make())
    names = [name for name in linears(network) if name.endswith(TARGETS if make is bert else ("c_attn", "c_proj"))]
    before = network(input_ids=windows(2, 9)).logits
    biases = {name: network.get_submodule(name).bias for name in names}
    cut(network, rank_layers(network, names, SVDLLM(), windows(4, 9), 1.0), SVDLLM(), 1.0)
    assert all(torch.equal(network.get_submodule(name).bias, bias) for name, bias in biases.items())
    whole = before.norm()
    assert 1e-6 * whole < (network(input_ids=windows(2, 9)).logits - before).norm() < 0.5 * whole
    if make is bert:
        base = from_network(network, None, TARGETS, root_key(0), attention="eager")
    else:
        base = from_language_network(network, None, ["c_attn", "c_proj"], attention="eager")
    assert base.factored == names and all(layer.inner for layer in base.layers.values())
