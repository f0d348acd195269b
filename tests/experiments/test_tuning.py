"""What is tried, and what is chosen: by validation score, then loss, then the smaller value, and never by a test."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.experiments.tuning import (
    Tried,
    Tuning,
    Validation,
    candidates,
    check_options,
    choose,
    label,
    read_tuning,
    record,
)


def tried(lr: float, score: float | None, loss: float | None = 1.0) -> Tried:
    return Tried({"train.lr": lr}, {0: Validation(score, loss, 10)})


def test_rates_are_short_for_a_grid_over_them() -> None:
    assert read_tuning("1e-3,0.003, 1", [], None) == Tuning({"train.lr": (0.001, 0.003, 1)})
    assert read_tuning(None, ["train.lr=1e-3,3e-3", "options.lam=0.1,1"], [1, 2]) == Tuning(
        {"train.lr": (0.001, 0.003), "options.lam": (0.1, 1)}, (1, 2)
    )
    assert read_tuning(None, [], None) is None


@pytest.mark.parametrize(
    ("lrs", "tune", "seeds", "told"),
    [
        (None, ["partition.beta=0.1,1"], None, "cannot be tuned; settings of train, lora, options can"),
        (None, ["seed=0,1"], None, "cannot be tuned"),
        (None, ["train.lr"], None, "cannot be tuned"),
        ("", [], None, "train.lr needs different values"),
        ("1e-3,0.001", [], None, "train.lr needs different values"),
        ("1e-3", ["train.lr=1"], None, "train.lr is to be tuned twice"),
        (None, ["train.lr={"], None, "no value that can be tried"),
        (None, [], [0], "--tune-seeds needs something to tune"),
    ],
)
def test_what_cannot_be_tuned_is_told(lrs: str | None, tune: list[str], seeds: list[int] | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_tuning(lrs, tune, seeds)


def test_an_option_is_tried_for_the_methods_that_have_it_alone() -> None:
    tuning = Tuning({"train.lr": (0.1, 0.2), "options.lam": (0, 1)})
    assert candidates("fedit", tuning) == [{"train.lr": 0.1}, {"train.lr": 0.2}]
    assert candidates("fedpa-lora", tuning) == [
        {"train.lr": lr, "options.lam": lam} for lr in (0.1, 0.2) for lam in (0, 1)
    ]
    assert candidates("fedit", Tuning({"options.lam": (0, 1)})) == [{}]
    check_options(["fedit", "fedpa-lora"], tuning)
    with pytest.raises(ConfigError, match="none of the methods has an option 'lam'"):
        check_options(["fedit"], tuning)


def test_a_run_is_named_after_what_it_tries() -> None:
    assert label({"train.lr": 0.001, "options.lam": 1}) == "-lr0.001-lam1"
    assert label({"options.of": "a/b c"}) == "-ofa_b_c" and label({}) == ""


@given(st.permutations([tried(0.1, 0.5), tried(0.2, 0.7, 2.0), tried(0.4, 0.7, 1.5), tried(0.3, 0.7, 1.5)]))
def test_the_best_score_is_chosen_then_the_lower_loss_then_the_smaller_rate(order: list[Tried]) -> None:
    chosen = choose(order, {"train.lr": [one.settings["train.lr"] for one in order]})
    assert chosen is not None and chosen.settings == {"train.lr": 0.3}


@pytest.mark.parametrize("score", [None, math.nan, math.inf])
def test_a_failed_or_infinite_score_is_never_chosen(score: float | None) -> None:
    grid = {"train.lr": [0.1, 0.2]}
    chosen = choose([tried(0.1, score), tried(0.2, 0.1)], grid)
    assert chosen is not None and chosen.settings == {"train.lr": 0.2}
    assert choose([Tried({"train.lr": 0.1}, {0: None})], grid) is None


def test_a_missing_loss_loses_a_tie() -> None:
    chosen = choose([tried(0.1, 0.5, None), tried(0.2, 0.5, 9.0)], {"train.lr": [0.1, 0.2]})
    assert chosen is not None and chosen.settings == {"train.lr": 0.2}


def test_values_that_are_no_numbers_are_ordered_as_given() -> None:
    both = [Tried({"train.optimizer": name}, {0: Validation(0.5, 1.0, 10)}) for name in ("adamw", "sgd")]
    chosen = choose(both, {"train.optimizer": ["sgd", "adamw"]})
    assert chosen is not None and chosen.settings == {"train.optimizer": "sgd"}


def test_scores_are_means_over_seeds_and_need_all_of_them() -> None:
    one = Tried({"train.lr": 1.0}, {0: Validation(0.5, 1.0, 10), 1: Validation(0.75, 2.0, 10)})
    assert (one.score, one.loss) == (0.625, 1.5)
    assert Tried({"train.lr": 1.0}, {0: Validation(0.5, 1.0, 10), 1: None}).score is None


def test_the_record_tells_all_that_was_tried_and_when_more_may_lie_beyond() -> None:
    tuning = Tuning({"train.lr": (0.1, 0.2, 0.3)})
    made = record({"a": [tried(0.1, 0.5), tried(0.2, 0.7), tried(0.3, None)], "b": [tried(0.1, 0.9)]}, tuning, [0])
    assert made["methods"]["a"]["chosen"] == {"train.lr": 0.2} and made["methods"]["a"]["at_edge"] == []
    assert [one["score"] for one in made["methods"]["a"]["tried"]] == [0.5, 0.7, None]
    assert made["methods"]["a"]["tried"][0]["by_seed"] == {"0": {"score": 0.5, "loss": 1.0, "examples": 10}}
    assert made["methods"]["b"]["at_edge"] == ["train.lr"] and made["seeds"] == [0]
