"""HetLoRA: fixture N8, sparsity weights, a penalty that has a gradient, pruning that the server learns of."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from conformance.harness import Outcome, cards, deployed, gap, play, random_training, server
from engines.world import FAST, world
from engines.world import play as run_all
from hypothesis import given, settings
from hypothesis import strategies as st
from training.small import EXACT, PLAIN, STEPS, answers, ask, base_of, identical, lora, stacked, texts

from algorithms.fixtures import card, t2, term, uploads
from coterie.algorithms import FedIT, HetLoRA
from coterie.algorithms.factors import average_factors, cut_for
from coterie.algorithms.hetlora import sparsity_weighted
from coterie.engines.setting import Fault
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import Federation, Fit, LowRank, Model, TailNorm, tail_norm
from coterie.protocol.messages import map_tensors
from coterie.wire.codec import size


def scaled_training(factor: float) -> Any:
    """Every client multiplies what entered."""
    return lambda name, model: map_tensors(model, lambda tensor: factor * tensor)


def pruned(method: HetLoRA, ranks: dict[str, int], rounds: int, factor: float = 0.9) -> list[Outcome]:
    """A first round with random factors, then rounds that shrink all of them, the tails too."""
    outcomes = [play(method, cards(ranks), random_training())]
    for number in range(2, rounds + 2):
        state = outcomes[-1].state
        outcomes.append(play(method, cards(ranks), scaled_training(factor), state=state, number=number))
    return outcomes


def test_t2_is_weighted_by_the_norms_of_the_products() -> None:
    weighted = sparsity_weighted(uploads(t2()))
    assert [one.weight for one in weighted] == [0.25, 0.75]
    made = average_factors(weighted, 2)["w"]
    assert torch.equal(made.A, torch.tensor([[2.5, 0.0], [0.0, 0.0]], dtype=torch.float64))
    assert torch.equal(made.B, torch.diag(torch.tensor([1.0, 0.75], dtype=torch.float64)))


def test_weights_are_norms_of_scaled_products_also_of_layers_that_are_not_square() -> None:
    key = root_key(1)
    terms = {
        str(i): LowRank(key.fold("B", i).normal((7, 2)), key.fold("A", i).normal((2, 3)), float(i + 1))
        for i in range(3)
    }
    norms = [float(one.product().norm()) for one in terms.values()]
    made = [one.weight for one in sparsity_weighted(uploads(terms))]
    assert made == pytest.approx([norm / sum(norms) for norm in norms], rel=1e-6)


def test_with_equal_ranks_and_norms_it_is_fedit() -> None:
    """With one norm for all, so that the weights are uniform; the penalty apart, which is not in this training."""

    def trained(name: str, model: Model) -> Model:
        made = random_training()(name, model)["lora"]
        total = sum(one.product().square().sum() for one in made.values()).sqrt()
        return Model(lora={layer: replace(one, B=one.B / total) for layer, one in made.items()})

    members = cards({"a": 3, "b": 3, "c": 3})
    first = {kind: play(kind(), members, trained) for kind in (HetLoRA, FedIT)}
    assert gap(deployed(HetLoRA(), first[HetLoRA]), deployed(FedIT(), first[FedIT])) < 2e-6


def test_where_all_products_vanish_all_count_alike() -> None:
    still = {name: term([[0], [0]], [[1, 0]]) for name in ("1", "2")}
    assert [one.weight for one in sparsity_weighted(uploads(still, {"1": 0.9, "2": 0.1}))] == [0.5, 0.5]


def test_weights_may_be_found_layer_by_layer() -> None:
    big, small = term([[4], [0]], [[1, 0]]), term([[1], [0]], [[1, 0]])
    ups = [
        replace(one, payload={"u": big, "v": small} if one.card.id == "1" else {"u": small, "v": big})
        for one in uploads({"1": big, "2": small})
    ]
    start = HetLoRA().start(Federation((card("1", 1), card("2", 1)), 1), server(1))
    state = replace(start, lora={"u": start.lora["w"], "v": start.lora["w"]})
    both, each = (
        HetLoRA(per_layer=alone).aggregate(state, type(uploads(t2()))(list(ups)), server(1)).lora
        for alone in (False, True)
    )
    assert torch.allclose(both["u"].B, torch.tensor([[2.5], [0.0]], dtype=torch.float64))
    for layer in ("u", "v"):
        assert torch.allclose(each[layer].B, torch.tensor([[0.8 * 4 + 0.2 * 1], [0.0]], dtype=torch.float64))


def test_truncating_after_padding_gives_the_upload_back() -> None:
    one = term([[1], [2]], [[3, 4]])
    made = average_factors(uploads({"1": one}), 2)
    assert made["w"].rank == 2
    back = cut_for(made, card("1", 1))["w"]
    assert torch.equal(back.B, one.B) and torch.equal(back.A, one.A)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 9), st.booleans())
def test_the_penalty_of_a_stack_is_each_client_s_own_tail(ranks: list[int], pad: int, diagonal: bool) -> None:
    key = root_key(2)
    models, own = [], []
    for i, rank in enumerate(ranks):
        made = {
            layer: LowRank(
                key.fold(layer, "B", i).normal((5, rank), dtype=torch.float64),
                key.fold(layer, "A", i).normal((rank, 4), dtype=torch.float64),
                2.0,
                key.fold(layer, "d", i).normal((rank,), dtype=torch.float64) if diagonal else None,
            )
            for layer in ("u", "v")
        }
        models.append(Model(lora=made))
        own.append(TailNorm(int(0.8 * rank), 0.5 + i))
    found = TailNorm.stack(own, pad).value(Model.stack(models, pad))
    for i, (penalty, model) in enumerate(zip(own, models, strict=True)):
        start = int(penalty.start)
        expected = sum(float(one.left[:, start:].norm() * one.A[start:].norm()) for one in model["lora"].values())
        assert float(found[i]) == pytest.approx(float(penalty.weight) * expected, rel=1e-9)


def test_lam_has_a_gradient_by_the_tail_of_both_factors_and_none_at_zero() -> None:
    one = term([[1, 2], [3, 4]], [[1, 1], [2, 0]])
    leaves = [one.B.requires_grad_(), one.A.requires_grad_()]
    dB, dA = torch.autograd.grad(tail_norm(one, 1), leaves)
    assert not dB[:, 0].any() and not dA[0].any()
    assert torch.allclose(dB[:, 1], one.B[:, 1].detach() * 2 / 20**0.5)
    assert torch.allclose(dA[1], one.A[1].detach() * 20**0.5 / 2)
    fresh = [torch.zeros(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)]
    assert all(not grad.any() for grad in torch.autograd.grad(tail_norm(LowRank(*fresh), 1), fresh))


def test_with_the_penalty_a_client_s_bits_do_not_depend_on_its_company() -> None:
    for plan in (EXACT, PLAIN):
        base = base_of()
        asks = [
            ask(base, Fit(lora(base, r, name), penalties=[TailNorm(int(0.9 * r), 0.3)]), name, texts(18, name))
            for name, r in (("a", 2), ("b", 5), ("c", 16))
        ]
        together = answers(base, asks, STEPS, stacked(plan))
        alone = answers(base, asks, STEPS, replace(plan, clients_per_step=1))
        assert all(identical(one, other) for one, other in zip(together, alone, strict=True))
        assert all(one.answer.penalty_before > 0 for one in together)


def test_a_client_prunes_when_its_tail_has_shrunk_and_never_grows_again() -> None:
    outcomes = pruned(HetLoRA(), {"a": 2, "b": 4, "c": 6}, rounds=5)
    ranks = [dict(outcome.state.ranks) for outcome in outcomes]
    assert ranks[0] == {"a": 2, "b": 4, "c": 6}  # B = 0 before the first training: no tail has shrunk
    assert ranks[1] == {"a": 2, "b": 3, "c": 5}
    assert ranks[-1] == {"a": 2, "b": 2, "c": 2}  # a's rank is the smallest of all
    for before, after in pairwise(ranks):
        assert all(after[name] <= before[name] for name in after)


def test_a_tail_that_has_grown_prunes_nothing() -> None:
    assert pruned(HetLoRA(), {"a": 2, "b": 4}, rounds=2, factor=1.1)[-1].state.ranks == {"a": 2, "b": 4}


def test_r_min_and_gamma_bound_what_is_pruned() -> None:
    assert pruned(HetLoRA(r_min=3), {"a": 2, "b": 5}, rounds=4)[-1].state.ranks == {"a": 2, "b": 3}
    assert pruned(HetLoRA(r_min=1, gamma=0.5), {"a": 2, "b": 6}, rounds=1)[-1].state.ranks == {"a": 1, "b": 3}
    assert pruned(HetLoRA(r_min=1), {"a": 2, "b": 3}, rounds=5)[-1].state.ranks == {"a": 1, "b": 1}


def test_after_pruning_less_travels_both_ways_by_the_formula_at_the_new_rank() -> None:
    method, ranks = HetLoRA(), {"a": 2, "b": 6}
    outcomes = pruned(method, ranks, rounds=2)
    for before, outcome in pairwise(outcomes):
        for one in cards(ranks):
            sent, kept = (replace(one, rank=made.state.ranks[one.id]) for made in (before, outcome))
            down = sum(method.bytes_down(layer, sent) for layer in one.layers.values())
            up = sum(method.bytes_up(layer, kept) for layer in one.layers.values())
            assert size(outcome.bodies[one.id]).payload == down and size(outcome.payloads[one.id]).payload == up


def test_an_upload_that_did_not_arrive_has_pruned_nothing() -> None:
    train = replace(FAST, weight_decay=0.0, lr=0.05)
    method = HetLoRA(lam=20.0, gamma=0.5, r_min=1)
    ranks = [
        [dict(one.progress.state.ranks) for one in run_all(world(method, ranks=(2, 4, 8), train=train, faults=faults))]
        for faults in ((), (Fault("c2", 2, "late"),))
    ]
    assert ranks[0][0] == {"c0": 2, "c1": 4, "c2": 8} == ranks[1][0]
    assert ranks[0][1] == {"c0": 1, "c1": 2, "c2": 4}
    assert ranks[1][1] == {"c0": 1, "c1": 2, "c2": 8}


def test_the_penalty_drives_the_tail_down_in_real_training() -> None:
    tails = {}
    for lam in (0.0, 5.0):
        state = run_all(world(HetLoRA(lam=lam, gamma=0.6), ranks=(4, 4, 4), rounds=4))[-1].progress.state
        tails[lam] = sum(float(tail_norm(one, 2)) for one in state.lora.values())
    assert 0 < tails[5.0] < 0.5 * tails[0.0]


def test_the_mean_rank_is_measured_over_all_clients() -> None:
    measures = [one.metrics["measures"] for one in run_all(world(HetLoRA(), ranks=(2, 4, 16), sample=2))]
    assert measures[0] == {"average_rank": 22 / 3}


def test_unequal_scales_leave_products_alone() -> None:
    members = cards({"a": 2, "b": 2}, scale={"a": 1.0, "b": 4.0})
    method = HetLoRA()
    first = play(method, members, random_training())
    idle = play(method, members, lambda name, model: model, state=first.state, number=2)
    assert gap(deployed(method, idle), deployed(method, first)) < 1e-6


def test_what_cannot_be_used_is_refused() -> None:
    one = replace(card("1", 2), layers={"u": card("1", 2).layers["w"], "v": card("1", 2).layers["w"]})
    wide, thin = t2()["2"], t2()["1"]
    with pytest.raises(ModelError, match="client 1, layer v: rank 1 where 2 is expected"):
        HetLoRA().check({"u": wide, "v": thin}, one)
    for options, said in (({"lam": -1.0}, "lam"), ({"gamma": 1.0}, "gamma"), ({"r_min": 0}, "r_min")):
        with pytest.raises(ValueError, match=said):
            HetLoRA(**options)
