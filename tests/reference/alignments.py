"""Slow twins of `coterie.maths.alignment`: all paths, all words, by recursion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction


def edit_distance(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(
        edit_distance(a[1:], b) + 1,
        edit_distance(a, b[1:]) + 1,
        edit_distance(a[1:], b[1:]) + (a[0] != b[0]),
    )


def paths(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Every path from (0, 0) to (m - 1, n - 1) by steps of one in either place or in both."""
    if (m, n) == (1, 1):
        yield [(0, 0)]
        return
    for before in ((m - 1, n - 1), (m - 1, n), (m, n - 1)):
        if min(before) >= 1:
            for path in paths(*before):
                yield [*path, (m - 1, n - 1)]


def distance(a: str, b: str) -> Fraction:
    return Fraction(edit_distance(a, b), max(len(a), len(b), 1))


def least(source: Sequence[str], target: Sequence[str]) -> Fraction:
    """The least sum of distances of any path."""
    return min(
        sum((distance(source[i], target[j]) for i, j in path), Fraction()) for path in paths(len(source), len(target))
    )


def nearest(token: str, vocabulary: Sequence[str]) -> int:
    distances = [edit_distance(token, word) for word in vocabulary]
    return distances.index(min(distances))
