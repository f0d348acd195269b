"""Routed experts: the fused pass against a loop, routing, stacks, what trains and what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines.world import FAST, base, text
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.routed_loop import routed_output, token_weights

from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import Fit, Fitted, Layer, Model, Routed, copied, map_tensors
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.wire.codec import decode, encode

M, D_OUT, D_IN = 3, 5, 4


def term(
    seed: int = 0,
    *,
    rank: int = 2,
    shared: bool = False,
    bias: bool = False,
    allowed: list[bool] | None = None,
    outputs: list[int] | None = None,
    top: int | None = None,
    d_out: int = D_OUT,
    d_in: int = D_IN,
    dtype: torch.dtype = torch.float64,
) -> Routed:
    key = root_key(seed)
    K = M if outputs is None else len(outputs)
    return Routed(
        tuple(key.fold("B", e).normal((d_out, rank), dtype=dtype) for e in range(M)),
        tuple(key.fold("A", e).normal((rank, d_in), dtype=dtype) for e in range(1 if shared else M)),
        key.fold("router").normal((K, d_in), dtype=dtype),
        1.5,
        key.fold("bias").normal((K,), dtype=dtype) if bias else None,
        None if outputs is None else torch.tensor(outputs),
        None if allowed is None else torch.tensor(allowed),
        top,
    )


KINDS: list[dict[str, Any]] = [
    {},
    {"shared": True, "bias": True},
    {"allowed": [True, False, True]},
    {"outputs": [0, 1, 2, 1, 1], "top": 3},
    {"outputs": [0, 1, 2, 2, 2], "top": 2, "allowed": [True, False, True], "shared": True},
    {"top": 1},
    {"top": 9},
]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 10**6), st.booleans())
def test_the_fused_pass_is_the_loop_over_tokens_and_experts(kind: dict[str, Any], seed: int, drops: bool) -> None:
    one = term(seed, **kind)
    x = root_key(seed).fold("x").normal((7, D_IN), dtype=torch.float64)
    dropped = x * (root_key(seed).fold("d").uniform((7, D_IN), 0, 1, torch.float64) < 0.8) if drops else x
    assert torch.allclose(one.apply_dropped(x, dropped), routed_output(one, x, dropped), atol=1e-12)
    assert torch.allclose(one.apply(x), routed_output(one, x, x), atol=1e-12)
    assert torch.allclose(one.weights(x).sum(dim=-1), torch.ones(7, dtype=torch.float64), atol=1e-14)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 6))
def test_a_stack_acts_as_its_members_and_gives_them_back(kind: dict[str, Any], ranks: list[int], pad: int) -> None:
    members = [term(i, rank=r, **kind) for i, r in enumerate(ranks)]
    stack = Routed.stack(members, pad)
    x = root_key(9).normal((len(ranks), 6, D_IN), dtype=torch.float64)
    y = stack.apply(x)
    for index, one in enumerate(members):
        assert torch.allclose(y[index], one.apply(x[index]), atol=1e-12)
        assert encode(stack.unstack(index, one)) == encode(copied(one))


def test_masks_and_owners_are_data_and_may_differ_within_a_stack() -> None:
    members = [
        term(i, outputs=outputs, allowed=allowed, top=2)
        for i, (outputs, allowed) in enumerate(
            [([0, 1, 2, 0, 0], [True, True, True]), ([0, 1, 2, 2, 2], [False, True, True])]
        )
    ]
    assert members[0].signature == members[1].signature
    x = root_key(9).normal((2, 6, D_IN), dtype=torch.float64)
    y = Routed.stack(members, 0).apply(x)
    for index, one in enumerate(members):
        assert torch.allclose(y[index], routed_output(one, x[index], x[index]), atol=1e-12)
    assert members[0].signature != replace(members[0], allowed=None).signature
    assert members[0].signature != replace(members[0], top=3).signature


def test_the_routing_example_of_the_specification() -> None:
    """N18: M = 2, own expert 1, outputs point to (0, 1, 1); the top two count."""
    A, B = (torch.ones(1, 3, dtype=torch.float64),) * 2, (torch.ones(2, 1, dtype=torch.float64),) * 2
    router = torch.eye(3, dtype=torch.float64)
    one = Routed(B, A, router, outputs=torch.tensor([0, 1, 1]), top=2)
    x = torch.tensor([[0.2, 0.5, 0.3], [0.5, 0.3, 0.2]], dtype=torch.float64).log()
    assert torch.allclose(one.weights(x), torch.tensor([[0, 1.0], [0.625, 0.375]], dtype=torch.float64), atol=1e-14)
    assert token_weights(x[1].tolist(), [0, 1, 1], [True, True], 2) == pytest.approx({0: 0.625, 1: 0.375})


def test_among_equal_outputs_the_lower_ones_count() -> None:
    one = replace(term(outputs=[2, 1, 0, 0, 0], top=2), router=torch.zeros(5, D_IN, dtype=torch.float64))
    weights = one.weights(torch.ones(1, D_IN, dtype=torch.float64))
    assert weights.tolist() == [[0.0, 0.5, 0.5]]


def test_weights_that_no_input_moves_make_a_fixed_mixture() -> None:
    one = term(shared=True, bias=True)
    one = replace(one, router=torch.zeros_like(one.router))
    x = root_key(2).normal((6, D_IN), dtype=torch.float64)
    assert one.bias is not None
    mixed = sum(p * B for p, B in zip(one.bias.softmax(0), one.B, strict=True))
    assert torch.allclose(one.apply(x), 1.5 * x @ (mixed @ one.A[0]).T, atol=1e-12)


def test_equal_experts_are_one_low_rank_term() -> None:
    one = term(outputs=[0, 1, 2, 1, 1], top=3)
    one = replace(one, B=(one.B[0],) * M, A=(one.A[0],) * M)
    x = root_key(2).normal((6, D_IN), dtype=torch.float64)
    assert torch.allclose(one.apply(x), one.expert(2).apply(x), atol=1e-12)


def test_an_expert_that_is_not_allowed_has_no_weight_and_no_gradient() -> None:
    one = term(allowed=[True, False, True])
    held = {name: value.clone().requires_grad_() for name, value in one.parameters.items()}
    x = root_key(3).normal((6, D_IN), dtype=torch.float64)
    live = one.with_parameters(held)
    assert float(live.weights(x)[:, 1].detach().abs().max()) == 0.0
    live.apply(x).square().sum().backward()
    for name in ("B.1", "A.1"):
        assert float(held[name].grad.abs().max()) == 0.0  # type: ignore[union-attr]
    router = held["router"].grad
    assert router is not None and float(router[1].abs().max()) == 0.0 and float(router[0].abs().max()) > 0.0


def test_it_travels_whole() -> None:
    model = Model(experts={"w": term(outputs=[0, 1, 2, 1, 1], top=3, allowed=[True, True, False])})
    back = decode(encode(model))["experts"]["w"]
    x = root_key(2).normal((6, D_IN), dtype=torch.float64)
    assert torch.equal(back.apply(x), model["experts"]["w"].apply(x)) and back.top == 3


LAYER = Layer(D_OUT, D_IN)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: replace(term(), B=term(d_out=6).B), "do not fit a layer of 5 x 4"),
        (lambda: replace(term(), A=term().A[:2]), "do not fit a layer of 5 x 4"),
        (lambda: replace(term(), router=torch.zeros(3, 5)), "cannot read inputs of 4"),
        (lambda: replace(term(), bias=torch.zeros(2)), "cannot read inputs of 4"),
        (lambda: replace(term(), router=torch.zeros(4, 4)), "4 outputs of the router for 3 experts"),
        (lambda: replace(term(outputs=[0, 1, 2]), outputs=torch.tensor([0, 1, 3])), "must point to one of 3 experts"),
        (lambda: term(allowed=[False, False, False]), "must be allowed"),
        (lambda: term(outputs=[0, 0, 1], allowed=[False, False, True]), "must be allowed"),
        (lambda: term(allowed=[True, True]), "must be allowed"),
        (lambda: term(top=0), "top 0 would leave no expert"),
        (lambda: term(rank=4), "experts of rank 4 are above this client's rank 3"),
    ],
)
def test_what_does_not_fit_is_named(made: Any, said: str) -> None:
    with pytest.raises(ModelError, match=f"^client c, layer w: .*{said}"):
        made().check("client c, layer w", LAYER, 3)
    term(rank=3, shared=True, bias=True).check("client c, layer w", LAYER, 3)


def test_it_has_no_matrix_of_its_own() -> None:
    with pytest.raises(ModelError, match="another matrix for every token"):
        term().dense()


def asked(index: int, own: int, *, rank: int = 2, dtype: torch.dtype = torch.float64) -> Ask:
    """A client that trains one expert and the router of every layer; masks differ from client to client."""
    outputs = [0, 1, 2, *[own] * 2]
    made = {
        name: term(
            index, rank=rank, outputs=outputs, allowed=[True, index != 1, True], top=3, d_out=32, d_in=32, dtype=dtype
        )
        for name in base().layers
    }
    fit = Fit(Model(experts=made), train=(f"experts.*.B.{own}", f"experts.*.A.{own}", "experts.*.router"))
    return Ask(f"c{index}", fit, "base", dict(base().head), text(20, seed=index), root_key(index))


def trained(asks: list[Ask], together: int, dtype: str = "float64", **changes: Any) -> list[Model]:
    settings_ = TrainSettings(**{**FAST.__dict__, "optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.1, **changes})
    plan = Plan(dtype=dtype, clients_per_step=together, padding_rank=4)  # type: ignore[arg-type]
    answers = Executor({"base": base()}, settings_, plan).answer(asks)
    for answer in answers:
        assert isinstance(answer, Done) and isinstance(answer.answer, Fitted), answer
    return [answer.answer.model for answer in answers]  # type: ignore[union-attr]


def test_passive_experts_stay_bitwise_under_decay_while_own_expert_and_router_move() -> None:
    for own, ask in ((0, asked(0, 0)), (2, asked(1, 2))):
        (after,) = trained([ask], 1)
        assert isinstance(ask.request, Fit)
        for name, value in ask.request.initial.parameters.items():
            moves = name.endswith((f".B.{own}", f".A.{own}", ".router"))
            assert torch.equal(after.parameters[name], value) != moves, name


def test_clients_of_different_masks_owners_and_ranks_train_in_one_stack_as_alone() -> None:
    asks = [asked(0, 0), asked(1, 2), asked(2, 1, rank=4)]
    for changes in ({}, {"dropout": 0.2}):
        alone, stacked = trained(asks, 1, **changes), trained(asks, 3, **changes)
        for one, other in zip(alone, stacked, strict=True):
            for name, value in one.parameters.items():
                assert float((value - other.parameters[name]).abs().max()) <= 1e-9, name


def test_company_changes_no_bit() -> None:
    single = [asked(i, own, dtype=torch.float32) for i, own in enumerate((0, 2, 1))]
    alone, stacked = trained(single, 1, "float32"), trained(single, 3, "float32")
    for one, other in zip(alone, stacked, strict=True):
        assert encode(one) == encode(other)


def test_dropout_acts_on_the_experts_input_and_not_on_the_routers() -> None:
    """With an expert's factors zero the output is zero whatever is dropped, and the router's weights stay."""
    ask = asked(0, 0)
    plain, dropped = trained([ask], 1), trained([ask], 1, dropout=0.5)
    assert any(not torch.equal(plain[0].parameters[n], v) for n, v in dropped[0].parameters.items())
    x = root_key(1).normal((5, D_IN), dtype=torch.float64)
    one = term()
    half = x * 0.5
    expected = torch.stack([e.apply(half) for e in map(one.expert, range(M))], dim=-2)
    mixed = (one.weights(x).unsqueeze(-1) * expected).sum(dim=-2)
    assert torch.allclose(one.apply_dropped(x, half), mixed, atol=1e-12)
    assert not torch.allclose(one.apply_dropped(x, half), one.apply(half), atol=1e-3)


def test_in_half_precision_weights_are_computed_in_fp32() -> None:
    one = map_tensors(term(), lambda tensor: tensor.float())
    x = root_key(1).normal((5, D_IN)).bfloat16()
    assert one.weights(x).dtype == torch.float32 and one.apply(x).dtype == torch.bfloat16
