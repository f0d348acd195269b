"""Comparisons: means, spreads, differences, rounds to a target, and a sentence that the figures support."""

from __future__ import annotations

import io
import json
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from coterie.errors import ConfigError
from coterie.experiments.compare import read_list, read_seeds
from coterie.experiments.comparison import FIGURES, PAIRED, Finished, comparison, timing
from coterie.experiments.intervals import t_quantile
from coterie.report.comparison import markdown, tables, times
from coterie.report.numbers import decimal, duration, percent, size

MANY = ["fedpa-lora", "flexlora", "heterogeneous-lora", "local-only", "fedit"]


def run(
    method: str, seed: int, pooled: float | None, own: float, curve: tuple[float | None, ...] = (), **extra: Any
) -> Finished:
    """A run of which each round after the first of `curve` sends 100 + 10 bytes up for each of two clients."""
    summary = {
        "method": method,
        "title": method.upper(),
        "metric": "accuracy",
        "seed": seed,
        "rounds": 3,
        "clients": {"a": {}, "b": {}},
        "task": {"test": 1000},
        "majority": {"pooled": 0.5, "own": 0.6},
        "global": None if pooled is None else {"pooled": {"score": pooled, "accuracy": 0.0}},
        "personal": {"clients": {"mean": own, "worst_50": own / 2, "worst_25": own / 4}, "pooled": {"score": own}},
        "mismatch": None,
        "init_mismatch": 0.25,
        "bytes": {"up": 1000, "down": 3000, "up_per_client": 100.0, "down_per_client": 300.0},
        "seconds": {"clients": 12.0, "server": 0.5},
        **extra,
    }
    metrics = [
        {
            "round": number,
            "bytes": {
                "round": {"up": {"payload": 200, "overhead": 20}, "down": {"payload": 7, "overhead": 7}},
                "evaluation": {"up": {"payload": 9999, "overhead": 0}},
            },
            "global": None if score is None else {"pooled": {"score": score}},
            "personal": {"clients": {"mean": score}} if score is not None else None,
        }
        for number, score in enumerate(curve, start=1)
    ]
    return Finished(summary, metrics)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9))
def test_figures_are_mean_and_sample_deviation_over_seeds(values: list[float]) -> None:
    found = comparison([run("a", seed, value, 0.5) for seed, value in enumerate(values)])
    figure = found["methods"]["a"]["figures"]["pooled"]
    assert figure["mean"] == pytest.approx(statistics.mean(values))
    assert figure["std"] == pytest.approx(statistics.stdev(values), abs=1e-12)
    assert figure["values"] == {str(seed): value for seed, value in enumerate(values)}


def test_the_worst_half_and_quarter_of_clients_are_figures() -> None:
    figures = comparison([run("a", 0, 0.5, 0.8)])["methods"]["a"]["figures"]
    assert (figures["own_worst_50"]["mean"], figures["own_worst_25"]["mean"]) == (0.4, 0.2)


def test_differences_are_taken_seed_by_seed_from_the_first_or_named_method() -> None:
    runs = [run("a", s, 0.5 + s / 10, 0.5) for s in range(3)] + [
        run("b", s, 0.6 + s / 10 + (s == 2) * 0.03, 0.5) for s in (2, 0, 1)
    ]
    found = comparison(runs)["paired"]
    assert found["against"] == "a" and list(found["methods"]) == ["b"] and list(found["methods"]["b"]) == list(PAIRED)
    lead = found["methods"]["b"]["pooled"]
    half = t_quantile(0.975, 2) * lead["std"] / 3**0.5
    assert lead["n"] == 3 and lead["mean"] == pytest.approx(0.11) and lead["std"] == pytest.approx(0.03 / 3**0.5)
    assert (lead["low"], lead["high"]) == pytest.approx((0.11 - half, 0.11 + half))
    assert comparison(runs, against="b")["paired"]["methods"]["a"]["pooled"]["mean"] == pytest.approx(-0.11)
    assert comparison(runs, against="of which no run finished")["paired"]["against"] == "a"


def test_rounds_and_bytes_count_until_a_given_score_is_first_reached() -> None:
    runs = [
        run("a", 0, 0.8, 0.8, (0.1, 0.7, 0.6)),
        run("a", 1, 0.8, 0.8, (0.1, None, 0.9)),
        run("b", 0, 0.9, 0.8, (0.1, 0.2, 0.71)),
        run("b", 1, 0.9, 0.8, (0.1, 0.2, 0.69)),
        run("c", 0, 0.2, 0.8, (0.1, 0.1, 0.2)),
        run("d", 0, None, 0.8, (None, None, None)),
    ]
    found = comparison(runs, target=0.7)
    reached = {method: entry["reached"]["pooled"] for method, entry in found["methods"].items()}
    assert found["targets"]["pooled"] == {"score": 0.7, "from": "given"}
    assert reached["a"]["rounds"]["values"] == {"0": 2, "1": 3} and reached["a"]["rounds"]["mean"] == 2.5
    assert reached["a"]["up_per_client"]["values"] == {"0": 220.0, "1": 330.0}
    assert reached["b"]["rounds"]["values"] == {"0": 3, "1": None}
    assert (reached["b"]["seeds"], reached["b"]["of"], reached["c"]["seeds"]) == (1, 2, 0)
    assert reached["d"] is None
    text = markdown(found)
    assert "| A | 2.5 | 275 B |" in text and "| B | 3 (1 of 2) | 330 B (1 of 2) |" in text
    assert "| C | not reached | not reached |" in text and "| D | – | – |" in text


def test_the_target_is_by_default_95_percent_of_the_best_final_mean() -> None:
    found = comparison([run("a", 0, 0.8, 0.3), run("b", 0, 0.6, 0.4), run("c", 0, None, 0.2)])
    assert found["targets"]["pooled"]["score"] == pytest.approx(0.76)
    assert found["targets"]["pooled"]["from"] == "95 % of A" and found["targets"]["own_mean"]["from"] == "95 % of B"
    negative = comparison([run("a", 0, -0.4, 0.0)])
    assert negative["targets"]["pooled"]["score"] == pytest.approx(-0.42)
    assert "pooled" not in comparison([run("a", 0, None, 0.3)])["targets"]


def test_one_seed_has_no_deviation_and_all_that_is_shown_says_that_no_spread_is_known() -> None:
    found = comparison([run("a", 0, 0.75, 0.7), run("b", 0, 0.7, 0.9), run("c", 0, None, 0.8)])
    assert found["methods"]["a"]["figures"]["pooled"]["std"] is None
    lead = found["paired"]["methods"]["b"]["pooled"]
    assert (lead["n"], lead["std"], lead["low"], lead["high"]) == (1, None, None, None)
    said = found["sentence"]
    assert "A is best on the pooled test (75.0; always the most frequent class: 50.0), 5.0 points above B" in said
    assert "B is best on clients' own tests (90.0; always the most frequent class: 60.0), 10.0 points above C" in said
    assert "One seed: no spread is known" in said and "up to 1.6 points" in said
    assert markdown(found).count("one seed: no spread is known") == 2


def test_a_lead_is_told_with_its_interval_and_whether_that_includes_0() -> None:
    wide = [run("a", 0, 0.9, 0.5), run("a", 1, 0.5, 0.5), run("b", 0, 0.6, 0.5), run("b", 1, 0.7, 0.5)]
    said = comparison(wide)["sentence"]
    assert "5.0 points above B (95 % interval -312.7 to 322.7, which includes 0)" in said and "2 seeds are few" in said
    assert "A is best on clients' own tests (50.0; always the most frequent class: 60.0), level with B" in said
    clear = [run("a", s, 0.9 + s / 100, 0.5) for s in range(5)] + [run("b", s, 0.6, 0.5) for s in range(5)]
    found = comparison(clear)
    assert "(95 % interval 30.0 to 34.0)" in found["sentence"] and "few" not in found["sentence"]
    assert "| B | −32.0 [−34.0, −30.0]* | 0.0 [0.0, 0.0] | 0.0 [0.0, 0.0] | 5 |" in markdown(found)


def test_without_any_global_model_only_own_tests_are_spoken_of() -> None:
    said = comparison([run("a", 0, None, 0.7)])["sentence"]
    assert "pooled test (" not in said and "A alone has a figure on clients' own tests" in said


def test_the_metric_is_named_and_the_most_frequent_class_is_its_baseline() -> None:
    text = markdown(comparison([run("a", 0, 0.5, 0.5)]))
    assert "## Score: accuracy, × 100" in text and "| majority class | 50.0 | 60.0 |" in text
    baseline = {"pooled": 0.0, "own": None}
    found = comparison([run(name, 0, 0.5, 0.5, metric="matthews", majority=baseline) for name in "ab"])
    assert "(50.0; always the most frequent class: 0.0)" in found["sentence"]
    assert "standard error" not in found["sentence"]
    assert "## Score: matthews" in markdown(found) and "| majority class | 0.0 | – |" in markdown(found)


def test_titles_that_two_methods_share_are_told_apart() -> None:
    found = comparison([run("mine.py:Mine", 0, 0.5, 0.5, title="FedIT"), run("fedit", 0, 0.5, 0.5, title="FedIT")])
    assert [method["title"] for method in found["methods"].values()] == ["FedIT (Mine)", "FedIT (fedit)"]


def test_times_stand_apart_from_what_settings_and_data_decide() -> None:
    runs = [run("a", 0, 0.5, 0.5), run("a", 1, 0.5, 0.5, seconds={"clients": 14.0, "server": 0.5})]
    later = [Finished({**one.summary, "seconds": {"clients": 99.0}}, one.metrics) for one in runs]
    assert json.dumps(comparison(runs)) == json.dumps(comparison(later))
    assert timing(runs)["seconds"]["a"]["clients"]["mean"] == 13.0
    assert times(timing(runs), comparison(runs)) == "time a run: A 14 s"


def test_every_figure_stands_in_the_tables_and_all_lines_fit_in_100_columns() -> None:
    runs = [run(name, s, 0.75 + s / 9, 0.5 - s / 9, (0.7, 0.8), mismatch=0.1) for name in MANY for s in (0, 1)]
    tuned = {
        "rule": "rule",
        "seeds": [0],
        "methods": {
            "fedit": {
                "chosen": {"train.lr": 0.1},
                "at_edge": ["train.lr"],
                "tried": [
                    {"settings": {"train.lr": 0.1}, "score": 0.512, "loss": 1.25},
                    {"settings": {"train.lr": 1.0}, "score": None, "loss": None},
                ],
            }
        },
    }
    found = comparison(runs, missing=["fedit-seed2"], tuning=tuned)
    console = Console(width=100, record=True, file=io.StringIO())
    for table in tables(found):
        console.print(table)
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 100 and "…" not in shown
    text = markdown(found)
    for part in ("80.6 ± 7.9", "100 B", "300 B", "4.0 kB", "0.100 ± 0.000", "0.250 ± 0.000", "HETEROGENEOUS-LORA"):
        assert part in shown and part in text
    assert "not finished, and left out: fedit-seed2" in shown and "FEDIT train.lr=0.1" in text
    assert "| FEDIT | train.lr=0.1 | 51.2 | 1.250 | chosen |" in text
    assert "| FEDIT | train.lr=1.0 | failed | – |  |" in text
    assert set(FIGURES) == set(found["methods"]["fedit"]["figures"])


def test_a_terminal_of_80_columns_breaks_lines_but_cuts_nothing_off() -> None:
    found = comparison([run(name, s, 0.75 + s / 9, 0.5 - s / 9, (0.7, 0.8)) for name in MANY[:3] for s in (0, 1)])
    for table in tables(found):
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(table)
        shown = console.export_text()
        said = [part for column in table.columns for part in (str(column.header), *map(str, column.cells))]
        assert all(word in shown for text in said for word in text.split())


@pytest.mark.parametrize("text", ["", ",", "a,a"])
def test_lists_need_different_names(text: str) -> None:
    with pytest.raises(ConfigError, match="different names"):
        read_list(text, "--methods")


def test_seeds_are_whole_numbers() -> None:
    assert read_seeds("0, 13,123") == [0, 13, 123]
    with pytest.raises(ConfigError, match="--tune-seeds needs whole numbers"):
        read_seeds("0,x", "--tune-seeds")


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
