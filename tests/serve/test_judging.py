"""Judges of generated answers: numbers, people, programs."""

from __future__ import annotations

import os

import pytest

from coterie.data.tasks.base import Judged
from coterie.data.tasks.registry import load_pool
from coterie.serve.judging import JUDGES, TITLES, agreement, code, completion, exact, final_number, number

WORKED = "She sells 9 eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18"


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (WORKED, 18),
        ("#### 1,234", 1234),
        ("#### $-3.50 dollars, or 7", -3.5),
        ("First 5, then 7. The answer is 12. That is more than 3.", 12),
        ("so 3 + 4 = 7", 7),
        ("it costs 2.50.", 2.5),
        ("none at all", None),
        ("#### none, though 3 stood here", 3),
        ("9 #### ", None),
    ],
)
def test_the_final_number_is_found_where_a_worked_answer_ends(said: str, value: float | None) -> None:
    assert final_number(said) == value


def test_equal_numbers_count_however_they_are_written() -> None:
    assert number("The answer is 18.00", (WORKED,)) == 1 and number("#### 1,8", (WORKED,)) == 1
    assert number("#### 19", (WORKED,)) == 0 and number("eighteen", (WORKED,)) == 0


def test_three_people_who_agree_make_a_whole_answer() -> None:
    people = ("a can", "can", "The can.", "tin", "tin", *["other"] * 5)
    assert agreement("Can!\nand more", people) == 1
    assert agreement("tin", people) == pytest.approx(2 / 3) and agreement("bottle", people) == 0
    assert agreement("", people) == 0


def test_the_same_words_count_in_any_case() -> None:
    assert exact(" Yes ", ("yes",)) == 1 and exact("no", ("yes", "NO")) == 1 and exact("yes sir", ("yes",)) == 0


def test_a_completion_ends_where_something_else_begins() -> None:
    body = "    if x:\n        return 1\n\n    return 0\n"
    assert completion(body + "\ndef other():\n    pass") == body
    assert completion(body + "\nprint(f(3))") == body and completion(body) == body


PROMPT = 'def double(x: int) -> int:\n    """Twice x."""\n'
TEST = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n"


@pytest.mark.skipif(os.name != "posix", reason="programs are run on Unix")
def test_a_program_is_right_when_it_passes_the_problems_own_test() -> None:
    references = (PROMPT, TEST, "double")
    assert code("    return 2 * x\n\ndef double(x):\n    return 0", references) == 1
    for wrong in ("    return x * x\n", "    return 2 *\n", "    exit()\n", "    while True: pass\n", ""):
        assert code(wrong, references, seconds=1) == 0, wrong


@pytest.mark.assets
@pytest.mark.skipif(os.name != "posix", reason="programs are run on Unix")
def test_benchmark_problems_are_solved_by_their_own_solutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    problems = load_pool("humaneval").train
    assert len(problems) == 164
    for place in (0, 53, 101):
        references = problems.references[place]  # type: ignore[index]
        assert code(problems.answers[place], references) == 1  # type: ignore[union-attr]
        assert code("    return None\n", references) == 0


def test_every_kind_of_judging_has_a_judge_and_a_title() -> None:
    from typing import get_args

    assert set(JUDGES) == set(TITLES) == set(get_args(Judged))
