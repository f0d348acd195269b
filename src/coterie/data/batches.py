"""Which examples make which mini-batch: drawn by key, grouped by length to compute little padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
from numpy.typing import ArrayLike

from coterie.errors import ConfigError, DataError
from coterie.maths.keys import Key


@dataclass(frozen=True, eq=False)
class Batch:
    """One mini-batch: `indices` (b,) int64 into the client's examples, padded to `pad_to` tokens."""

    indices: np.ndarray
    pad_to: int


def plan(
    lengths: ArrayLike,
    batch_size: int,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    key: Key,
    buckets: bool = True,
    multiple: int = 8,
    window: int = 8,
) -> list[Batch]:
    """The mini-batches of one Fit over examples of the given token `lengths`, (n,) integers.

    Examples are drawn without replacement and reshuffled when exhausted (epoch k by `key.fold("epoch", k)`).
    With `steps`, exactly that many batches of min(batch_size, n) examples each; a batch across the border of
    two epochs holds no example twice, and a plan of fewer steps is the beginning of a plan of more. With
    `epochs`, the last batch of each epoch may be smaller.

    With `buckets`, the full batches of an epoch are taken in windows of `window`: a window's examples are
    sorted by length, cut into batches, and the batches shuffled; each is padded to its longest example,
    rounded up to a `multiple` but not beyond the longest of all. Without, the order is plain and all are
    padded to the longest of all (for exact comparisons).

    Raises:
        ConfigError: not exactly one of steps and epochs, or a number below one.
        DataError: no examples.
    """
    sizes = _lengths(lengths)
    _at_least_one(batch_size=batch_size, multiple=multiple, window=window)
    if (steps is None) == (epochs is None):
        raise ConfigError("local work is either a number of steps or a number of epochs: give exactly one of them")
    size = min(batch_size, len(sizes))
    if epochs is not None:
        _at_least_one(epochs=epochs)
        orders = (_order(len(sizes), key, k) for k in range(epochs))
        drawn = [
            batch for k, order in enumerate(orders) for batch in _epoch(order, k, size, sizes, key, buckets, window)
        ]
    else:
        assert steps is not None
        _at_least_one(steps=steps)
        drawn = list(islice(_stream(sizes, size, key, buckets, window), steps))
    return padded(drawn, sizes, buckets, multiple)


def padded(drawn: Sequence[np.ndarray], lengths: ArrayLike, buckets: bool, multiple: int = 8) -> list[Batch]:
    """These mini-batches, each padded as in `plan` for examples of the given `lengths`, (n,) integers, at least one."""
    sizes = _lengths(lengths)
    longest = int(sizes.max())
    if not buckets:
        return [Batch(indices, longest) for indices in drawn]
    return [Batch(indices, min(_round_up(int(sizes[indices].max()), multiple), longest)) for indices in drawn]


def evaluation_batches(
    lengths: ArrayLike, batch_size: int, multiple: int = 8, tokens: int | None = None
) -> list[Batch]:
    """Every example exactly once, in order of length (stable), padded as in `plan`; no batch of no examples.

    tokens: how many a batch may have, padding included, unless it is of one example; None: any number.

    Raises:
        ConfigError: a number below one.
    """
    _at_least_one(batch_size=batch_size, multiple=multiple, tokens=1 if tokens is None else tokens)
    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1)
    order = np.argsort(sizes, kind="stable").astype(np.int64)
    longest = int(sizes.max(initial=0))
    padded = [min(_round_up(size, multiple), longest) for size in sizes[order].tolist()]
    starts: list[int] = []
    for place, size in enumerate(padded):
        count = place + 1 - starts[-1] if starts else batch_size + 1
        if count > batch_size or (tokens is not None and count * size > tokens):
            starts.append(place)
    return [
        Batch(order[start:end], padded[end - 1]) for start, end in zip(starts, [*starts, len(order)][1:], strict=True)
    ]


def _stream(sizes: np.ndarray, size: int, key: Key, buckets: bool, window: int) -> Iterator[np.ndarray]:
    """Batches of `size` examples without end."""
    left = np.empty(0, dtype=np.int64)
    for k in count():
        order = _order(len(sizes), key, k)
        if len(left):
            # The batch across the border: what the last epoch left, filled up with others of this epoch.
            others = order[~np.isin(order, left)][: size - len(left)]
            yield np.concatenate([left, others])
            order = order[~np.isin(order, others)]
        whole = len(order) // size * size
        yield from _epoch(order[:whole], k, size, sizes, key, buckets, window)
        left = order[whole:]


def _epoch(
    order: np.ndarray, k: int, size: int, sizes: np.ndarray, key: Key, buckets: bool, window: int
) -> Iterator[np.ndarray]:
    """Batches out of one epoch's order. A small last one is not bucketed: it would always get the longest."""
    whole = len(order) // size * size
    for number, start in enumerate(range(0, whole, size * window)):
        part = order[start : min(start + size * window, whole)]
        if not buckets:
            yield from part.reshape(-1, size)
            continue
        rows = part[np.argsort(sizes[part], kind="stable")].reshape(-1, size)
        yield from rows[key.fold("window", k, number).permutation(len(rows))]
    if whole < len(order):
        yield order[whole:]


def _order(examples: int, key: Key, k: int) -> np.ndarray:
    return key.fold("epoch", k).permutation(examples)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _lengths(lengths: ArrayLike) -> np.ndarray:
    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1)
    if not len(sizes):
        raise DataError("there are no examples to make batches of")
    return sizes


def _at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"{name} is {number}; it must be at least 1")
