"""Independent pieces of work on several threads, as many as whoever calls the algorithm allows; no bit depends on it.

PyTorch lets go of the interpreter while LAPACK works, and every thread computes with as many threads of its own as the
process was told: the same ones as without company, so that results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")

_allowed: ContextVar[int] = ContextVar("allowed", default=1)


@contextmanager
def at_once(workers: int) -> Iterator[None]:
    """Within it `mapped` may use so many threads; it is 1 outside, and within the work itself."""
    before = _allowed.set(workers)
    try:
        yield
    finally:
        _allowed.reset(before)


def mapped(work: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """What `work` makes of each item, in their order; only as many are under way at once as `at_once` allows.

    Worth it for work of a millisecond or more in LAPACK or matrix products, on items that share nothing they change.
    Raises what the first item that failed raised.
    """
    listed = list(items)
    workers = min(_allowed.get(), len(listed))
    if workers < 2:
        return [work(item) for item in listed]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, listed))
