"""Prompts with answers: own files, plain texts, groups, grade-school maths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.data.tasks import Instructions, Task, load_task
from coterie.errors import CoterieError, DataError
from coterie.maths.keys import root_key

KEY = root_key(0)


def load(name: str = "instructions-file", **options: Any) -> Task:
    return load_task(name, seed_key=KEY, **options)


def instructions(task: Task) -> Instructions:
    assert task.kind == "instructions" and isinstance(task.train, Instructions)
    return task.train


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "a.csv"
    rows = (f'"Say, {i}",word {i},{("en", "de")[i % 2]}' for i in range(20))
    path.write_text("prompt,answer,language\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return path


def test_prompts_and_answers_are_read_and_split(place: Path) -> None:
    task = load(path=str(place))
    assert (len(task.train), len(task.test)) == (16, 4) and task.label_names == ("all",)
    pairs = dict(instructions(task).contents())
    assert all(prompt.removeprefix("Say, ") == answer.removeprefix("word ") for prompt, answer in pairs.items())
    assert task.train.labels.tolist() == [0] * 16 and task.train.groups is None and task.metrics == ("accuracy",)


def test_groups_are_labels_too(place: Path) -> None:
    task = load(path=str(place), group="language")
    assert task.label_names == ("de", "en")
    assert task.train.groups == tuple(task.label_names[label] for label in task.train.labels)
    # The split keeps the groups' proportions.
    assert sorted(task.test.labels.tolist()) == [0, 0, 1, 1]


def test_a_template_surrounds_the_prompt(place: Path) -> None:
    task = load(path=str(place), template="### {prompt}\n### Answer:")
    assert all(prompt.startswith("### Say, ") and prompt.endswith("Answer:") for prompt in instructions(task).prompts)


def test_texts_may_be_learnt_whole(place: Path) -> None:
    task = load(path=str(place), text="answer")
    assert set(instructions(task).prompts) == {""} and instructions(task).answers[0].startswith("word ")


def test_a_test_file_keeps_the_groups_of_the_training_file(place: Path, tmp_path: Path) -> None:
    apart = tmp_path / "t.jsonl"
    apart.write_text(json.dumps({"prompt": "Say", "answer": "x", "language": "en"}) + "\n")
    task = load(path=str(place), test_path=str(apart), group="language")
    assert len(task.train) == 20 and task.test.labels.tolist() == [1]
    apart.write_text(json.dumps({"prompt": "Say", "answer": "x", "language": "fr"}) + "\n")
    with pytest.raises(CoterieError, match="the group 'fr' does not occur in the training examples"):
        load(path=str(place), test_path=str(apart), group="language")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"prompt": "promt"}, "no column 'promt'; did you mean 'prompt'?"),
        ({"template": "Answer:"}, "must hold {prompt}"),
        ({"text": "answer", "prompt": "prompt"}, "give it, or prompt and answer, not both"),
        ({"text": "answer", "template": "{prompt}"}, "are learnt without one"),
        ({"test_fraction": 0}, "test_fraction is 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(place: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(CoterieError) as caught:
        load(path=str(place), **options)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_training_and_test_that_are_the_same_leave_nothing_to_train_on(place: Path) -> None:
    with pytest.raises(CoterieError, match="no training example is left"):
        load(path=str(place), test_path=str(place))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\n")
    with pytest.raises(CoterieError, match="no examples"):
        load(path=str(tmp_path / "a.csv"))


def test_gsm8k_asks_for_the_worked_answer(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 1)):
        rows = [json.dumps({"question": f"{part} {i}?", "answer": f"so\n#### {i}"}) + "\n" for i in range(count)]
        (tmp_path / f"{part}.jsonl").write_text("".join(rows))
    task = load("gsm8k", path=str(tmp_path))
    assert instructions(task).contents()[2] == ("train 2?\nAnswer:", "so\n#### 2") and len(task.test) == 1


def test_flashcards_are_questions_with_answers_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    cards = [
        {"instruction": "Answer truthfully", "input": f"What is {i}?", "output": "" if i == 3 else f"It is {i}."}
        for i in range(40)
    ]
    for name in ("medical_meadow_wikidoc_medical_flashcards.json", "train.jsonl"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        whole = json.dumps(cards) if name.endswith("json") else "".join(json.dumps(card) + "\n" for card in cards)
        (folder / name).write_text(whole, encoding="utf-8")
        task = load_task("medical-flashcards", seed_key=root_key(0), path=str(folder))
        assert isinstance(task.train, Instructions) and len(task.train) + len(task.test) == 39
        held = dict([*task.train.contents(), *task.test.contents()])
        assert held["What is 5?\nAnswer:"] == "It is 5." and "1 cards without an answer were left out" in task.notes


def test_flashcards_that_are_none_are_refused_in_one_line(tmp_path: Path) -> None:
    place = tmp_path / "train.json"
    for content, words in (('{"a": 1}', "a list of cards"), ('[{"input": "q"}]', "card 0"), ("[", "not JSON")):
        place.write_text(content)
        with pytest.raises(DataError, match=words):
            load_task("medical-flashcards", seed_key=root_key(0), path=str(tmp_path))
    place.unlink()
    with pytest.raises(DataError, match=r"nor train\.json"):
        load_task("medical-flashcards", seed_key=root_key(0), path=str(tmp_path))
