"""Mini-batches: every example its turn, the same key the same plan, and little padding."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data.batches import Batch, evaluation_batches, plan
from coterie.errors import ConfigError, DataError
from coterie.maths.keys import root_key

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=70)
KEY = root_key(0)
quick = settings(deadline=None, max_examples=80)


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.indices, b.indices) and a.pad_to == b.pad_to for a, b in zip(one, other, strict=True)
    )


@quick
@given(LENGTHS, st.integers(1, 20), st.integers(1, 3), st.booleans(), st.integers(1, 4), st.integers(0, 9))
def test_each_epoch_covers_each_example_exactly_once(
    lengths: list[int], size: int, epochs: int, buckets: bool, window: int, seed: int
) -> None:
    batches = plan(lengths, size, epochs=epochs, key=root_key(seed), buckets=buckets, window=window)
    per_epoch = -(-len(lengths) // size)
    assert len(batches) == epochs * per_epoch
    for start in range(0, len(batches), per_epoch):
        epoch = batches[start : start + per_epoch]
        assert sorted(np.concatenate([b.indices for b in epoch])) == list(range(len(lengths)))
        assert all(len(b.indices) == min(size, len(lengths)) for b in epoch[:-1])
        assert 1 <= len(epoch[-1].indices) <= size


@quick
@given(LENGTHS, st.integers(1, 20), st.integers(1, 25), st.booleans(), st.integers(1, 4), st.integers(0, 9))
def test_steps_give_that_many_full_batches_and_every_turn_of_the_stream_covers_all(
    lengths: list[int], size: int, steps: int, buckets: bool, window: int, seed: int
) -> None:
    batches = plan(lengths, size, steps=steps, key=root_key(seed), buckets=buckets, window=window)
    count = len(lengths)
    full = min(size, count)
    assert [len(b.indices) for b in batches] == [full] * steps
    assert all(len(set(b.indices.tolist())) == full for b in batches)
    seen = np.bincount(np.concatenate([b.indices for b in batches]), minlength=count)
    epochs_begun, epochs_done = -(-steps * full // count), steps * full // count
    assert seen.max() <= epochs_begun and seen.min() >= epochs_done


@quick
@given(LENGTHS, st.integers(1, 20), st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_a_plan_of_fewer_steps_is_the_beginning_of_a_plan_of_more(
    lengths: list[int], size: int, some: int, more: int, buckets: bool
) -> None:
    short = plan(lengths, size, steps=some, key=KEY, buckets=buckets)
    long = plan(lengths, size, steps=some + more, key=KEY, buckets=buckets)
    assert same(short, long[:some])


@quick
@given(LENGTHS, st.integers(1, 20), st.integers(1, 9), st.integers(1, 64))
def test_padding_holds_the_longest_and_never_more_than_the_longest_of_all(
    lengths: list[int], size: int, steps: int, multiple: int
) -> None:
    sizes = np.array(lengths)
    for batch in plan(lengths, size, steps=steps, key=KEY, multiple=multiple):
        longest = sizes[batch.indices].max()
        assert longest <= batch.pad_to <= sizes.max()
        assert batch.pad_to == sizes.max() or (batch.pad_to % multiple == 0 and batch.pad_to - longest < multiple)
    exact = plan(lengths, size, steps=steps, key=KEY, buckets=False, multiple=multiple)
    assert {batch.pad_to for batch in exact} == {int(sizes.max())}


def test_the_key_alone_decides() -> None:
    lengths = np.arange(50) % 17 + 1
    for work in ({"steps": 9}, {"epochs": 2}):
        first = plan(lengths, 8, key=root_key(1), **work)
        assert same(first, plan(lengths, 8, key=root_key(1), **work))
        assert not same(first, plan(lengths, 8, key=root_key(2), **work))


def test_epochs_are_shuffled_differently() -> None:
    first, second = plan(np.ones(40, int), 40, epochs=2, key=KEY)
    assert not np.array_equal(first.indices, second.indices)


def test_without_buckets_the_order_is_the_keys_permutation() -> None:
    lengths = np.arange(20) + 1
    batches = plan(lengths, 6, epochs=1, key=KEY, buckets=False)
    order = KEY.fold("epoch", 0).permutation(20)
    assert np.array_equal(np.concatenate([b.indices for b in batches]), order)


def test_buckets_spare_padding_and_keep_the_windows() -> None:
    lengths = root_key(5).permutation(256) % 120 + 1
    bucketed = plan(lengths, 8, epochs=1, key=KEY, window=4, multiple=1)
    plain = plan(lengths, 8, epochs=1, key=KEY, buckets=False)
    for start in range(0, 32, 4):  # a window holds the same examples, cut at other places
        ours, theirs = (np.concatenate([b.indices for b in p[start : start + 4]]) for p in (bucketed, plain))
        assert sorted(ours) == sorted(theirs)
        in_turn = sorted((int(lengths[b.indices].min()), b.pad_to) for b in bucketed[start : start + 4])
        assert all(high <= low for (_, high), (low, _) in pairwise(in_turn))
    dynamic = sum(int(lengths[b.indices].max()) for b in plain)
    assert sum(b.pad_to for b in bucketed) < 0.75 * dynamic


def test_batches_of_a_window_do_not_come_in_order_of_length() -> None:
    lengths = np.arange(64) + 1
    pads = [b.pad_to for b in plan(lengths, 8, epochs=1, key=KEY, multiple=1)]
    assert pads != sorted(pads) and sorted(pads) == [8, 16, 24, 32, 40, 48, 56, 64]


@quick
@given(st.lists(st.integers(1, 100), max_size=70), st.integers(1, 20), st.integers(1, 16))
def test_evaluation_sees_each_example_exactly_once_in_order_of_length(
    lengths: list[int], size: int, multiple: int
) -> None:
    batches = evaluation_batches(lengths, size, multiple)
    order = [int(i) for b in batches for i in b.indices]
    assert order == sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    assert all(max(lengths[i] for i in b.indices) <= b.pad_to <= max(lengths) for b in batches)


@quick
@given(st.lists(st.integers(1, 100), max_size=70), st.integers(1, 20), st.integers(1, 300))
def test_a_batch_for_evaluation_has_as_many_tokens_as_it_may_or_one_example(
    lengths: list[int], size: int, tokens: int
) -> None:
    batches = evaluation_batches(lengths, size, tokens=tokens)
    whole = evaluation_batches(lengths, size)
    assert [i for b in batches for i in b.indices] == [i for b in whole for i in b.indices]
    counts = [len(b.indices) for b in batches]
    assert all(n <= size and (n == 1 or n * b.pad_to <= tokens) for n, b in zip(counts, batches, strict=True))
    # None could have taken the next one's first example as well.
    for count, after in zip(counts, batches[1:], strict=False):
        longer = min(-(-lengths[after.indices[0]] // 8) * 8, max(lengths))
        assert count == size or (count + 1) * longer > tokens


def test_what_cannot_be_meant_is_refused_in_one_line() -> None:
    for work in ({}, {"steps": 1, "epochs": 1}):
        with pytest.raises(ConfigError, match="exactly one"):
            plan([1, 2], 2, key=KEY, **work)
    for numbers in ({"steps": 0}, {"epochs": 0}, {"steps": 1, "window": 0}, {"steps": 1, "multiple": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            plan([1, 2], 2, key=KEY, **numbers)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        plan([1, 2], 0, steps=1, key=KEY)
    with pytest.raises(DataError, match="no examples"):
        plan([], 2, steps=1, key=KEY)
