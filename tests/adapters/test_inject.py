"""Wrapped networks compute W x + sum of s B A x for each client of a stack, and nothing else."""

from __future__ import annotations

import pytest
import torch
from training.small import KEY, base_of, bert, gpt2, lora, texts

from coterie.adapters.inject import Binding, _added, eject
from coterie.errors import ModelError
from coterie.models.loading import inputs_of
from coterie.protocol import LowRank, Model

DATA = texts(8, "inject")


def batch(count: int = 8) -> dict[str, torch.Tensor]:
    return DATA.batch(range(count), int(DATA.lengths.max()))


def logits(
    base, size: int, model: Model | None, rows: dict[str, torch.Tensor], head=None, dropout=None
) -> torch.Tensor:
    with torch.no_grad(), base.slots.bound(size, model, head, dropout):
        return base.network(**inputs_of(base, rows)).logits


@pytest.fixture
def base():
    made = base_of()
    made.prepare("float64", "eager")
    return made


def test_an_unbound_network_is_the_plain_network(base) -> None:
    plain = bert().eval().double()
    plain.set_attn_implementation("eager")
    for name, value in base.head.items():
        plain.get_parameter(name).data.copy_(value)
    expected = plain(**inputs_of(base, batch())).logits
    assert torch.equal(base.network(**inputs_of(base, batch())).logits, expected)


@pytest.mark.parametrize("network", [bert, gpt2])
def test_a_stack_of_two_equals_each_client_s_dense_network(network) -> None:
    base = base_of(network(), None if network is gpt2 else ("query", "output.dense"))
    base.prepare("float64", "eager")
    models = [lora(base, 3, "a", 0.5), lora(base, 5, "b", 2.0)]
    heads = [{n: KEY.fold(n, i).normal(v.shape, dtype=torch.float64) for n, v in base.head.items()} for i in (0, 1)]
    head = {name: torch.stack([one[name] for one in heads]) for name in base.head}
    got = logits(base, 2, Model.stack(models, 8), batch(), head)
    for i, (model, own) in enumerate(zip(models, heads, strict=True)):
        plain = network().eval().double()
        for layer, term in model["lora"].items():
            linear = plain.get_submodule(layer)
            linear.weight.data += term.product().mT if network is gpt2 else term.product()
        for name, value in own.items():
            plain.get_parameter(name).data.copy_(value)
        rows = {name: value[4 * i : 4 * i + 4] for name, value in batch().items()}
        assert torch.allclose(got[4 * i : 4 * i + 4], plain(**inputs_of(base, rows)).logits, atol=1e-12)


def test_logits_equal_those_of_peft_s_own_layers(base) -> None:
    peft = pytest.importorskip("peft")
    model = lora(base, 4, scale=0.5)
    config = peft.LoraConfig(r=4, lora_alpha=2, target_modules=["query", "value"])
    plain = bert().eval().double()
    for name, value in base.head.items():
        plain.get_parameter(name).data.copy_(value)
    theirs = peft.get_peft_model(plain, config).eval().double()
    for layer, term in model["lora"].items():
        slot = theirs.get_submodule(f"base_model.model.{layer}")
        slot.lora_A["default"].weight.data.copy_(term.A)
        slot.lora_B["default"].weight.data.copy_(term.B)
    ours = logits(base, 1, Model.stack([model]), batch())
    assert torch.allclose(ours, theirs(**inputs_of(base, batch())).logits, atol=1e-12)


def test_several_terms_of_a_layer_are_summed_and_a_diagonal_counts(base) -> None:
    plain, other = lora(base, 3)["lora"], lora(base, 2, "other", 0.3)["lora"]
    diagonal = {
        layer: LowRank(term.B, term.A, term.scale, KEY.fold("d", layer).normal((2,), dtype=torch.float64))
        for layer, term in other.items()
    }
    both = logits(base, 1, Model.stack([Model(lora=plain, core=diagonal)]), batch())
    merged = {
        layer: LowRank(
            torch.cat([term.B, diagonal[layer].left * 0.15], dim=1),
            torch.cat([term.A, diagonal[layer].A]),
            term.scale,
        )
        for layer, term in plain.items()
    }
    assert torch.allclose(both, logits(base, 1, Model.stack([Model(lora=merged)]), batch()), atol=1e-12)


def test_the_fused_sum_is_the_term_s_own_rule(base) -> None:
    term = Model.stack([lora(base, 3, "a"), lora(base, 5, "b")], 6)["lora"][next(iter(base.layers))]
    x = KEY.fold("x").normal((2, 7, 32), dtype=torch.float64)
    y = KEY.fold("y").normal((2, 7, 32), dtype=torch.float64)
    assert torch.allclose(_added(y, term, x), y + term.apply(x), atol=1e-13)


def test_dropout_sees_the_stack_s_inputs_and_the_base_path_does_not(base) -> None:
    model = Model.stack([lora(base, 3, "a"), lora(base, 3, "b")])
    seen = []

    def all_dropped(name: str, x: torch.Tensor) -> torch.Tensor:
        seen.append((name, tuple(x.shape)))
        return torch.zeros_like(x)

    with base.slots.everywhere():
        dropped = logits(base, 2, model, batch(), dropout=all_dropped)
        assert torch.equal(dropped, logits(base, 2, None, batch()))
    tokens = 4 * batch()["input_ids"].shape[1]
    assert seen == [("lora", (2, tokens, 32))] * len(base.layers)


def test_a_term_for_an_unknown_layer_and_a_foreign_head_are_refused(base) -> None:
    odd = Model(lora={"nowhere": LowRank(torch.ones(1, 2, 1), torch.ones(1, 1, 2))})
    with pytest.raises(ModelError, match="'nowhere'"), base.slots.bound(1, odd, None):
        pass
    with (
        pytest.raises(ModelError, match="head does not fit"),
        base.slots.bound(1, None, {"score.weight": torch.ones(1)}),
    ):
        pass


def test_everything_is_unbound_after_an_error(base) -> None:
    with pytest.raises(RuntimeError, match="halfway"), base.slots.bound(1, Model.stack([lora(base, 2)]), None):
        raise RuntimeError("halfway")
    assert base.slots.binding == Binding()


@pytest.mark.parametrize("network", [bert, gpt2])
def test_eject_puts_the_very_modules_back(network) -> None:
    plain = network()
    before = dict(plain.named_modules())
    base_of(plain, "all-linear")
    assert dict(plain.named_modules()).keys() > before.keys()
    eject(plain)
    after = dict(plain.named_modules())
    assert after.keys() == before.keys() and all(after[name] is module for name, module in before.items())
