"""Two tokenisers' tokens laid beside each other: least edit, monotone, the identity where they are the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import alignments

from coterie.maths.alignment import Vocabulary, alignment, counterparts, distance, edit_distance

WORD = st.text("ab c", max_size=4)
TOKENS = st.lists(WORD, min_size=1, max_size=4)
LONG = st.lists(st.text("abcdefg ", min_size=1, max_size=5), max_size=12)


@given(WORD, WORD)
def test_the_edit_distance_is_that_of_the_recursion_and_a_metric(a: str, b: str) -> None:
    assert edit_distance(a, b) == alignments.edit_distance(a, b) == edit_distance(b, a)
    assert (edit_distance(a, b) == 0) == (a == b)


@settings(max_examples=60, deadline=None)
@given(TOKENS, TOKENS)
def test_no_path_has_less_edit_than_the_alignment(source: list[str], target: list[str]) -> None:
    path = alignment(source, target)
    found = sum(distance(source[i], target[j]) for i, j in path)
    assert found == pytest.approx(float(alignments.least(source, target)), abs=1e-12)


@given(LONG, LONG)
def test_an_alignment_is_monotone_and_leaves_no_token_out(source: list[str], target: list[str]) -> None:
    path = alignment(source, target)
    if not source or not target:
        assert path == []
        return
    assert path[0] == (0, 0) and path[-1] == (len(source) - 1, len(target) - 1)
    assert all((b[0] - a[0], b[1] - a[1]) in {(1, 1), (1, 0), (0, 1)} for a, b in pairwise(path))
    found = [i for i in counterparts(source, target) if i >= 0]
    assert found == sorted(set(found))


@given(LONG)
def test_equal_sequences_are_aligned_by_the_identity(tokens: list[str]) -> None:
    assert counterparts(tokens, tokens) == list(range(len(tokens)))


@given(LONG, LONG)
def test_counterparts_are_mutual(source: list[str], target: list[str]) -> None:
    forth, back = counterparts(source, target), counterparts(target, source)
    pairs = {(i, j) for j, i in enumerate(forth) if i >= 0}
    if alignment(source, target) == [(i, j) for j, i in alignment(target, source)]:
        assert pairs == {(i, j) for i, j in enumerate(back) if j >= 0}


def test_a_word_cut_otherwise_has_no_counterpart_and_its_neighbours_have() -> None:
    source, target = [" they", " play", "ing", " well"], [" they", " playing", " well"]
    assert counterparts(source, target) == [0, -1, 3] and counterparts(target, source) == [0, -1, -1, 2]


@settings(max_examples=60, deadline=None)
@given(WORD, st.lists(WORD, min_size=1, max_size=12))
def test_the_nearest_token_is_that_of_the_slow_search_the_first_of_equals(token: str, words: list[str]) -> None:
    assert Vocabulary(words).nearest(token) == alignments.nearest(token, words)


@given(st.lists(WORD, min_size=1, max_size=12))
def test_a_token_that_is_there_is_its_own_nearest(words: list[str]) -> None:
    held = Vocabulary(words)
    assert all(words[held.nearest(word)] == word and held.nearest(word) == words.index(word) for word in words)
