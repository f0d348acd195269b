"""SuperGLUE from generated files in its public layouts: the marked word of WiC, passages of BoolQ, classes of CB."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.data.tasks import Task, load_task
from coterie.data.tasks.superglue import marked
from coterie.errors import DataError
from coterie.maths.keys import root_key

KEY = root_key(0)


def load(name: str, folder: Path) -> Task:
    return load_task(name, seed_key=KEY, path=str(folder))


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


WIC = {
    "train": [("bank\tN\t1-2\tThe bank lent .\tOn the bank .", "F"), ("run\tV\t1-0\tI run home .\tRun home !", "T")],
    "dev": [("see\tV\t1-1\tI see it .\tYou see me .", "T")],
    "test": [("sea\tN\t1-0\tThe sea .\tSea of trouble .", "F")],
}


def write_wic(folder: Path, nested: bool, parts: tuple[str, ...]) -> Path:
    for part in parts:
        place = folder / part if nested else folder
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{part}.data.txt").write_text("".join(f"{row}\n" for row, _ in WIC[part]))
        (place / f"{part}.gold.txt").write_text("".join(f"{label}\n" for _, label in WIC[part]))
    return folder


@pytest.mark.parametrize("nested", [False, True])
def test_wic_marks_the_word_in_both_sentences(tmp_path: Path, nested: bool) -> None:
    task = load("wic", write_wic(tmp_path / "wic", nested, ("train", "dev", "test")))
    assert task.train.texts == ("The *bank* lent .", "I *run* home .")
    assert task.train.pairs == ("On the *bank* .", "*Run* home !")
    assert [task.label_names[label] for label in task.train.labels] == ["different", "same"]
    assert task.test.texts == ("I *see* it .",) and task.test.labels.tolist() == [1]
    assert task.more_tests["official test"].pairs == ("*Sea* of trouble .",)


def test_wic_does_without_its_later_test_set(tmp_path: Path) -> None:
    folder = write_wic(tmp_path / "wic", False, ("train", "dev", "test"))
    (folder / "test.gold.txt").unlink()
    assert load("wic", folder).more_tests == {}


def test_wic_of_superglue_marks_characters(tmp_path: Path) -> None:
    row = {"word": "bank", "sentence1": "A bank.", "sentence2": "Banks lend", "start1": 2, "end1": 6, "label": False}
    jsonl(tmp_path / "WiC" / "train.jsonl", [{**row, "start2": 0, "end2": 5}, {**row, "start2": 6, "end2": 10}])
    other = {**row, "sentence1": "B bank.", "label": True, "start2": 0, "end2": 5}
    jsonl(tmp_path / "WiC" / "val.jsonl", [other])
    with pytest.raises(DataError, match="fewer than two classes"):
        load("wic", tmp_path / "WiC")
    jsonl(tmp_path / "WiC" / "train.jsonl", [{**row, "start2": 0, "end2": 5}, {**other, "start2": 6, "end2": 10}])
    task = load("wic", tmp_path / "WiC")
    assert task.train.texts == ("A *bank*.", "B *bank*.") and task.train.pairs == ("*Banks* lend", "Banks *lend*")
    assert task.train.labels.tolist() == [0, 1]


@given(st.text(alphabet="ab *", min_size=1, max_size=12), st.data())
def test_marking_adds_two_asterisks_round_the_span_and_nothing_else(sentence: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(sentence) - 1))
    end = data.draw(st.integers(start + 1, len(sentence)))
    made = marked(sentence, start, end)
    assert made[start] == made[end + 1] == "*"
    assert made[:start] + made[start + 1 : end + 1] + made[end + 2 :] == sentence


@pytest.mark.parametrize(
    ("data", "gold", "said"),
    [
        ("w\tN\t0-9\ta b\tc d\n", "T\n", "line 1: '0-9' are no places of words"),
        ("w\tN\tfirst\ta b\tc d\n", "T\n", "line 1: 'first' are no places of words"),
        ("w\tN\t0-0\ta b\tc d\n", "T\nF\n", "1 examples, but train.gold.txt holds 2 labels"),
        ("w\tN\t0-0\ta b\n", "T\n", "line 1: 4 columns where the header has 5"),
        ("w\tN\t0-0\ta b\tc d\n", "X\n", "the label 'X' does not occur in WiC"),
    ],
)
def test_what_is_no_wic_is_refused_in_one_line(tmp_path: Path, data: str, gold: str, said: str) -> None:
    folder = write_wic(tmp_path / "wic", False, ("train", "dev"))
    (folder / "train.data.txt").write_text(data)
    (folder / "train.gold.txt").write_text(gold)
    with pytest.raises(DataError) as caught:
        load("wic", folder)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"end1": 99}, "lie outside"), ({"start1": 3}, "lie outside"), ({"start2": "x"}, "whole numbers")],
)
def test_places_outside_of_a_sentence_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    row = {"sentence1": "abc", "sentence2": "def", "start1": 0, "end1": 3, "start2": 0, "end2": 3, "label": True}
    jsonl(tmp_path / "WiC" / "train.jsonl", [{**row, **change}])
    jsonl(tmp_path / "WiC" / "val.jsonl", [row])
    with pytest.raises(DataError, match=f"line 1: .*{said}"):
        load("wic", tmp_path / "WiC")


def boolq_rows(names: str) -> list[dict[str, Any]]:
    return [
        {"question": f"is {name} so", "passage": f"{name} is", "label": at % 2 == 0, "idx": at}
        for at, name in enumerate(names)
    ]


def test_boolq_has_questions_with_passages_and_yes_for_true(tmp_path: Path) -> None:
    jsonl(tmp_path / "BoolQ" / "train.jsonl", boolq_rows("abcd"))
    jsonl(tmp_path / "BoolQ" / "val.jsonl", boolq_rows("ef"))
    task = load("boolq", tmp_path / "BoolQ")
    assert task.train.texts[0] == "is a so" and task.train.pairs is not None and task.train.pairs[0] == "a is"
    assert [task.label_names[label] for label in task.train.labels] == ["yes", "no", "yes", "no"]
    assert (len(task.train), len(task.test), task.notes) == (4, 2, ())


def test_few_shot_boolq_is_pooled_and_split_and_says_so(tmp_path: Path) -> None:
    for name, rows in (("train", "abcd"), ("dev32", "efgh"), ("val", "ijklmnopqrst")):
        jsonl(tmp_path / "few" / f"{name}.jsonl", boolq_rows(rows))
    task = load("boolq", tmp_path / "few")
    assert (len(task.train), len(task.test)) == (16, 4)
    assert task.notes[0] == "the official training set (9427 examples) is missing: few-shot and dev set stand for it"


def test_cb_has_three_classes_and_says_when_its_training_set_is_not_whole(tmp_path: Path) -> None:
    kinds = ("neutral", "entailment", "contradiction")
    for name, count in (("train", 6), ("val", 3)):
        rows = [{"premise": f"{name} {i}", "hypothesis": "h", "label": kinds[i % 3], "idx": i} for i in range(count)]
        jsonl(tmp_path / "CB" / f"{name}.jsonl", rows)
    task = load("cb", tmp_path / "CB")
    assert task.label_names == ("entailment", "contradiction", "neutral") and task.metrics == ("accuracy", "macro_f1")
    assert task.train.labels.tolist() == [2, 0, 1] * 2 and task.train.pairs == ("h",) * 6
    assert task.notes == ("6 of the 250 official training examples are in the folder",)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "folder", "sizes"),
    [
        ("wic", "wic", (5_428, 638)),
        ("cb", "superglue_cb", (218, 56)),
        ("boolq", "superglue_fewshot_BoolQ", (2_667, 667)),
    ],
)
def test_the_real_sets_have_their_known_sizes(data_dir: Path, name: str, folder: str, sizes: tuple[int, int]) -> None:
    if not (data_dir / folder).is_dir():
        pytest.skip(f"COTERIE_DATA holds no {folder!r}")
    task = load_task(name, seed_key=KEY, path=str(data_dir / folder))
    assert (len(task.train), len(task.test)) == sizes
    if name == "wic":
        assert len(task.more_tests["official test"]) == 1_400
        assert all(text.count("*") >= 2 for text in task.train.texts + (task.train.pairs or ()))
