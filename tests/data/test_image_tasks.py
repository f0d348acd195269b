"""Tasks of images: a folder for each class, benchmarks, data sets of the hub, and questions about images."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reference.vision import CLASSES, file_of, picture, write_pictures

from coterie.data.tasks import Images, Instructions, Questions, load_task
from coterie.data.tasks.registry import load_pool
from coterie.errors import DataError
from coterie.maths.keys import root_key


def test_a_folder_for_each_class_is_a_task_with_a_test_split_off(tmp_path: Path) -> None:
    task = load_task("image-folder", seed_key=root_key(0), path=str(write_pictures(tmp_path / "shots", 10)))
    assert task.kind == "images" and task.label_names == CLASSES and task.num_classes == 3
    assert len(task.train) == 24 and len(task.test) == 6
    assert np.bincount(task.train.labels).tolist() == [8, 8, 8]
    assert isinstance(task.train, Images) and not {*task.train.contents()} & {*task.test.contents()}


def test_folders_train_and_test_are_what_they_say(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", 3)
    write_pictures(tmp_path / "test", 1, classes=CLASSES[:2])
    pool = load_pool("image-folder", path=str(tmp_path))
    assert len(pool.train) == 9 and pool.test is not None and pool.test.labels.tolist() == [0, 1]
    same = load_pool("image-folder", path=str(tmp_path / "train"), test_path=str(tmp_path / "test"))
    assert same.test is not None and same.test.contents() == pool.test.contents()


def test_a_picture_of_the_test_set_is_not_trained_on(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", 4)
    write_pictures(tmp_path / "test", 1)
    task = load_task("image-folder", seed_key=root_key(0), path=str(tmp_path))
    assert len(task.train) == 9 and "3 training examples were dropped" in task.notes[0]


def test_folders_that_cannot_be_meant_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no folder"):
        load_pool("image-folder", path=str(tmp_path / "none"))
    (tmp_path / "one" / "cats").mkdir(parents=True)
    with pytest.raises(DataError, match="at least two classes"):
        load_pool("image-folder", path=str(tmp_path / "one"))
    (tmp_path / "one" / "dogs").mkdir()
    with pytest.raises(DataError, match="no image files"):
        load_pool("image-folder", path=str(tmp_path / "one"))
    write_pictures(tmp_path / "two" / "train", 2)
    write_pictures(tmp_path / "two" / "test", 1, classes=("dark", "light", "odd"))
    with pytest.raises(DataError, match="the class 'odd' does not occur"):
        load_pool("image-folder", path=str(tmp_path / "two"))


def test_cifar_is_read_in_its_folders(tmp_path: Path) -> None:
    for part, each in (("train", 2), ("test", 1)):
        write_pictures(tmp_path / part, each, side=32)
    pool = load_pool("cifar10", path=str(tmp_path))
    assert len(pool.train) == 6 and pool.test is not None and len(pool.test) == 3 and "CIFAR-10" in pool.source


@pytest.mark.data
def test_the_benchmarks_folder_holds_ten_classes_of_photographs(data_dir: Path) -> None:
    if not (data_dir / "cifar10_images").is_dir():
        pytest.skip("COTERIE_DATA holds no 'cifar10_images'")
    pool = load_pool("cifar10")
    assert len(pool.label_names) == 10 and np.bincount(pool.train.labels).min() >= 100


@pytest.mark.assets
def test_mnist_has_500_digits_of_each() -> None:
    pool = load_pool("mnist")
    assert isinstance(pool.train, Images) and np.bincount(pool.train.labels).tolist() == [500] * 10
    first = pool.train.pictures[0]
    assert isinstance(first, np.ndarray) and first.shape == (28, 28) and first.dtype == np.uint8
    assert 0 < float(first.mean()) < 128  # light strokes on a dark ground


class Image:
    """As much of the library's feature of images as is asked for."""

    names = None

    def __init__(self, decode: bool = True) -> None:
        self.decode = decode


class Table:
    """As much of a split as is read; a column of images gives files only when it is cast to say so."""

    def __init__(self, columns: dict[str, list[Any]], features: dict[str, Any]) -> None:
        self.columns, self.column_names = columns, list(columns)
        self.features = {name: features.get(name, SimpleNamespace(names=None)) for name in columns}

    def __getitem__(self, name: str) -> list[Any]:
        feature = self.features[name]
        if not isinstance(feature, Image):
            return self.columns[name]
        held = self.columns[name]
        return ["pixels"] * len(held) if feature.decode else [h and {"bytes": h, "path": "a.png"} for h in held]

    def cast_column(self, name: str, feature: Any) -> Table:
        return Table(self.columns, {**self.features, name: feature})


def on_the_hub(monkeypatch: pytest.MonkeyPatch, columns: dict[str, list[Any]], **features: Any) -> None:
    """Let `datasets` give one split, of which the last two rows are the test split."""
    library = ModuleType("datasets")
    parts = {"train": slice(0, -2), "test": slice(-2, None)}
    splits = {
        name: Table({column: values[part] for column, values in columns.items()}, features)
        for name, part in parts.items()
    }
    library.load_dataset = lambda place, config: splits  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)


def test_labelled_images_of_the_hub_keep_the_declared_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    shots = [file_of(picture(n % 2, n)) for n in range(8)]
    declared = SimpleNamespace(names=["light", "dark"])
    columns = {"img": shots, "kind": [0, 1, 0, 1, 0, -1, 1, 0]}
    on_the_hub(monkeypatch, columns, img=Image(), kind=declared)
    pool = load_pool("hub-images:me/shots", image="img", label="kind")
    assert pool.label_names == ("light", "dark") and pool.train.labels.tolist() == [0, 1, 0, 1, 0]
    assert isinstance(pool.train, Images) and pool.train.pictures[1] == shots[1]
    assert pool.test is not None and pool.test.labels.tolist() == [1, 0]
    with pytest.raises(DataError, match="no column 'image'"):
        load_pool("hub-images:me/shots", label="kind")
    on_the_hub(monkeypatch, {"image": ["no file"] * 4, "label": ["a", "b", "a", "b"]})
    with pytest.raises(DataError, match="row 0: the column 'image' holds no image"):
        load_pool("hub-images:me/shots")


def test_questions_of_the_hub_may_be_about_images(monkeypatch: pytest.MonkeyPatch) -> None:
    shots = [file_of(picture(n % 2, n)) if n != 2 else None for n in range(6)]
    columns = {"image": shots, "question": ["which?"] * 6, "choices": [["dark", "light"]] * 6, "answer": [0, 1] * 3}
    on_the_hub(monkeypatch, columns, image=Image())
    pool = load_pool("hub-choices:me/questions", image="image")
    assert isinstance(pool.train, Questions) and pool.train.pictures is not None
    assert list(pool.train.pictures) == [shots[0], shots[1], shots[3]]
    assert pool.train.labels.tolist() == [0, 1, 1]


def test_answers_of_the_hub_by_several_people_are_learnt_as_the_commonest(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [["cat", "dog", "dog"], ["hat", "hat", "cap"], ["red"], ["a", "b"]]
    columns = {"image": [file_of(picture(0, n)) for n in range(4)], "question": ["what?"] * 4, "answers": answers}
    on_the_hub(monkeypatch, columns, image=Image())
    pool = load_pool("hub-instructions:me/asked", prompt="question", answer="answers", image="image")
    assert isinstance(pool.train, Instructions) and pool.judged == "agreement"
    assert pool.train.answers == ("dog", "hat") and pool.train.references == tuple(map(tuple, answers[:2]))
    assert pool.train.pictures is not None and len(pool.train.pictures) == 2


def test_science_questions_without_an_image_are_left_out(tmp_path: Path) -> None:
    problems = {}
    for number in range(6):
        split = ("train", "train", "train", "train", "test", "val")[number]
        problems[str(number)] = {
            "question": f"Which colour, {number}?",
            "choices": ["dark", "light"],
            "answer": number % 2,
            "hint": "Look." if number == 0 else "",
            "image": "image.png" if number != 3 else None,
            "split": split,
            "subject": "natural science",
        }
        (tmp_path / split / str(number)).mkdir(parents=True)
        (tmp_path / split / str(number) / "image.png").write_bytes(file_of(picture(number % 2, number)))
    (tmp_path / "problems.json").write_text(json.dumps(problems))
    task = load_task("scienceqa", seed_key=root_key(0), path=str(tmp_path))
    assert isinstance(task.train, Questions) and len(task.train) == 3 and len(task.test) == 1
    assert task.train.prompts[0] == "Look.\nWhich colour, 0?\nAnswer:"
    assert task.train.prompts[1] == "Which colour, 1?\nAnswer:"
    assert task.train.pictures is not None and task.train.pictures[1] == file_of(picture(1, 1))
    assert task.train.groups == ("natural science",) * 3
    assert "1 questions without an image were left out" in task.notes
    (tmp_path / "train" / "1" / "image.png").unlink()
    with pytest.raises(DataError, match=r"no image train/1/image\.png"):
        load_pool("scienceqa", path=str(tmp_path))


def test_questions_of_blind_people_are_learnt_by_their_commonest_answer(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 2)):
        (tmp_path / split).mkdir()
        records = []
        for number in range(count):
            (tmp_path / split / f"{split}{number}.png").write_bytes(file_of(picture(0, number + 10 * len(split))))
            answers = [{"answer": one, "answer_confidence": "yes"} for one in ("can", "tin", "can")]
            records.append({"image": f"{split}{number}.png", "question": f"What is {number}?", "answers": answers})
        (tmp_path / f"{split}.json").write_text(json.dumps(records))
    task = load_task("vizwiz", seed_key=root_key(0), path=str(tmp_path))
    assert task.judged == "agreement" and isinstance(task.train, Instructions) and isinstance(task.test, Instructions)
    assert task.train.answers == ("can",) * 3 and len(task.test) == 2
    assert task.test.references == (("can", "tin", "can"),) * 2
    assert task.train.select([2]).pictures == [task.train.pictures[2]]  # type: ignore[index]
