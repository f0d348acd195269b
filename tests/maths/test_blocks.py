"""Which blocks an emulator keeps, and which layers are the outer ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.maths.blocks import block_name, block_of, kept_blocks, outer_layers


def test_of_six_blocks_half_dropped_0_2_and_5_stay() -> None:
    """N28."""
    assert kept_blocks(6, 0.5) == [0, 2, 5]
    assert kept_blocks(6, 0.0) == [0, 1, 2, 3, 4, 5] and kept_blocks(3, 0.6) == [0]


@given(st.integers(1, 60), st.floats(0, 0.99))
def test_kept_blocks_rise_from_the_first_to_the_last_and_are_as_many_as_said(count: int, drop: float) -> None:
    K = round(count * (1 - drop))
    if K < 1:
        with pytest.raises(ValueError, match="leaves none"):
            kept_blocks(count, drop)
        return
    found = kept_blocks(count, drop)
    assert len(found) == K and found == sorted(set(found)) and found[0] == 0
    assert K == 1 or found[-1] == count - 1


def test_drop_must_be_a_part() -> None:
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            kept_blocks(4, wrong)


def test_blocks_are_read_off_names() -> None:
    assert block_of("model.layers.12.self_attn.q_proj") == 12 and block_of("3.experts.7.up") == 3
    assert block_of("classifier") is None and block_of("dense1.weight") is None
    assert block_name("bert.encoder.layer.0.attention.self.query") == "bert.encoder.layer.0"
    with pytest.raises(ValueError, match="no numbered block"):
        block_name("head")


def test_outer_layers_are_those_of_the_first_and_last_blocks_that_have_any() -> None:
    names = [f"l.{i}.{part}" for i in (0, 1, 3, 6, 7) for part in "qv"]
    assert outer_layers(names, 1) == {"l.0.q", "l.0.v", "l.7.q", "l.7.v"}
    assert outer_layers(names, 2) == set(names) - {"l.3.q", "l.3.v"}
    assert outer_layers([*names, "pooler"], 9) == {*names, "pooler"}
