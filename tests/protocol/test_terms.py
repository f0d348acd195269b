"""Terms: leading axes, padding, scales, shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import BaseLog, Layer, LowRank, Model


def term(
    d_out: int = 5, d_in: int = 4, rank: int = 3, scale: float = 2.0, seed: int = 0, diagonal: bool = False
) -> LowRank:
    key = root_key(seed)
    return LowRank(
        key.fold("B").normal((d_out, rank), dtype=torch.float64),
        key.fold("A").normal((rank, d_in), dtype=torch.float64),
        scale,
        key.fold("d").normal((rank,), dtype=torch.float64) if diagonal else None,
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans(), st.integers(0, 9))
def test_a_stack_acts_as_its_members_and_gives_them_back(ranks: list[int], diagonal: bool, pad: int) -> None:
    terms = [term(rank=r, scale=1.0 + i, seed=i, diagonal=diagonal) for i, r in enumerate(ranks)]
    stack = LowRank.stack(terms, pad)
    x = root_key(9).normal((len(ranks), 6, 4), dtype=torch.float64)
    y = stack.apply(x)
    for index, one in enumerate(terms):
        assert torch.allclose(y[index], x[index] @ one.dense().T, atol=1e-12)
        back = stack.unstack(index, one)
        assert torch.equal(back.B, one.B) and torch.equal(back.A, one.A) and back.scale == one.scale
        assert torch.allclose(stack.product()[index], one.product(), atol=1e-12)


def test_padding_and_cutting_leave_the_product_or_its_leading_part() -> None:
    one = term(diagonal=True)
    assert torch.allclose(one.padded(7).product(), one.product(), atol=1e-14)
    assert torch.equal(one.padded(7).truncated(3).A, one.A)
    assert one.padded(2) is one


def test_rescaling_keeps_the_product() -> None:
    one = term(scale=2.0)
    assert one.rescaled(2.0) is one
    assert torch.allclose(one.rescaled(0.5).product(), one.product(), atol=1e-12)
    with pytest.raises(ModelError, match="scale of 0"):
        one.rescaled(0.0)


def test_wrong_shapes_and_ranks_are_named() -> None:
    with pytest.raises(ModelError, match=r"client c, layer w: B \(5, 3\) and A \(3, 4\) do not fit a layer of 5 x 6"):
        term().check("client c, layer w", Layer(5, 6), 3)
    with pytest.raises(ModelError, match="rank 3 is above this client's rank 2"):
        term().check("client c, layer w", Layer(5, 4), 2)


def test_a_model_knows_only_its_vocabulary() -> None:
    with pytest.raises(ModelError, match="no term 'lorra'; did you mean 'lora'"):
        Model(lorra={"w": term()})


def test_parameters_have_full_names_and_can_be_replaced() -> None:
    model = Model(lora={"x.w": term()}, shared={"x.w": term(seed=1)})
    assert set(model.parameters) == {"lora.x.w.B", "lora.x.w.A", "shared.x.w.B", "shared.x.w.A"}
    changed = model.with_parameters({"lora.x.w.B": torch.zeros(5, 3, dtype=torch.float64)})
    assert float(changed["lora"]["x.w"].B.norm()) == 0
    assert torch.equal(changed["shared"]["x.w"].B, model["shared"]["x.w"].B)


def test_a_base_log_tells_what_a_holder_of_an_old_version_lacks() -> None:
    log = BaseLog().add({"w": term()}).add({"w": term(seed=1)})
    assert log.version == 2 and len(log.since(1)) == 1 and log.since(2) == ()
    with pytest.raises(ValueError, match="version 3 of a base that has 2"):
        log.since(3)
