"""Cores between frozen bases: how wide and how many heads, what the bases are like, and what may arrive."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.dense_core import dense_core

from coterie.algorithms.cores import (
    Heads,
    HeadSizes,
    between_bases,
    check_heads,
    require_orthogonal,
    squared_norms,
)
from coterie.errors import ConfigError, ModelError
from coterie.maths.keys import root_key
from coterie.protocol import Card, Layer

KEY = root_key(6)
LAYERS = {"first": Layer(24, 16), "second": Layer(20, 20)}
SIZES = {"first": (3, 4, 4), "second": (3, 5, 5)}


def cores(sizes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: KEY.fold(name).normal(size) for name, size in sizes.items()}


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 400), st.integers(1, 400))
def test_a_head_costs_no_more_than_its_part_of_a_low_rank_pair_and_all_fit_side_by_side(
    heads: int, rank: int, m: int, n: int
) -> None:
    r = HeadSizes(heads, rank).width(Layer(m, n))
    assert r * r <= rank * (m + n) and heads * r <= min(m, n)
    fits = (r + 1) ** 2 <= rank * (m + n) and heads * (r + 1) <= min(m, n)
    assert not fits  # as wide as that


def test_gaussian_heads_need_no_room_beside_each_other() -> None:
    layer = Layer(24, 16)
    assert HeadSizes(heads=8).width(layer) == 2
    assert HeadSizes(heads=8, bases="gaussian").width(layer) == 8  # floor of sqrt 80


def test_a_given_width_is_that_of_all_layers() -> None:
    sizes = HeadSizes(heads=2, head_rank=3).sizes(LAYERS)
    assert sizes == {"first": (2, 3, 3), "second": (2, 3, 3)}


@pytest.mark.parametrize(("rank", "number"), [(1, 1), (2, 1), (5, 2), (8, 4), (64, 4)])
def test_a_client_trains_as_many_heads_as_its_rank_pays_for_one_at_least(rank: int, number: int) -> None:
    assert HeadSizes(heads=4, rank_per_head=2).number(Card("a", rank, 1, 1.0, LAYERS)) == number


def test_sizes_below_one_are_refused() -> None:
    for wrong in ({"heads": 0}, {"rank_per_head": 0}, {"head_rank": 0}):
        with pytest.raises(ValueError, match="must be 1 at least"):
            HeadSizes(**wrong)


def test_orthonormal_bases_are_orthonormal_over_all_heads_and_differ_by_layer_and_side() -> None:
    made = between_bases(cores(SIZES), LAYERS, KEY, "orthonormal")
    for name, one in made.items():
        rank = 3 * SIZES[name][1]
        assert one.U.shape == (LAYERS[name].d_out, rank) and one.V.shape == (rank, LAYERS[name].d_in)
        assert torch.allclose(one.U.mT @ one.U, torch.eye(rank), atol=1e-5)
        assert torch.allclose(one.V @ one.V.mT, torch.eye(rank), atol=1e-5)
        assert one.gain is None
    second = made["second"]
    assert not torch.allclose(second.U, second.V.mT)


def test_what_a_core_adds_is_the_sum_over_its_heads() -> None:
    made = between_bases(cores(SIZES), LAYERS, KEY, "gaussian", gain=True)
    for one in made.values():
        r = one.core.shape[-1]
        assert one.gain is not None and torch.equal(one.gain, torch.ones(3))
        parts = [one.U[:, j * r : (j + 1) * r] @ one.core[j] @ one.V[j * r : (j + 1) * r] for j in range(3)]
        assert torch.allclose(dense_core(one), torch.stack(parts).sum(0), atol=1e-4)


def test_both_sides_draw_the_same_bases_from_one_key_and_others_from_another() -> None:
    one, same = (between_bases(cores(SIZES), LAYERS, KEY, "gaussian")["first"] for _ in range(2))
    other = between_bases(cores(SIZES), LAYERS, KEY.fold("other"), "gaussian")["first"]
    assert torch.equal(one.U, same.U) and torch.equal(one.V, same.V)
    assert not torch.equal(one.U, other.U) and not torch.equal(one.V, other.V)


def test_heads_that_cannot_all_be_orthogonal_are_refused() -> None:
    require_orthogonal({"first": (4, 4, 4)}, LAYERS, "This")
    with pytest.raises(ConfigError, match=r"This: 5 heads of width 4 do not fit layer first, in which only 16"):
        require_orthogonal({"first": (5, 4, 4)}, LAYERS, "This")
    with pytest.raises(ConfigError, match="5 heads of width 1 do not fit layer tiny, in which only 4"):
        require_orthogonal(HeadSizes(heads=5).sizes({"tiny": Layer(4, 9)}), {"tiny": Layer(4, 9)}, "This")


def test_norms_are_summed_over_layers_for_each_head() -> None:
    first, second = torch.zeros(2, 1, 1), torch.zeros(2, 2, 2)
    first[0], second[0, 0, 1], second[1] = 3.0, 4.0, 1.0
    assert squared_norms([first, second]).tolist() == [25.0, 4.0]


def test_an_upload_of_other_heads_than_the_clients_is_refused_by_name() -> None:
    one = Card("a", 4, 1, 1.0, LAYERS)
    right = Heads([0, 2], {name: torch.zeros(2, *size[1:]) for name, size in SIZES.items()})
    check_heads(right, one, 2, SIZES)
    wide = {**right.cores, "second": torch.zeros(2, 5, 4)}
    for wrong, told in (
        (right.cores, "client a: the trained heads of each of 2 layers are expected"),
        (replace(right, cores={"first": right.cores["first"]}), "the trained heads of each of 2 layers are expected"),
        (replace(right, chosen=[0]), r"client a: heads \[0\] where 2 of 3 are expected"),
        (replace(right, chosen=[1, 1]), r"client a: heads \[1, 1\] where 2 of 3 are expected"),
        (replace(right, chosen=[1, 3]), r"client a: heads \[1, 3\] where 2 of 3 are expected"),
        (replace(right, chosen=[0, 2, 2]), "client a, layer first: cores"),
        (replace(right, cores=wide), r"client a, layer second: cores \(2, 5, 4\) where \(2, 5, 5\) is expected"),
    ):
        with pytest.raises(ModelError, match=told):
            check_heads(wrong, one, 2, SIZES)
