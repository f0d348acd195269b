"""Mixtures told by contributions, against those that clients hold."""

from __future__ import annotations

import pytest

from coterie.experiments.papers.estimates import estimated, mean_absolute_error, missed, pairs, realised, slope

TRUTH = {"a": {"x": 1.0, "y": 0.0}, "b": {"x": 0.25, "y": 0.75}}


def _rows(*told: dict[str, dict[str, float]]) -> list[dict[str, object]]:
    return [{"measures": {"contributions": one}} for one in told]


def test_estimates_are_means_over_the_rounds_that_tell_them() -> None:
    first = {"a": {"x": 0.5, "y": 0.5}}
    second = {"a": {"x": 1.0, "y": 0.0}}
    assert estimated([{"measures": {}}, {}, *_rows(first, second)]) == {"a": {"x": 0.75, "y": 0.25}}
    assert estimated([]) == {}


def test_true_estimates_have_no_error_and_slope_one() -> None:
    found = pairs(estimated(_rows(TRUTH)), TRUTH)
    assert mean_absolute_error(found) == 0.0
    assert slope(found) == pytest.approx(1.0)
    assert missed(TRUTH, TRUTH) == 0.0


def test_estimates_halfway_to_uniform_have_half_the_slope() -> None:
    half = {client: {task: 0.5 * share + 0.25 for task, share in own.items()} for client, own in TRUTH.items()}
    found = pairs(half, TRUTH)
    assert slope(found) == pytest.approx(0.5)
    assert mean_absolute_error(found) == pytest.approx((0.25 + 0.25 + 0.125 + 0.125) / 4)


def test_a_mistaken_largest_task_is_counted() -> None:
    assert missed({"a": {"x": 0.4, "y": 0.6}, "b": {"x": 0.4, "y": 0.6}}, TRUTH) == 0.5


def test_what_is_not_known_is_none() -> None:
    assert (mean_absolute_error([]), slope([]), missed({}, TRUTH)) == (None, None, None)
    assert slope([(0.5, 0.1), (0.5, 0.9)]) is None
    assert pairs({"c": {"x": 1.0}}, TRUTH) == []


def test_mixtures_are_those_that_partition_json_calls_realised() -> None:
    partition = {"clients": [{"id": "a", "mixture": {"realised": {"x": 1.0}}}, {"id": "b"}]}
    assert realised(partition) == {"a": {"x": 1.0}}
