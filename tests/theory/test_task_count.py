"""How many tasks a pool has: right where clients show it, short where they cannot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coterie.maths.keys import Key
from coterie.theory.fedsee import task_count
from coterie.theory.fedsee.counting import TaskCount
from coterie.theory.fedsee.geometry import diameter
from coterie.theory.fedsee.synthetic import Moments, World, anchored, interior, public_sets, uploads, world

SEEDS = (0, 1, 2)


def counted(
    seed: int, of: World, alpha: Tensor, n: int = 1000, labels: list[int] | None = None, n_m: int = 1000
) -> TaskCount:
    """The count from halves of n examples; labels: the task of each public set."""
    key = Key(seed)
    first, second = (uploads(key.fold("half", half), alpha, of, n // 2) for half in (0, 1))
    public: list[tuple[Moments, Moments]] | None = None
    if labels is not None:
        halves = [public_sets(key.fold("public", half), of, n_m // 2) for half in (0, 1)]
        again = [public_sets(key.fold("again", half), of, n_m // 2) for half in (0, 1)]
        seen: set[int] = set()
        public = []
        for task in labels:
            chosen = again if task in seen else halves
            public.append((chosen[0][task], chosen[1][task]))
            seen.add(task)
    return task_count(first, second, public)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("M", [2, 3, 6])
def test_the_count_is_right_with_near_pure_anchors(seed: int, M: int) -> None:
    of = world(Key(seed), M=M)
    found = counted(seed, of, anchored(Key(seed).fold("alpha"), 12, M, 0.1), labels=list(range(M)))
    assert found.tasks == found.from_pool == found.distinct == M
    assert len([value for value in found.singular if value > found.noise]) == M - 1


@pytest.mark.parametrize("seed", SEEDS)
def test_the_count_is_right_without_anchors_while_mixtures_differ(seed: int) -> None:
    of = world(Key(seed), M=4)
    assert counted(seed, of, interior(Key(seed).fold("alpha"), 20, 4, 0.5), n=4000).from_pool == 4


@pytest.mark.parametrize("seed", SEEDS)
def test_one_task_is_one(seed: int) -> None:
    of = world(Key(seed), M=2)
    alone = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(8, -1)
    assert counted(seed, of, alone).tasks == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_two_labels_of_one_task_count_once(seed: int) -> None:
    of = world(Key(seed), M=3)
    found = counted(seed, of, anchored(Key(seed).fold("alpha"), 9, 3, 0.05), labels=[0, 1, 2, 1])
    assert found.distinct == 3


def collinear(of: World) -> World:
    Theta = of.Theta.clone()
    Theta[2] = (Theta[0] + Theta[1]) / 2
    return World(of.A, Theta / diameter(Theta) * 6, of.sigma)


@pytest.mark.parametrize("seed", SEEDS)
def test_of_collinear_experts_the_pool_shows_two_and_public_sets_show_all(seed: int) -> None:
    of = collinear(world(Key(seed), M=3))
    alpha = anchored(Key(seed).fold("alpha"), 12, 3, 0.05)
    assert counted(seed, of, alpha).tasks == 2
    found = counted(seed, of, alpha, labels=[0, 1, 2])
    assert (found.from_pool, found.distinct, found.tasks) == (2, 3, 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_fewer_clients_than_tasks_show_no_more_than_clients(seed: int) -> None:
    of = world(Key(seed))
    found = counted(seed, of, interior(Key(seed).fold("alpha"), 4, 6, 0.0), n=4000)
    assert found.tasks <= 4 < 6


@pytest.mark.parametrize("seed", SEEDS)
def test_nearly_uniform_mixtures_hide_tasks_until_there_are_more_examples(seed: int) -> None:
    of = world(Key(seed), M=3)
    alpha = interior(Key(seed).fold("alpha"), 12, 3, 0.95)
    assert counted(seed, of, alpha, n=400).from_pool == 1
    assert counted(seed, of, alpha, n=100_000).from_pool == 3


def test_halves_of_other_shapes_are_refused() -> None:
    pool = torch.zeros(3, 2, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="two halves"):
        task_count(pool, pool[:2])
    with pytest.raises(ValueError, match="at least two clients"):
        task_count(pool[:1], pool[:1])
