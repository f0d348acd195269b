"""The commonsense sets of LLM-Adapters: questions out of instructions, on generated files in the public layout."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.data.tasks import Questions, Task, load_task
from coterie.data.tasks.commonsense import COMMONSENSE, parted_instruction, read_instructions
from coterie.errors import CoterieError
from coterie.maths.keys import root_key

KEY = root_key(0)


def record(instruction: str, answer: str) -> dict[str, str]:
    return {"instruction": instruction, "input": "", "output": f"the correct answer is {answer}", "answer": answer}


def question(number: int, right: int, choices: int = 4) -> dict[str, str]:
    """In the layout of ARC and OpenBookQA."""
    listed = " ".join(f"Answer{i + 1}: thing {number}.{i}" for i in range(choices))
    names = "/".join(f"answer{i + 1}" for i in range(choices))
    asked = f"Please choose: What is {number}?\n\n{listed}\n\nAnswer format: {names}"
    return record(asked, f"answer{right + 1}")


def write(folder: Path, **parts: list[dict[str, str]]) -> Path:
    folder.mkdir(exist_ok=True)
    for part, records in parts.items():
        (folder / f"{part}.json").write_text(json.dumps(records))
    return folder


@pytest.mark.parametrize(
    ("given_", "prompt", "choices", "label", "names"),
    [
        (question(3, 2, 3), "Please choose: What is 3?", ("thing 3.0", "thing 3.1", "thing 3.2"), 2, "answer"),
        (
            record(
                "Goal?\n\nSolution1: cut it. \n\nSolution2: glue  it.\n\nAnswer format: solution1/solution2",
                "solution2",
            ),
            "Goal?",
            ("cut it.", "glue  it."),
            1,
            "solution",
        ),
        (
            record(
                "Fill in: Ann saw Bea so _ ran.\n\nOption1: Ann Option2: Bea Answer format: option1/option2", "option1"
            ),
            "Fill in: Ann saw Bea so _ ran.",
            ("Ann", "Bea"),
            0,
            "option",
        ),
        (
            record("Answer with true or false, question: is it?\n\nAnswer format: true/false", "false"),
            "Answer with true or false, question: is it?",
            ("true", "false"),
            1,
            "",
        ),
    ],
    ids=["answers", "solutions", "options", "truth"],
)
def test_choices_are_parted_from_the_question(
    tmp_path: Path, given_: dict[str, str], prompt: str, choices: tuple[str, ...], label: int, names: str
) -> None:
    found = read_instructions(write(tmp_path / "x", test=[given_]) / "test.json")
    assert found.prompts == (f"{prompt}\nAnswer:",) and found.choices == (choices,) and found.labels.tolist() == [label]
    parted = parted_instruction(given_["instruction"])
    assert parted is not None and parted[2][label] == given_["answer"]
    assert parted[2] == (tuple(f"{names}{i + 1}" for i in range(len(choices))) if names else choices)


WORDS = st.text(alphabet="abcdefgh :,.", min_size=1, max_size=12).filter(str.strip)


@given(WORDS, st.lists(WORDS, min_size=2, max_size=5))
def test_any_question_and_choices_come_back(asked: str, choices: list[str]) -> None:
    listed = " ".join(f"Answer{i + 1}: {choice}" for i, choice in enumerate(choices))
    names = tuple(f"answer{i + 1}" for i in range(len(choices)))
    parted = parted_instruction(f"{asked}\n\n{listed}\n\nAnswer format: {'/'.join(names)}")
    assert parted == (asked.strip(), tuple(choice.strip() for choice in choices), names)


def test_a_question_that_mentions_a_marker_keeps_it() -> None:
    parted = parted_instruction("What is Answer1: in?\n\nAnswer1: a Answer2: b\n\nAnswer format: answer1/answer2")
    assert parted == ("What is Answer1: in?", ("a", "b"), ("answer1", "answer2"))


def load(folder: Path, name: str = "arc-easy", seed: int = 0, **options: Any) -> Task:
    return load_task(name, seed_key=root_key(seed), path=str(folder), **options)


def test_training_drops_the_questions_of_the_test_set(tmp_path: Path) -> None:
    train = [question(i, i % 4) for i in range(12)]
    task = load(write(tmp_path / "x", train=train, test=[question(3, 3), question(90, 0)]))
    assert (len(task.train), len(task.test)) == (11, 2) and task.kind == "choices"
    assert task.notes == ("1 training examples were dropped because their text stands in the test set",)
    assert task.metrics == ("accuracy",) and "from the folder x" in task.source
    assert task.label_names == ("answer 1", "answer 2", "answer 3", "answer 4")


def test_a_set_that_is_only_a_test_set_is_split_alike_for_every_seed(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", test=[question(i, i % 2, 2) for i in range(50)])
    one, other = load(folder, "piqa", 1), load(folder, "piqa", 2)
    assert one.train.contents() == other.train.contents() and one.test.contents() == other.test.contents()
    assert (len(one.train), len(one.test)) == (40, 10) and Counter(one.test.labels.tolist()) == {0: 5, 1: 5}
    assert "train.json is missing from the folder: test.json stands for both" in one.notes


def test_limits_keep_the_places_of_right_answers_in_proportion(tmp_path: Path) -> None:
    train, test = [question(i, i % 4) for i in range(80)], [question(100 + i, i % 4) for i in range(40)]
    folder = write(tmp_path / "x", train=train, test=test)
    one, other = (load(folder, seed=s, limit_train=20, limit_test=8, score="mean") for s in (1, 2))
    assert Counter(one.train.labels.tolist()) == dict.fromkeys(range(4), 5) and len(one.test) == 8
    assert one.test.contents() == other.test.contents() and one.train.contents() != other.train.contents()
    assert isinstance(one.train, Questions) and one.train.score == "mean"


def test_truth_values_name_the_labels(tmp_path: Path) -> None:
    asked = [record(f"Is it {i}?\n\nAnswer format: true/false", "true" if i % 2 else "false") for i in range(9)]
    assert load(write(tmp_path / "x", test=asked), "boolq-closed").label_names == ("true", "false")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", "not JSON"),
        ("{}", "a list of questions is expected"),
        ("[]", "a list of questions is expected"),
        ("[3]", "question 0: no choices"),
        (json.dumps([{**question(0, 0), "answer": 1}]), "question 0: instruction, input and answer must be texts"),
        (json.dumps([record("Why?", "answer1")]), "question 0: no choices in the instruction 'Why?'"),
        (json.dumps([record("Why?\n\nAnswer1: a\n\nAnswer format: answer1/answer2", "answer1")]), "no choices"),
        (
            json.dumps([record("Why?\n\nAnswer1: Answer2: b\n\nAnswer format: answer1/answer2", "answer1")]),
            "no choices",
        ),
        (json.dumps([question(0, 0), question(1, 7)]), "question 1: the answer 'answer8' is not among answer1"),
    ],
)
def test_what_is_no_question_is_refused_in_one_line(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "test.json").write_text(content)
    with pytest.raises(CoterieError) as caught:
        load(tmp_path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    with pytest.raises(CoterieError, match="no folder 'llm_adapters_piqa'"):
        load_task("piqa", seed_key=KEY)


#: Training and test questions.
KNOWN = {
    "arc-easy": (2_249, 2_376),
    "arc-challenge": (1_119, 1_172),
    "openbookqa": (4_957, 500),
    "boolq-closed": (9_427, 3_270),
    "piqa": (1_470, 368),
    "winogrande": (1_014, 253),
    "social-iqa": (1_558, 391),
}


@pytest.mark.data
@pytest.mark.parametrize("name", COMMONSENSE)
def test_every_question_of_the_real_sets_is_read(data_dir: Path, name: str) -> None:
    folder = f"llm_adapters_{COMMONSENSE[name][0]}"
    if not (data_dir / folder).is_dir():
        pytest.skip(f"COTERIE_DATA holds no {folder!r}")
    task = load_task(name, seed_key=KEY)
    assert (len(task.train), len(task.test)) == KNOWN[name]
    for part in (task.train, task.test):
        assert isinstance(part, Questions)
        for prompt, choices in zip(part.prompts, part.choices, strict=True):
            assert 2 <= len(choices) <= 5 and prompt.endswith("\nAnswer:") and all(choices)
            assert not any(mark in text for text in choices for mark in ("Answer format", "Answer1:", "\n\n"))
