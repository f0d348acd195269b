"""Comparisons: means, spreads, and a sentence that claims no more than the figures support."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.experiments.compare import read_list, read_seeds
from coterie.experiments.comparison import FIGURES, comparison
from coterie.report.comparison import ROWS, SPREAD, markdown, table
from coterie.report.numbers import decimal, duration, percent, size


def summary(method: str, seed: int, pooled: float | None, own: float, **extra: Any) -> dict[str, Any]:
    return {
        "method": method,
        "title": method.upper(),
        "seed": seed,
        "rounds": 3,
        "task": {"test": 1000},
        "majority": {"pooled": 0.5, "own": 0.6},
        "global": None if pooled is None else {"pooled": {"accuracy": pooled}},
        "personal": {"clients": {"mean": own, "worst_25": own / 2}, "pooled": {"accuracy": own}},
        "mismatch": None,
        "init_mismatch": 0.25,
        "bytes": {"up": 1000, "down": 3000, "up_per_client": 100.0, "down_per_client": 300.0},
        "seconds": {"clients": 12.0, "server": 0.5},
        **extra,
    }


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9))
def test_figures_are_mean_and_sample_deviation_over_seeds(values: list[float]) -> None:
    found = comparison([summary("a", seed, value, 0.5) for seed, value in enumerate(values)])
    figure = found["methods"]["a"]["figures"]["pooled"]
    assert figure["mean"] == pytest.approx(statistics.mean(values))
    assert figure["std"] == pytest.approx(statistics.stdev(values), abs=1e-12)
    assert figure["values"] == {str(seed): value for seed, value in enumerate(values)}


def test_one_seed_has_no_deviation_and_the_sentence_says_that_it_cannot_tell() -> None:
    found = comparison([summary("a", 0, 0.75, 0.7), summary("b", 0, 0.7, 0.9), summary("c", 0, None, 0.8)])
    assert found["methods"]["a"]["figures"]["pooled"]["std"] is None
    said = found["sentence"]
    assert "A is best on the pooled test (75.0 %; always the most frequent class: 50.0 %), 5.0 points above B" in said
    assert (
        "B is best on clients' own tests (90.0 %; always the most frequent class: 60.0 %), 10.0 points above C" in said
    )
    assert "One seed shows no spread" in said and "up to 1.6 points" in said


def test_a_lead_within_twice_its_standard_error_is_called_so() -> None:
    wide = [summary("a", 0, 0.9, 0.5), summary("a", 1, 0.5, 0.5), summary("b", 0, 0.6, 0.5), summary("b", 1, 0.7, 0.5)]
    said = comparison(wide)["sentence"]
    assert "not more than twice the standard error of 25.0" in said and "2 seeds are too few" in said
    assert "A is best on clients' own tests (50.0 %; always the most frequent class: 60.0 %), level with B" in said
    clear = [summary("a", s, 0.9 + s / 100, 0.5) for s in range(5)] + [summary("b", s, 0.6, 0.5) for s in range(5)]
    said = comparison(clear)["sentence"]
    assert "(more than twice the standard error" in said and "too few" not in said


def test_without_any_global_model_only_own_tests_are_spoken_of() -> None:
    said = comparison([summary("a", 0, None, 0.7)])["sentence"]
    assert "pooled test (" not in said and "A alone has a figure on clients' own tests" in said


def test_every_figure_has_a_heading_and_stands_in_table_and_markdown() -> None:
    assert list(ROWS) == list(FIGURES) and set(SPREAD) <= set(ROWS)
    found = comparison([summary(name, seed, 0.75, 0.5) for name in "ab" for seed in (0, 1)])
    text = markdown(found)
    assert len(table(found).rows) == len(ROWS)
    for heading, _ in ROWS.values():
        assert f"| {heading} |" in text
    assert "75.0 ± 0.0" in text and "| 12 s | 12 s |" in text and "4.0 kB" in text


@pytest.mark.parametrize("text", ["", ",", "a,a"])
def test_lists_need_different_names(text: str) -> None:
    with pytest.raises(ConfigError, match="different names"):
        read_list(text, "--methods")


def test_seeds_are_whole_numbers() -> None:
    assert read_seeds("0, 13,123") == [0, 13, 123]
    with pytest.raises(ConfigError, match="whole numbers"):
        read_seeds("0,x")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (percent(0.12345), "12.3"),
        (percent(None), "–"),
        (decimal(None), "–"),
        (decimal(1.23456), "1.235"),
        (size(999), "999 B"),
        (size(1000), "1.0 kB"),
        (size(123_456), "123 kB"),
        (size(2.5e9), "2.5 GB"),
        (duration(3.21), "3.2 s"),
        (duration(61), "1 min 01 s"),
        (duration(7500), "2 h 05 min"),
    ],
)
def test_numbers_are_written_as_people_read_them(written: str, expected: str) -> None:
    assert written == expected
