"""Questions with choices: own files in many layouts, medical and causal benchmarks, classes as choices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.data.tasks import Questions, Task, load_task, task_options
from coterie.data.tasks.choices import question_of
from coterie.data.tasks.language import filled, spaced
from coterie.errors import ConfigError, CoterieError
from coterie.maths.keys import root_key

KEY = root_key(0)


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def asked(count: int, start: int = 0, **more: Any) -> list[dict[str, Any]]:
    return [
        {"question": f"What is {i}?", "choices": [f"red {i}", f"blue {i}", "both"], "answer": i % 3, **more}
        for i in range(start, start + count)
    ]


def load(name: str, **options: Any) -> Task:
    return load_task(name, seed_key=KEY, **options)


def questions(task: Task) -> Questions:
    assert task.kind == "choices" and isinstance(task.train, Questions)
    return task.train


def test_an_own_file_gives_prompts_choices_and_places(tmp_path: Path) -> None:
    place, test = jsonl(tmp_path / "q.jsonl", asked(6)), jsonl(tmp_path / "t.jsonl", asked(2, 50))
    task = load("choices-file", path=str(place), test_path=str(test))
    assert questions(task).prompts[1] == "What is 1?\nAnswer:" and questions(task).groups is None
    assert questions(task).choices[1] == ("red 1", "blue 1", "both")
    assert task.train.labels.tolist() == [0, 1, 2] * 2 and len(task.test) == 2
    assert task.label_names == ("answer 1", "answer 2", "answer 3") and task.metrics == ("accuracy",)


def test_groups_contexts_and_a_template_are_taken(tmp_path: Path) -> None:
    rows = [row | {"site": i % 2, "text": "A {question} stands here."} for i, row in enumerate(asked(10))]
    options = {"path": str(jsonl(tmp_path / "q.jsonl", rows)), "group": "site", "context": "text", "score": "mean"}
    task = load("choices-file", **options)
    prompts = {*questions(task).prompts, *task.test.prompts}  # type: ignore[union-attr]
    assert "A {question} stands here.\nWhat is 3?\nAnswer:" in prompts
    assert set(task.train.groups or ()) == {"0", "1"} and questions(task).score == "mean"
    one = load("choices-file", **options, template="Q: {question} ({context}) A:")
    assert questions(one).prompts[0].startswith("Q: What is ") and questions(one).prompts[0].endswith("here.) A:")
    assert len(task.test) == 2 and not set(task.test.contents()) & set(task.train.contents())


def test_a_table_has_a_column_for_each_choice(tmp_path: Path) -> None:
    place = tmp_path / "q.csv"
    place.write_text("ask,a,b,right\nOne?,yes,no,a\nTwo?,up,down,b\nThree?,in,out,out\n", encoding="utf-8")
    columns = {"question": "ask", "choices": ["a", "b"], "answer": "right", "test_fraction": 0.4}
    task = load("choices-file", path=str(place), **columns)
    found = dict(zip(questions(task).prompts, questions(task).labels.tolist(), strict=True))
    found |= dict(zip(task.test.prompts, task.test.labels.tolist(), strict=True))  # type: ignore[union-attr]
    assert found == {"One?\nAnswer:": 0, "Two?\nAnswer:": 1, "Three?\nAnswer:": 1}


@pytest.mark.parametrize(
    ("choices", "answer", "place"),
    [
        (["up", "down"], 1, 1),
        (["up", "down"], "1", 1),
        (["up", "down"], "down", 1),
        (["up", "down"], "B", 1),
        ({"A": "up", "B": "down"}, "B", 1),
        ({"text": ["up", "down"], "label": ["1", "2"]}, "1", 0),
        (["B", "A"], "B", 0),
    ],
    ids=["place", "place as text", "text", "letter", "named", "two lists", "texts before letters"],
)
def test_choices_and_answers_of_public_layouts_are_understood(choices: Any, answer: Any, place: int) -> None:
    columns = {"question": "question", "choices": "choices", "answer": "answer"}
    record = {"question": "Which?", "choices": choices, "answer": answer}
    prompt, texts, found, group = question_of("here", record, columns, None)
    assert (prompt, found, group) == ("Which?\nAnswer:", place, None) and len(texts) == 2


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"question": " "}, "question 0: no text in 'question'"),
        ({"question": 3}, "question 0: no text in 'question'"),
        ({"choices": ["one"]}, 'must be two texts or more, not ["one"]'),
        ({"choices": ["one", 2]}, "must be two texts or more"),
        ({"choices": {"text": ["a", "b"], "label": ["A"]}}, "must be two texts or more"),
        ({"answer": 3}, "the answer 3 is none of the 3 choices (red 0, blue 0, both), from 0"),
        ({"answer": "green"}, "the answer 'green' is none"),
        ({"answer": True}, "the answer True is none"),
        ({"answer": None}, "the answer None is none"),
    ],
)
def test_what_is_no_question_is_refused_in_one_line(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    place = jsonl(tmp_path / "q.jsonl", [asked(1)[0] | row])
    with pytest.raises(CoterieError) as caught:
        load("choices-file", path=str(place))
    assert told in str(caught.value) and "\n" not in str(caught.value) and "q.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"question": "qestion"}, "no column 'qestion'; did you mean 'question'?"),
        ({"group": "site"}, "no column 'site'"),
        ({"template": "Answer:"}, "must hold {question}, and may hold {context}"),
        ({"template": "{question}", "context": "question"}, "must hold {context}"),
        ({"score": "max"}, "must be one of sum, mean"),
        ({"test_fraction": 1.5}, "test_fraction is 1.5"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    place = jsonl(tmp_path / "q.jsonl", asked(5))
    with pytest.raises(CoterieError) as caught:
        load("choices-file", path=str(place), **options)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CoterieError):
        load("choices-file", path=str(jsonl(tmp_path / "q.jsonl", [])))


def test_copa_asks_for_the_end_of_a_sentence(tmp_path: Path) -> None:
    row = {"premise": "It rained.", "choice1": "The sun shone.", "choice2": "I got wet.", "label": 1}
    folder = jsonl(tmp_path / "copa" / "train.jsonl", [row | {"question": "effect"}]).parent
    jsonl(folder / "val.jsonl", [row | {"question": "cause", "label": 0}])
    task = load("copa", path=str(folder))
    assert questions(task).prompts == ("It rained so",) and task.train.labels.tolist() == [1]
    assert questions(task).choices == (("the sun shone.", "I got wet."),)
    assert task.test.prompts == ("It rained because",)  # type: ignore[union-attr]
    jsonl(folder / "train.jsonl", [row | {"question": "why"}])
    with pytest.raises(CoterieError, match="'why' is neither cause nor effect"):
        load("copa", path=str(folder))


def test_pubmedqa_is_split_as_published(tmp_path: Path) -> None:
    record = {"QUESTION": "Does it?", "CONTEXTS": ["We saw.", "It does."], "final_decision": "yes"}
    known = {str(i): record | {"QUESTION": f"Does it {i}?"} for i in range(4)}
    (tmp_path / "ori_pqal.json").write_text(json.dumps(known))
    (tmp_path / "test_ground_truth.json").write_text(json.dumps({"2": "yes"}))
    task = load("pubmedqa", path=str(tmp_path))
    assert task.test.prompts == ("We saw. It does.\nDoes it 2?\nAnswer:",)  # type: ignore[union-attr]
    assert task.label_names == ("yes", "no", "maybe") and len(task.train) == 3
    (tmp_path / "test_ground_truth.json").write_text(json.dumps({"9": "yes"}))
    with pytest.raises(CoterieError, match="all test or all training"):
        load("pubmedqa", path=str(tmp_path))
    (tmp_path / "ori_pqal.json").write_text("[]")
    with pytest.raises(CoterieError, match="a JSON object is expected"):
        load("pubmedqa", path=str(tmp_path))


def test_medmcqa_names_the_answer_by_its_letter(tmp_path: Path) -> None:
    rows = [
        {"question": f"Which {i}?", "options": {"A": "0.1", "B": "0.2"}, "answer_idx": "AB"[i % 2]} for i in range(10)
    ]
    task = load("medmcqa", path=str(jsonl(tmp_path / "m" / "test.jsonl", rows).parent))
    assert (len(task.train), len(task.test)) == (8, 2) and set(questions(task).choices) == {("0.1", "0.2")}


def test_classes_become_choices_with_the_same_labels(reviews_csv: Path) -> None:
    plain, asked_ = (load(name, path=str(reviews_csv)) for name in ("file", "choices:file"))
    assert questions(asked_).prompts[0] == f"{plain.train.texts[0]}\nAnswer:"  # type: ignore[union-attr]
    assert set(questions(asked_).choices) == {("bad", "good")} and asked_.label_names == plain.label_names
    assert np.bincount(asked_.train.labels).tolist() == np.bincount(plain.train.labels).tolist()
    other = load("choices:file", path=str(reviews_csv), template="{text} It was", score="mean")
    assert questions(other).prompts[0].endswith(" It was") and questions(other).score == "mean"
    assert set(task_options("choices:file")) == {*task_options("file"), "template", "score"}


def test_pairs_become_prompts_of_both_texts(tmp_path: Path) -> None:
    place = tmp_path / "pairs.csv"
    place.write_text("text,pair,label\n" + "".join(f"a {i},b {i},{'xy'[i % 2]}\n" for i in range(10)))
    task = load("choices:file", path=str(place), pair="pair")
    prompts = (*questions(task).prompts, *task.test.prompts)  # type: ignore[union-attr]
    assert "a 3\nb 3\nAnswer:" in prompts


@pytest.mark.parametrize("name", ["choices:choices-file", "choices:instructions-file"])
def test_only_classes_become_choices(tmp_path: Path, name: str) -> None:
    place = jsonl(tmp_path / "q.jsonl", [row | {"prompt": "p"} for row in asked(9)])
    with pytest.raises(ConfigError, match="makes choices of classes"):
        load(name, path=str(place))


def test_choices_of_no_task_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no task 'fyle'; did you mean 'file'"):
        load("choices:fyle")


@given(st.text(max_size=5), st.text(max_size=5))
def test_a_space_stands_between_prompt_and_answer_unless_white_space_does(prompt: str, answer: str) -> None:
    added = spaced(prompt, answer)
    assert added.endswith(answer) and len(added) - len(answer) in (0, 1)
    border = (prompt + added)[max(len(prompt) - 1, 0) : len(prompt) + 1]
    assert any(letter.isspace() for letter in border) if prompt else added == answer


def test_texts_that_hold_a_template_s_names_stay_as_they_are() -> None:
    assert filled("{a}-{b}", {"a": "{b}", "b": "{a}"}) == "{b}-{a}"


def swag(i: int, **more: Any) -> dict[str, Any]:
    endings = [f"[substeps] ends {o}." for o in range(4)]
    row = {"activity_label": "Cooking", "ctx": f"[header] Pot {i} [title] It", "endings": endings, "label": i % 4}
    return row | more


def test_hellaswag_is_asked_without_marks_and_tested_on_its_validation(tmp_path: Path) -> None:
    jsonl(tmp_path / "h" / "hellaswag_train.jsonl", [swag(i) for i in range(8)])
    folder = jsonl(tmp_path / "h" / "hellaswag_val.jsonl", [swag(i, label=str(i % 4)) for i in range(20, 24)]).parent
    task = load("hellaswag", path=str(folder))
    assert questions(task).prompts[0] == "Cooking: Pot 0. It"
    assert questions(task).choices[0] == ("ends 0.", "ends 1.", "ends 2.", "ends 3.")
    assert task.train.labels.tolist() == [0, 1, 2, 3] * 2 and task.test.labels.tolist() == [0, 1, 2, 3]
    jsonl(tmp_path / "h" / "hellaswag_train.jsonl", [swag(0, label="")])
    with pytest.raises(CoterieError, match=r"question 0: the answer '' is none"):
        load("hellaswag", path=str(folder))
