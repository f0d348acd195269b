"""Benchmarks of multiple choice in the layouts in which they are public, on the hub and as files, with made-up rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from coterie.data.tasks import Questions, Task, load_task
from coterie.errors import DataError
from coterie.experiments.config import parse
from coterie.experiments.shares import chosen_task
from coterie.maths.keys import root_key

KEY = root_key(0)

Row = dict[str, Any]


class Split:
    """As much of a split of `datasets` as is read."""

    def __init__(self, rows: list[Row], classes: dict[str, list[str]]) -> None:
        self.rows, self.column_names = rows, list(rows[0])
        self.features = {name: SimpleNamespace(names=classes.get(name)) for name in self.column_names}

    def __getitem__(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]


def on_the_hub(
    monkeypatch: pytest.MonkeyPatch, rows: list[Row], hidden: list[Row], classes: dict[str, list[str]] | None = None
) -> None:
    """The rows as validation, twice over with another first word as train, and a test whose answers are kept back."""
    library: Any = ModuleType("datasets")
    splits = {"train": again(rows), "validation": rows} | ({"test": hidden} if hidden else {})
    library.load_dataset = lambda place, config: {n: Split(own, classes or {}) for n, own in splits.items()}
    monkeypatch.setitem(sys.modules, "datasets", library)


def again(rows: list[Row]) -> list[Row]:
    """The rows with other texts in the places of the first ones, so that they are no doubles."""
    first = next(name for name, value in rows[0].items() if isinstance(value, dict) or " " in str(value))
    other = [row[first] | {"stem": "Another"} if isinstance(row[first], dict) else f"Also {row[first]}" for row in rows]
    return [row | {first: text} for row, text in zip(rows, other, strict=True)]


def numbered(labels: list[Any]) -> dict[str, Any]:
    return {"text": ["a stone", "a leaf", "a cloud", "a shoe"], "label": labels}


WINOGRANDE: list[Row] = [
    {"sentence": "Ada paid Bo since _ was owed.", "option1": "Ada", "option2": "Bo", "answer": "2"},
    {"sentence": "Ada thanked Bo since _ was glad.", "option1": "Ada", "option2": "Bo", "answer": "1"},
]
ARC: list[Row] = [
    {"id": "x1", "question": "Which grows best?", "choices": numbered(["A", "B", "C", "D"]), "answerKey": "B"},
    {"id": "x2", "question": "Which sinks fast?", "choices": numbered(["1", "2", "3", "4"]), "answerKey": "1"},
    {"id": "x3", "question": "Which is worn?", "choices": numbered(["1", "2", "3", "4"]), "answerKey": "4"},
]
SOCIAL_IQA: list[Row] = [
    {
        "context": f"Kim baked {i} pies.",
        "question": "How does Kim feel?",
        "answerA": "tired",
        "answerB": "proud",
        "answerC": "cold",
        "label": right,
    }
    for i, right in enumerate(("3", "1", "2"))
]
COPA: list[Row] = [
    {
        "premise": "The lamp went out.",
        "choice1": "It got dark.",
        "choice2": "It rang.",
        "question": "effect",
        "label": 0,
    },
    {
        "premise": "The soup got cold.",
        "choice1": "It was red.",
        "choice2": "It stood.",
        "question": "cause",
        "label": 1,
    },
]
PIQA: list[Row] = [
    {"goal": "Dry a wet boot", "sol1": "Freeze it.", "sol2": "Stuff it with paper.", "label": 1},
    {"goal": "Peel a hot egg", "sol1": "Cool it first.", "sol2": "Heat it more.", "label": 0},
]
HELLASWAG: list[Row] = [
    {
        "ind": i,
        "activity_label": "Knotting",
        "ctx": f"He takes rope {i} and",
        "endings": ["eats it.", "ties it.", "paints it.", "sings."],
        "label": right,
    }
    for i, right in enumerate(("1", "0", "3", "2"))
]
OPENBOOKQA: list[Row] = [
    {"id": "o1", "question_stem": "What floats high", "choices": numbered(["A", "B", "C", "D"]), "answerKey": "C"},
    {"id": "o2", "question_stem": "What is hard", "choices": numbered(["A", "B", "C", "D"]), "answerKey": "A"},
]
MEDMCQA: list[Row] = [
    {"id": "m", "question": f"Which is no. {i}?", "opa": "1", "opb": "0", "opc": "3", "opd": "2", "cop": i, "exp": None}
    for i in range(4)
]
PUBMEDQA: list[Row] = [
    {
        "pubid": i,
        "question": f"Does drug {i} help?",
        "context": {"contexts": ["Mice ran.", "They slept."], "labels": ["AIM", "RESULTS"], "meshes": ["Mice"]},
        "long_answer": "So it seems.",
        "final_decision": right,
    }
    for i, right in enumerate(("yes", "no", "maybe"))
]

# Rows, what keeps an answer back, the task's options, and of the last row the prompt and the right choice of each.
QUESTIONS: dict[str, tuple[list[Row], Row, Row, str, list[str]]] = {
    "WinoGrande": (
        WINOGRANDE,
        {"answer": ""},
        {"question": "sentence", "choices": ["option1", "option2"], "answers_from": 1},
        "Ada thanked Bo since _ was glad.\nAnswer:",
        ["Bo", "Ada"],
    ),
    "ARC": (
        ARC,
        {"answerKey": ""},
        {"answer": "answerKey"},
        "Which is worn?\nAnswer:",
        ["a leaf", "a stone", "a shoe"],
    ),
    "Social IQA": (
        SOCIAL_IQA,
        {"label": ""},
        {
            "context": "context",
            "choices": ["answerA", "answerB", "answerC"],
            "answer": "label",
            "answers_from": 1,
        },
        "Kim baked 2 pies.\nHow does Kim feel?\nAnswer:",
        ["cold", "tired", "proud"],
    ),
    "COPA": (
        COPA,
        {"label": -1},
        {
            "question": "premise",
            "context": "question",
            "choices": ["choice1", "choice2"],
            "answer": "label",
            "template": "{question} What is the {context}?",
        },
        "The soup got cold. What is the cause?",
        ["It got dark.", "It stood."],
    ),
    "PIQA": (
        PIQA,
        {"label": -1},
        {"question": "goal", "choices": ["sol1", "sol2"], "answer": "label"},
        "Peel a hot egg\nAnswer:",
        ["Stuff it with paper.", "Cool it first."],
    ),
    "HellaSwag": (
        HELLASWAG,
        {"label": ""},
        {"question": "ctx", "choices": "endings", "answer": "label", "template": "{question}"},
        "He takes rope 3 and",
        ["ties it.", "eats it.", "sings.", "paints it."],
    ),
    "OpenBookQA": (
        OPENBOOKQA,
        {"answerKey": ""},
        {"question": "question_stem", "answer": "answerKey"},
        "What is hard\nAnswer:",
        ["a cloud", "a stone"],
    ),
    "MedMCQA": (
        MEDMCQA,
        {"cop": -1},
        {"choices": ["opa", "opb", "opc", "opd"], "answer": "cop"},
        "Which is no. 3?\nAnswer:",
        ["1", "0", "3", "2"],
    ),
}


def right_choices(task: Task) -> list[str]:
    test = task.test
    assert isinstance(test, Questions)
    return [options[right] for options, right in zip(test.choices, test.labels, strict=True)]


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_right_choices_of_public_sets_of_the_hub_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, unknown, options, prompt, right = QUESTIONS[name]
    on_the_hub(monkeypatch, rows, [row | unknown for row in rows])
    task = load_task("hub-choices:owner/name", seed_key=KEY, **options)
    assert right_choices(task) == right and task.notes[0] == "the test set is the split 'validation'"
    assert isinstance(task.test, Questions) and task.test.prompts[-1] == prompt
    assert task.train.labels.tolist() == task.test.labels.tolist()


def test_the_abstract_of_pubmedqa_stands_before_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_hub(monkeypatch, PUBMEDQA, [])
    columns: Row = {"text": "question", "pair": "context.contexts", "label": "final_decision"}
    task = load_task("choices:hub:owner/name", seed_key=KEY, **columns, template="{pair}\n{text}\nAnswer:")
    assert right_choices(task) == ["yes", "no", "maybe"] and task.label_names == ("maybe", "no", "yes")
    assert isinstance(task.test, Questions)
    assert task.test.prompts[0] == "Mice ran. They slept.\nDoes drug 0 help?\nAnswer:"


def written(path: Path, rows: list[Row]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def nested(row: Row) -> Row:
    """As ARC and OpenBookQA are published as files: a stem and a record for each choice, inside of the question."""
    choices = [{"text": t, "label": n} for t, n in zip(row["choices"]["text"], row["choices"]["label"], strict=True)]
    stem = row.get("question", row.get("question_stem"))
    return {"id": row["id"], "question": {"stem": stem, "choices": choices}, "answerKey": row["answerKey"]}


FILES: dict[str, tuple[list[Row], Row, list[str]]] = {
    "WinoGrande": (WINOGRANDE, QUESTIONS["WinoGrande"][2], ["Bo", "Ada"]),
    "ARC": (
        [nested(row) for row in ARC],
        {"question": "question.stem", "choices": "question.choices", "answer": "answerKey"},
        ["a leaf", "a stone", "a shoe"],
    ),
    "OpenBookQA": (
        [nested(row) for row in OPENBOOKQA],
        {"question": "question.stem", "choices": "question.choices", "answer": "answerKey"},
        ["a cloud", "a stone"],
    ),
    "HellaSwag": (
        [row | {"label": int(row["label"])} for row in HELLASWAG],
        QUESTIONS["HellaSwag"][2],
        QUESTIONS["HellaSwag"][4],
    ),
    "MedMCQA": (
        [row | {"cop": row["cop"] + 1} for row in MEDMCQA],
        QUESTIONS["MedMCQA"][2] | {"answers_from": 1},
        ["1", "0", "3", "2"],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_right_choices_of_published_files_are_found(name: str, tmp_path: Path) -> None:
    rows, options, right = FILES[name]
    paths: Row = {"path": written(tmp_path / "a.jsonl", again(rows)), "test_path": written(tmp_path / "b.jsonl", rows)}
    task = load_task("choices-file", seed_key=KEY, **paths, **options)
    assert right_choices(task) == right and len(task.train) == len(rows)


def test_a_number_of_a_given_first_one_is_no_text_of_a_choice(tmp_path: Path) -> None:
    rows = [{"question": f"Which {i}?", "choices": ["2", "0", "1"], "answer": "1"} for i in range(2)]
    paths: Row = {"path": written(tmp_path / "a.jsonl", rows[:1]), "test_path": written(tmp_path / "b.jsonl", rows[1:])}
    found = [right_choices(load_task("choices-file", seed_key=KEY, **paths, answers_from=n)) for n in (None, 0, 1)]
    assert found == [["1"], ["0"], ["2"]]


@pytest.mark.parametrize(
    ("answer", "given", "told"),
    [
        ("2", None, "(Ada, Bo), from 0; if they count from 1, set task.answers_from=1"),
        (2, None, "from 0; if they count from 1, set task.answers_from=1"),
        ("3", None, "from 0"),
        ("0", 1, "from 1"),
        (0, 1, "from 1"),
    ],
)
def test_an_answer_beyond_the_choices_says_where_counting_may_begin(
    tmp_path: Path, answer: Any, given: int | None, told: str
) -> None:
    path = written(tmp_path / "q.jsonl", [{"question": "Who?", "choices": ["Ada", "Bo"], "answer": answer}])
    with pytest.raises(DataError) as caught:
        load_task("choices-file", seed_key=KEY, path=path, answers_from=given)
    assert str(caught.value).endswith(told) and "\n" not in str(caught.value)


def test_a_configuration_says_where_answers_begin_to_count(tmp_path: Path) -> None:
    task = {
        "name": "choices-file",
        "path": written(tmp_path / "train.jsonl", again(WINOGRANDE)),
        "test_path": written(tmp_path / "test.jsonl", WINOGRANDE),
        "columns": {"question": "sentence", "choices": ["option1", "option2"]},
        "answers_from": 1,
    }
    assert right_choices(chosen_task(parse({"method": "fedit", "task": task}))) == ["Bo", "Ada"]
    part = {"task": task["name"], "name": "wino"} | {name: task[name] for name in task if name != "name"}
    mixed = chosen_task(parse({"method": "fedit", "task": {"name": "mixture", "parts": [part]}}))
    assert sorted(mixed.train.labels.tolist()) == [0, 1]
