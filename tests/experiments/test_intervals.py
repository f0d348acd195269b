"""Intervals of paired differences: the t quantile is SciPy's, the interval the textbook's."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coterie.experiments.intervals import deviation, paired, t_quantile


@given(st.integers(1, 200), st.floats(0.501, 0.9999))
def test_the_t_quantile_is_that_of_scipy(freedom: int, probability: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-8)


@pytest.mark.parametrize(("freedom", "printed"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (120, 1.980)])
def test_the_t_quantile_is_that_of_printed_tables(freedom: int, printed: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(printed, abs=5e-4)


@pytest.mark.parametrize(("probability", "freedom"), [(0.5, 3), (1.0, 3), (0.3, 3), (0.9, 0)])
def test_the_t_quantile_refuses_what_has_none(probability: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="probability must be in"):
        t_quantile(probability, freedom)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=9))
def test_the_interval_is_that_of_a_one_sample_t_test_on_differences(pairs: list[tuple[float, float]]) -> None:
    found = paired({str(i): a for i, (a, _) in enumerate(pairs)}, {str(i): b for i, (_, b) in enumerate(pairs)})
    differences = [a - b for a, b in pairs]
    assert found is not None and found.low is not None and found.high is not None
    assert found.mean == pytest.approx(statistics.mean(differences), abs=1e-12)
    assert found.std == pytest.approx(statistics.stdev(differences), abs=1e-12)
    if statistics.stdev(differences) > 1e-6:
        low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)


def test_only_seeds_that_both_have_are_paired() -> None:
    found = paired({"0": 0.5, "1": 0.75, "2": None}, {"1": 0.5, "2": 0.25, "3": 0.0})
    assert found is not None and found.by_seed == {"1": 0.25}
    assert paired({"0": 0.5}, {"1": 0.5}) is None


def test_one_seed_has_neither_deviation_nor_interval() -> None:
    found = paired({"0": 0.5}, {"0": 0.25})
    assert found is not None and (found.mean, found.std, found.low, found.high) == (0.25, None, None, None)
    assert deviation([1.0]) is None
