"""Frozen layers that add their bias within the product say what they said, and layers that train are left alone."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from training.small import base_of, bert, texts

from coterie.adapters import frozen
from coterie.adapters.frozen import fuse, is_plain, packed_of, unfuse
from coterie.adapters.inject import eject
from coterie.maths.products import is_fast
from coterie.models.loading import inputs_of
from coterie.protocol import BaseLog, LowRank

DATA = texts(8, "frozen")
BFLOAT16 = torch.zeros(1, dtype=torch.bfloat16)
needs_it = pytest.mark.skipif(not is_fast(BFLOAT16), reason="this PyTorch lacks oneDNN's own products")


def fused(network: nn.Module) -> set[str]:
    return {n for n, m in network.named_modules() if isinstance(vars(m).get("forward"), frozen.Fused)}


@needs_it
def test_a_base_in_bfloat16_has_every_frozen_bias_within_and_says_the_same() -> None:
    base = base_of()
    assert not fused(base.network)
    base.prepare("bfloat16", "eager")
    linear = {name for name, module in base.network.named_modules() if type(module) is nn.Linear}
    assert fused(base.network) == linear
    batch = inputs_of(base, DATA.batch(range(8), int(DATA.lengths.max())))
    with torch.no_grad():
        within = base.network(**batch).logits
        unfuse(base.network)
        assert not fused(base.network)
        assert torch.equal(base.network(**batch).logits, within)


@needs_it
def test_a_network_above_the_limit_has_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "MOST", 100)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)).bfloat16().requires_grad_(False)
    fuse(layers)
    assert fused(layers) == {"0"}
    assert packed_of(layers[0]) is None


@needs_it
def test_a_patched_base_computes_with_its_new_weights() -> None:
    base = base_of()
    base.prepare("bfloat16", "eager")
    name, layer = next(iter(base.layers.items()))
    patch = {name: LowRank(torch.ones(layer.d_out, 1), torch.ones(1, layer.d_in))}
    batch = inputs_of(base, DATA.batch(range(8), int(DATA.lengths.max())))
    with torch.no_grad():
        before = base.network(**batch).logits
        base.set_log(BaseLog((patch,)))
        after = base.network(**batch).logits
        assert not torch.equal(after, before)
        unfuse(base.network)
        assert torch.equal(base.network(**batch).logits, after)


@needs_it
@pytest.mark.parametrize("again", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_layer_is_copied_and_pickled_without_its_packed_weight(again) -> None:
    layer = nn.Linear(4, 3).bfloat16().requires_grad_(False)
    fuse(layer)
    assert packed_of(layer) is not None
    other = again(layer)
    assert packed_of(other) is None
    x = torch.linspace(-1, 1, 8).view(2, 4).bfloat16()
    assert torch.equal(other(x), layer(x))
    assert vars(other)["forward"].module is other


def test_other_dtypes_are_left_as_they_are() -> None:
    base = base_of()
    base.prepare("float32", "eager")
    assert not fused(base.network)


@needs_it
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_layer_that_trains_after_all_gets_its_gradients(part: str) -> None:
    layer = nn.Linear(4, 3).bfloat16().requires_grad_(False)
    fuse(layer)
    assert is_plain(layer)
    layer.get_parameter(part).requires_grad_(True)
    assert not is_plain(layer)
    layer(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert layer.get_parameter(part).grad is not None


@needs_it
def test_a_forward_of_somebody_else_stays() -> None:
    layer = nn.Linear(4, 3).bfloat16().requires_grad_(False)
    layer.forward = own = lambda x: x
    fuse(layer)
    assert vars(layer)["forward"] is own
    assert not is_plain(layer)
    unfuse(layer)
    assert vars(layer)["forward"] is own


def test_layers_with_hooks_or_of_other_classes_are_not_plain() -> None:
    class Own(nn.Linear):
        pass

    layer = nn.Linear(2, 2).requires_grad_(False)
    assert is_plain(layer)
    assert not is_plain(Own(2, 2).requires_grad_(False))
    layer.register_forward_hook(lambda *_: None)
    assert not is_plain(layer)


@needs_it
def test_ejecting_gives_the_modules_back_as_they_were() -> None:
    base = base_of()
    base.prepare("bfloat16", "eager")
    eject(base.network)
    assert not [name for name, module in base.network.named_modules() if "forward" in vars(module)]


def test_a_block_is_not_asked_for_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of(bert())
    seen = []
    plain = inspect._signature_from_function  # type: ignore[attr-defined]
    monkeypatch.setattr(inspect, "_signature_from_function", lambda *a, **k: seen.append(a[1]) or plain(*a, **k))
    batch = inputs_of(base, DATA.batch(range(2), int(DATA.lengths.max())))
    with torch.no_grad():
        expected = base.network(**batch).logits
        assert not [one for one in seen if one.__name__ == "feed_forward_chunk"]
        eject(base.network)
        assert not [name for name, m in base.network.named_modules() if "feed_forward_chunk" in vars(m)]
        base.network(**batch)
        assert [one for one in seen if one.__name__ == "feed_forward_chunk"]
    assert expected.isfinite().all()
