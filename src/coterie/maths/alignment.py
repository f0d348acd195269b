"""Token sequences and vocabularies of two tokenisers laid beside each other by minimum edit (FedMKT, arXiv 2406.02224).

Tokens are strings. Edits are insertions, deletions and replacements of one character. Along a path of alignment they
are counted in parts of the longer token: else a piece of a word would rather stand beside a short neighbour than beside
the long word that it is a piece of.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=2**18)
def edit_distance(a: str, b: str) -> int:
    """How many characters must be inserted, deleted or replaced to make b of a."""
    if a == b:
        return 0
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        left, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            left, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, left + (x != y))
    return row[-1]


def distance(a: str, b: str) -> float:
    """The edit distance in parts of the longer token, in [0, 1]."""
    return edit_distance(a, b) / max(len(a), len(b), 1)


def alignment(source: Sequence[str], target: Sequence[str]) -> list[tuple[int, int]]:
    """The path of pairs (source place, target place) with the least sum of distances (dynamic time warping).

    It begins with the first tokens and ends with the last ones, and each pair moves on by one in either sequence or in
    both; of equal sums the one that goes diagonally, last steps first. Empty where either sequence is.
    """
    m, n = len(source), len(target)
    if not m or not n:
        return []
    total = np.full((m + 1, n + 1), np.inf)
    total[0, 0] = 0
    for i in range(m):
        for j in range(n):
            before = min(total[i, j], total[i, j + 1], total[i + 1, j])
            total[i + 1, j + 1] = before + distance(source[i], target[j])
    path = [(m - 1, n - 1)]
    while path[-1] != (0, 0):
        i, j = path[-1]
        steps = [(i - 1, j - 1), (i - 1, j), (i, j - 1)]
        path.append(min(steps, key=lambda step: total[step[0] + 1, step[1] + 1] if min(step) >= 0 else np.inf))
    return path[::-1]


def counterparts(source: Sequence[str], target: Sequence[str]) -> list[int]:
    """For each target token the source token that is aligned with it and with nothing else, as it with that; else -1.

    Of equal sequences the identity; places that are not -1 rise.
    """
    path = alignment(source, target)
    of_source, of_target = [0] * len(source), [0] * len(target)
    for i, j in path:
        of_source[i] += 1
        of_target[j] += 1
    found = [-1] * len(target)
    for i, j in path:
        if of_source[i] == of_target[j] == 1:
            found[j] = i
    return found


class Vocabulary:
    """The tokens of one tokeniser by id, in which the tokens of others are looked up."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tuple(tokens)
        self._first: dict[str, int] = {}
        for place, token in enumerate(self.tokens):
            self._first.setdefault(token, place)
        self._by_length: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        lengths = np.array([len(token) for token in self.tokens])
        for length in sorted(set(lengths.tolist())):
            ids = np.flatnonzero(lengths == length)
            rows = [[ord(x) for x in self.tokens[i]] for i in ids]
            self._by_length[length] = ids, np.array(rows, dtype=np.int64).reshape(len(ids), length)

    def __len__(self) -> int:
        return len(self.tokens)

    def nearest(self, token: str) -> int:
        """The id of this token, or where there is none, of that with the least edit distance; the lowest of equals."""
        if token in self._first:
            return self._first[token]
        best, found = np.inf, 0
        # A token's distance is at least the difference of lengths.
        for length in sorted(self._by_length, key=lambda length: (abs(length - len(token)), length)):
            if abs(length - len(token)) > best:
                break
            ids, rows = self._by_length[length]
            distances = _distances(token, rows)
            place = int(distances.argmin())
            one = (float(distances[place]), int(ids[place]))
            if one < (best, found):
                best, found = one
        return found


def _distances(token: str, rows: np.ndarray) -> np.ndarray:
    """The edit distance of a token from each of k words of one length, given as codes (k, length)."""
    count, length = rows.shape
    row = np.tile(np.arange(length + 1), (count, 1))
    for i, x in enumerate(token, start=1):
        left = row[:, 0].copy()
        row[:, 0] = i
        for j in range(1, length + 1):
            now = np.minimum(np.minimum(row[:, j] + 1, row[:, j - 1] + 1), left + (rows[:, j - 1] != ord(x)))
            left = row[:, j].copy()
            row[:, j] = now
    return row[:, -1]
