"""Cores inside factored layers: identity at the start, stacks, the way over the wire, what they may not stand in."""

from __future__ import annotations

import pytest
import torch

from coterie.engines.arrivals import check_arrival
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import Card, InnerCore, Layer, Model
from coterie.wire.codec import decode, encode

KEY = root_key(12)
FACTORED, PLAIN = Layer(7, 6, 3), Layer(7, 6)


def core(name: str = "H", k: int = 3) -> InnerCore:
    return InnerCore(KEY.fold(name).normal((k, k), dtype=torch.float64))


@pytest.mark.parametrize("k", [3, 32])  # of a size that is padded, and of one that is not
def test_the_identity_changes_no_bit_and_another_core_multiplies(k: int) -> None:
    z = KEY.fold("z").normal((2, 5, k), dtype=torch.float64)
    assert torch.equal(InnerCore.identity(k).inside(z.float()), z.float())
    H = core(k=k).core
    assert torch.allclose(InnerCore(H).inside(z), z @ H.mT, atol=1e-12)
    U, V = KEY.fold("U").normal((7, k), dtype=torch.float64), KEY.fold("V").normal((k, 6), dtype=torch.float64)
    assert torch.allclose(InnerCore(H).between(U, V), U @ H @ V, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [3, 32])
def test_a_core_acts_bit_for_bit_alike_where_it_trains_and_where_it_does_not(k: int, dtype: torch.dtype) -> None:
    H, z = KEY.fold("H").normal((2, k, k)), KEY.fold("z").normal((2, 5, k)).to(dtype)
    kept = H.clone()
    still, training = InnerCore(H).inside(z), InnerCore(H.clone().requires_grad_())
    assert torch.equal(training.inside(z), still) and training.inside(z).requires_grad
    with torch.no_grad():
        assert torch.equal(training.inside(z), still)
    assert torch.equal(H, kept) and torch.equal(training.core, kept)


def test_a_stack_acts_as_its_members_and_gives_them_back() -> None:
    terms = [core("a"), core("b")]
    stack = InnerCore.stack(terms, 16)
    z = KEY.fold("z").normal((2, 5, 3), dtype=torch.float64)
    for index, one in enumerate(terms):
        assert torch.allclose(stack.inside(z)[index], one.inside(z[index]), atol=1e-12)
        assert torch.equal(stack.unstack(index, one).core, one.core)
    assert core(k=3).signature != core(k=4).signature


def test_small_changes_of_the_diagonal_are_felt_in_half_precision() -> None:
    """1.001 is 1 in bfloat16; the change alone is not 0 there, and adds up over many entries."""
    H = torch.full((64, 64), 1e-3) + torch.eye(64)
    z = torch.ones(1, 1, 64, dtype=torch.bfloat16)
    assert float(InnerCore(H).inside(z).float().mean()) == pytest.approx(1.064, rel=1e-2)
    assert torch.equal(H.bfloat16().diagonal(), torch.ones(64, dtype=torch.bfloat16))


def test_it_is_no_matrix_by_itself() -> None:
    for call in (lambda: core().dense(), lambda: core().apply(torch.ones(1, 6))):
        with pytest.raises(ModelError, match="layer"):
            call()
    assert core().low_rank() is None
    assert set(Model(core={"w": core()}).parameters) == {"core.w.core"}


def test_it_travels_and_arrives_checked() -> None:
    back = decode(encode({"w": core()}))
    assert torch.equal(back["w"].core, core().core)
    check_arrival(back, Card("c", 1, 1, 1.0, {"w": FACTORED}))
    with pytest.raises(ModelError, match="client c, layer w: a core inside a layer that holds no factors"):
        check_arrival(back, Card("c", 1, 1, 1.0, {"w": PLAIN}))
    with pytest.raises(ModelError, match=r"layer w: a core \(3, 3\) inside a layer whose factors have rank 2"):
        check_arrival(back, Card("c", 1, 1, 1.0, {"w": Layer(7, 6, 2)}))
