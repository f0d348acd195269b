"""Work on several threads: in order, no more at a time than allowed, and never nested."""

from __future__ import annotations

import threading

import pytest
import torch

from coterie.maths.concurrency import at_once, mapped
from coterie.maths.keys import root_key
from coterie.maths.lowrank import best_rank


def test_results_come_in_the_order_of_the_items() -> None:
    first = threading.Event()

    def work(item: int) -> int:
        first.set() if item else first.wait()  # the first one ends last
        return 10 * item

    with at_once(2):
        assert mapped(work, range(4)) == [0, 10, 20, 30]
    assert mapped(str, []) == []


def test_outside_there_is_one_thread_and_inside_as_many_as_allowed() -> None:
    meeting = threading.Barrier(3, timeout=30)
    here = threading.get_ident()
    assert set(mapped(lambda _: threading.get_ident(), range(3))) == {here}
    with at_once(3):
        assert len(set(mapped(lambda _: (meeting.wait(), threading.get_ident())[1], range(3)))) == 3
        nested = mapped(lambda _: set(mapped(lambda _: threading.get_ident(), range(2))), range(3))
        assert all(len(one) == 1 for one in nested)
    assert mapped(lambda _: threading.get_ident(), range(3)) == [here] * 3


def test_what_the_first_item_that_failed_raised_is_raised() -> None:
    def work(item: int) -> None:
        if item:
            raise ValueError(f"item {item}")

    for workers in (1, 3):
        with at_once(workers), pytest.raises(ValueError, match="item 1"):
            mapped(work, range(4))


def test_linear_algebra_gives_the_same_bits_on_every_thread() -> None:
    key = root_key(1)
    pairs = [(key.fold("B", i).normal((160, 40)), key.fold("A", i).normal((40, 96))) for i in range(24)]

    def work(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        best = best_rank([pair], [0.7], 8)
        return best.B @ best.A

    alone = mapped(work, pairs)
    for workers in (2, 5):
        with at_once(workers):
            assert all(torch.equal(one, other) for one, other in zip(alone, mapped(work, pairs), strict=True))
