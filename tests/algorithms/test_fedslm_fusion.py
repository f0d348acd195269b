"""FedSLM's groups: exact averages inside, the barycentre of unequal ranks, what each layer counts with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.fedslm_worlds import KEY, W, averaged, begun, card, factors, fuse
from coterie.algorithms import FedSLM
from coterie.algorithms.fedslm_fusion import Groups, fused, trained_cores
from coterie.errors import ConfigError
from coterie.protocol import (
    Layer,
    LowRank,
)


def test_layers_of_other_networks_all_train_and_names_choose_some() -> None:
    one = card("a", 3, layers=("x.query", "x.value", "y.query"))
    assert set(trained_cores(one, None)) == set(one.layers)
    assert set(trained_cores(one, ("query",))) == {"x.query", "y.query"}
    assert set(trained_cores(one, ("y.query",))) == {"y.query"}
    for part in ("quarry", "uery"):  # an ending is whole words between dots
        with pytest.raises(ConfigError, match=rf"client a has no compressed layer '{part}'.*query"):
            trained_cores(one, ("query", part))
    with pytest.raises(ConfigError, match="trained: name a layer"):
        trained_cores(one, ())


def test_of_full_models_alone_all_layers_are_fused() -> None:
    B, A = KEY.fold("B").normal((6, 2)), KEY.fold("A").normal((2, 8))
    base = {"up_proj": W, "elsewhere": KEY.fold("Q").normal((6, 8), dtype=torch.float64)}
    found = fuse(Groups({}, {"base": {name: LowRank(B, A, 2.0) for name in base}}, {"base": {"b": 3}}), base)
    assert all(torch.allclose(found[name], base[name] + 2.0 * (B @ A).double()) for name in base)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_the_mean_of_cores_in_a_group_is_the_mean_of_the_products(k: int, examples: list[int]) -> None:
    cards = [card(f"c{i}", k, n) for i, n in enumerate(examples)]
    sent = {
        one.id: (one, {"up_proj": KEY.fold("core", one.id).normal((k, k), dtype=torch.float64)}, float(one.examples))
        for one in cards
    }
    state = averaged(FedSLM(), begun(FedSLM(), *cards), sent)
    U, V = factors(k)
    total = sum(examples)
    ideal = torch.stack([n / total * U @ core["up_proj"] @ V for one, core, n in sent.values()]).sum(dim=0)
    made = U @ state.groups.cores[f"ratio-{k}"]["up_proj"] @ V
    assert float((made - ideal).norm() / ideal.norm()) < 1e-12


def test_fedslm_barycentre_diag_4_1_rank_1_and_full() -> None:
    """W = diag(4, 1), groups of rank 1 and of the full model with equal data, no training: W_g = diag(4, 0.5)."""
    base = torch.diag(torch.tensor([4.0, 1.0]))
    one = replace(card("a", 1), layers={"up_proj": Layer(2, 2, 1)})
    two = replace(card("b", None), layers={"up_proj": Layer(2, 2)})
    state = begun(FedSLM(), one, two)
    sent = {one.id: (one, FedSLM().send(state, one), 0.5), two.id: (two, FedSLM().send(state, two), 0.5)}
    after = averaged(FedSLM(), state, sent)
    assert torch.allclose(fuse(after.groups, {"up_proj": base})["up_proj"], torch.diag(torch.tensor([4.0, 0.5])))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_zero_training_of_one_rank_loses_the_tail_of_the_spectrum(k: int) -> None:
    groups = Groups({f"ratio-{k}": {"up_proj": torch.eye(k)}}, {}, {f"ratio-{k}": {"a": 5}})
    lost = float((fuse(groups, {"up_proj": W})["up_proj"] - W).norm())
    assert lost == pytest.approx(float(torch.linalg.svdvals(W)[k:].norm()), rel=1e-6)


def test_every_group_counts_by_the_examples_of_those_who_ever_answered() -> None:
    cards = [card("a", 2, 10), card("b", 2, 30), card("c", 4, 60), card("d", None, 100), card("e", 3, 500)]
    method = FedSLM()
    state = begun(method, *cards)
    for names in (("a", "d"), ("b", "c"), ("a",)):
        sent = {one.id: (one, method.send(state, one), 1.0) for one in cards if one.id in names}
        state = averaged(method, state, sent)
    shares = state.groups.shares()
    assert shares == pytest.approx({"ratio-2": 0.2, "ratio-4": 0.3, "base": 0.5})
    W_g = fuse(state.groups, {"up_proj": W})["up_proj"]
    expected = 0.2 * torch.mm(*factors(2)) + 0.3 * torch.mm(*factors(4)) + 0.5 * W
    assert torch.allclose(W_g, expected, atol=1e-10)


def test_a_group_that_does_not_answer_keeps_its_state() -> None:
    cards, method = [card("a", 2), card("b", 4), card("c", None)], FedSLM()
    state = begun(method, *cards)
    moved = {"up_proj": KEY.fold("moved").normal((2, 2))}
    after = averaged(method, state, {"a": (cards[0], moved, 1.0)})
    assert torch.equal(after.groups.cores["ratio-2"]["up_proj"], moved["up_proj"])
    assert torch.equal(after.groups.cores["ratio-4"]["up_proj"], torch.eye(4))
    assert torch.equal(after.groups.full["base"]["up_proj"].A, state.groups.full["base"]["up_proj"].A)


def test_the_full_group_counts_with_its_adapter_where_others_are_compressed() -> None:
    B, A = KEY.fold("B").normal((6, 2)), KEY.fold("A").normal((2, 8))
    lora = {name: LowRank(B, A, 2.0) for name in ("up_proj", "elsewhere")}
    groups = Groups({"ratio-3": {"up_proj": torch.eye(3)}}, {"base": lora}, {"ratio-3": {"a": 1}, "base": {"b": 3}})

    def weights(names: tuple[str, ...], spec: str | None) -> Any:
        (name,) = names
        return {name: factors(3) if spec == "ratio-3" and name == "up_proj" else W}

    program, answer = fused(groups, ["up_proj", "elsewhere"], "literal"), None
    with pytest.raises(StopIteration) as stop:
        while True:
            asked = program.send(answer)
            answer = weights(asked.names, asked.spec)
    found = stop.value.value
    assert set(found) == {"up_proj"}  # a layer outside S keeps the server's weights
    expected = 0.25 * torch.mm(*factors(3)) + 0.75 * (W + 2.0 * (B @ A).double())
    assert torch.allclose(W + found["up_proj"].W, expected, atol=1e-6)


def test_trained_only_takes_the_servers_weights_for_layers_that_a_group_left_alone() -> None:
    base = {"up_proj": W, "q_proj": KEY.fold("Q").normal((6, 8), dtype=torch.float64)}
    core = KEY.fold("core").normal((3, 3), dtype=torch.float64)
    groups = Groups({"ratio-3": {"up_proj": core}}, {}, {"ratio-3": {"a": 1}})
    literal, kept = fuse(groups, base), fuse(groups, base, "trained_only")
    U, V = factors(3)
    assert torch.allclose(literal["up_proj"], U @ core @ V) and torch.allclose(kept["up_proj"], U @ core @ V)
    assert torch.allclose(kept["q_proj"], base["q_proj"])
    assert torch.allclose(literal["q_proj"], torch.mm(*factors(3, base["q_proj"])))
    assert float((literal["q_proj"] - base["q_proj"]).norm()) > 0.1
