"""Bases that processes hold together: the same numbers in the same layout, and patches that stay private."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from training.small import base_of, gpt2, gpt2_lm, language_base_of, llama_lm, lora

from coterie.compress.factored import FactoredLinear
from coterie.models.loading import Base
from coterie.protocol import BaseLog
from coterie.training.shared_bases import ALIGN, opened, share


def half() -> Base:
    made = base_of()
    made.prepare("bfloat16", "eager")
    return made


BASES = {
    "bert": base_of,
    "half": half,
    "conv": lambda: base_of(gpt2(), ("c_attn",)),
    "tied": lambda: language_base_of(gpt2_lm()),
    "decoder": lambda: language_base_of(llama_lm()),
}


@pytest.mark.parametrize("name", list(BASES))
def test_every_tensor_keeps_bits_strides_and_its_place_in_a_vector(name: str) -> None:
    shared = {name: BASES[name]()}
    before = {n: (v.clone(), v.stride(), v.data_ptr() % ALIGN) for n, v in shared[name].network.state_dict().items()}
    with share(shared) as folder:
        again = opened(Path(folder))
    for base in (shared[name], again[name]):  # the one that was shared lies in the same file now
        after = base.network.state_dict()
        assert after.keys() == before.keys()
        for part, (value, stride, place) in before.items():
            assert torch.equal(after[part], value) and after[part].dtype == value.dtype
            assert after[part].stride() == stride and after[part].data_ptr() % ALIGN == place
    assert again[name].digest == shared[name].digest and list(again[name].layers) == list(shared[name].layers)
    assert not any(p.requires_grad for p in again[name].network.parameters())


def test_this_process_has_its_weights_in_the_file_too() -> None:
    shared = {"bert": base_of()}
    weight = next(iter(shared["bert"].network.parameters()))
    before = weight.data_ptr()
    with share(shared):
        assert weight.data_ptr() != before


def test_tied_weights_stay_tied() -> None:
    with share({"tied": language_base_of(gpt2_lm())}) as folder:
        network = opened(Path(folder))["tied"].network
    assert network.lm_head.base.weight is network.transformer.wte.weight


def test_one_factor_of_several_layers_stays_one() -> None:
    base = base_of()
    layers = list(base.slots.layers.values())[:2]
    V = nn.Parameter(torch.randn(3, 32), requires_grad=False)
    for slot in layers:
        slot.base = FactoredLinear(torch.randn(32, 3), V, None)
    with share({"bert": base}) as folder:
        first, second = list(opened(Path(folder))["bert"].slots.layers.values())[:2]
    assert first.base.V is second.base.V and torch.equal(first.base.V, V)


def test_a_patch_stays_with_the_process_that_made_it() -> None:
    shared = {"bert": base_of()}
    name = next(iter(shared["bert"].layers))
    with share(shared) as folder:
        one, other = opened(Path(folder))["bert"], opened(Path(folder))["bert"]
        before = other.weight(name)
        one.set_log(BaseLog().add(lora(one, 2)["lora"]))
        third = opened(Path(folder))["bert"]
    assert not torch.equal(one.weight(name), before)
    for untouched in (other, third, shared["bert"]):
        assert torch.equal(untouched.weight(name), before)
