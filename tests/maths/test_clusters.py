"""Distances, average linkage and silhouettes against scikit-learn, and FedLEASE's example."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score, silhouette_score
from sklearn.metrics.pairwise import cosine_distances as dense_distances

from coterie.maths.clusters import average_linkage, best_partition, cosine_distances, silhouette
from coterie.maths.keys import root_key


def items(count: int, seed: int, parts: int = 2) -> list[list[torch.Tensor]]:
    key = root_key(seed)
    return [[key.fold(i, p).normal((4, 2 + p), dtype=torch.float64) for p in range(parts)] for i in range(count)]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.integers(0, 10**6))
def test_distances_are_means_over_parts_of_one_minus_the_cosine(count: int, seed: int) -> None:
    held = items(count, seed)
    slow = sum(dense_distances([item[p].reshape(-1).tolist() for item in held]) for p in range(2)) / 2
    found = cosine_distances(held)
    assert torch.allclose(found, torch.from_numpy(slow), atol=1e-12)
    assert torch.equal(found, found.T) and torch.equal(found.diagonal(), torch.zeros(count, dtype=torch.float64))


def test_a_part_that_is_zero_is_at_distance_one_and_unlike_parts_are_refused() -> None:
    zero, one = [torch.zeros(2, 2)], [torch.ones(2, 2)]
    assert cosine_distances([zero, one, zero])[0].tolist() == [0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="the same parts"):
        cosine_distances([zero, [torch.ones(2, 3)]])
    with pytest.raises(ValueError, match="the same parts"):
        cosine_distances([[], []])


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 12), st.integers(0, 10**6))
def test_linkage_and_silhouettes_are_those_of_scikit_learn(count: int, seed: int) -> None:
    distances = cosine_distances(items(count, seed))
    partitions = average_linkage(distances)
    assert [len(set(labels)) for labels in partitions] == list(range(1, count + 1))
    for k in range(2, count):
        labels = partitions[k - 1]
        theirs = AgglomerativeClustering(k, metric="precomputed", linkage="average").fit_predict(distances.numpy())
        assert adjusted_rand_score(theirs, labels) == 1.0
        expected = silhouette_score(distances.numpy(), labels, metric="precomputed")
        assert silhouette(distances, labels) == pytest.approx(expected, abs=1e-12)


def test_the_example_of_the_specification_has_two_clusters() -> None:
    """B directions (1, 0), (1, .1), (0, 1), (.1, 1): silhouette .994 for {01|23}, .497 for either split into three."""
    directions = [(1.0, 0.0), (1.0, 0.1), (0.0, 1.0), (0.1, 1.0)]
    distances = cosine_distances([[torch.tensor(one, dtype=torch.float64)[:, None]] for one in directions])
    assert silhouette(distances, [0, 0, 1, 1]) == pytest.approx(0.994, abs=5e-4)
    assert silhouette(distances, [0, 1, 2, 2]) == pytest.approx(0.497, abs=5e-4)
    assert silhouette(distances, [0, 0, 1, 2]) == pytest.approx(0.497, abs=5e-4)
    labels, score = best_partition(distances, 4)
    assert labels == [0, 0, 1, 1] and score == pytest.approx(0.994, abs=5e-4)


def test_no_more_clusters_are_tried_than_asked_for_and_than_items_less_one() -> None:
    three = torch.eye(3, dtype=torch.float64)
    distances = cosine_distances([[row[:, None] for _ in range(1)] for row in three])
    assert len(set(best_partition(distances, 9)[0])) == 2
    assert best_partition(distances, 1) == ([0, 0, 0], 0.0)
    assert best_partition(distances[:2, :2], 4) == ([0, 0], 0.0)
    assert best_partition(distances[:1, :1], 4) == ([0], 0.0)


def test_clusters_are_numbered_by_their_lowest_member_and_ties_join_the_lowest_pair() -> None:
    equal = 1 - torch.eye(4, dtype=torch.float64)
    assert average_linkage(equal)[2] == [0, 0, 1, 2]
    with pytest.raises(ValueError, match="at least two clusters"):
        silhouette(equal, [0, 0, 0, 0])


def test_items_that_coincide_have_no_silhouette_but_no_failure_either() -> None:
    assert silhouette(torch.zeros(4, 4, dtype=torch.float64), [0, 0, 1, 1]) == 0.0
