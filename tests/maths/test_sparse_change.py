"""Random places of a matrix, and the low-rank part of a dense change: the slow twin, chance, and what is zero."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.dense_lowrank import best_rank
from reference.random_factors import bounded, normal, pair

from coterie.maths.keys import root_key
from coterie.maths.lowrank import truncate
from coterie.maths.sparse_change import low_rank_part, random_places


def test_every_place_has_the_same_chance() -> None:
    hits = torch.zeros(40)
    for number in range(4000):
        hits[random_places(root_key(number), 40, 10).long()] += 1
    assert float((hits / 4000 - 0.25).abs().max()) < 0.04


@given(entries=st.integers(1, 60), seed=st.integers(0, 99), data=st.data())
def test_places_rise_lie_inside_and_are_as_many_as_asked_for(entries: int, seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, entries))
    places = random_places(root_key(seed), entries, count)
    assert places.dtype == torch.int32 and len(places) == count
    assert places.tolist() == sorted(set(places.tolist())) and set(places.tolist()) <= set(range(entries))


@bounded
@given(
    m=st.integers(1, 9), n=st.integers(1, 9), rank=st.integers(1, 11), true=st.integers(0, 9), seed=st.integers(0, 99)
)
def test_it_is_the_best_approximation_with_orthonormal_rows(m: int, n: int, rank: int, true: int, seed: int) -> None:
    left, right = pair(seed, m, true, n)
    D = left @ right
    B, A = low_rank_part(D, rank)
    assert B.shape == (m, rank) and A.shape == (rank, n)
    torch.testing.assert_close(B @ A, best_rank(D, rank)[0], rtol=0, atol=1e-9)
    alive = min(rank, true, m, n)
    torch.testing.assert_close(A[:alive] @ A[:alive].mT, torch.eye(alive, dtype=A.dtype), rtol=0, atol=1e-9)
    assert not A[alive:].any() and not B[:, alive:].any()


def test_it_is_what_the_truncation_of_the_matrix_as_a_product_gives() -> None:
    D = normal(1, 7, 9)
    B, A = low_rank_part(D, 3)
    best = truncate(D, torch.eye(9, dtype=D.dtype), 3)
    torch.testing.assert_close(B, best.B, rtol=0, atol=1e-12)
    torch.testing.assert_close(A, best.A, rtol=0, atol=1e-12)


def test_single_precision_comes_back_and_no_change_has_no_direction() -> None:
    B, A = low_rank_part(torch.zeros(4, 3), 2)
    assert B.dtype == A.dtype == torch.float32 and not B.any() and not A.any()
