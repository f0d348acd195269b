"""Hub data sets, through a stand-in for the library `datasets`: addresses, splits, columns, and what goes wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from coterie.data.tasks import Instructions, Questions, Task, load_task
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.maths.keys import root_key

KEY = root_key(0)


class Table:
    """As much of a split as is read: names of columns, columns, and the classes that one of them declares."""

    def __init__(self, columns: dict[str, list[Any]], classes: dict[str, list[str]] | None = None) -> None:
        self.columns = columns
        self.column_names = list(columns)
        self.features = {name: SimpleNamespace(names=(classes or {}).get(name)) for name in columns}

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


class Library(ModuleType):
    """A stand-in for `datasets` that knows one data set and records what it was asked for."""

    def __init__(self, splits: Any, fault: Exception | None = None) -> None:
        super().__init__("datasets")
        self.splits, self.fault = splits, fault
        self.asked: list[tuple[str, ...]] = []

    def load_dataset(self, place: str, config: str | None) -> Any:
        self.asked.append(("load_dataset", place, str(config)))
        if self.fault is not None:
            raise self.fault
        return self.splits

    def load_from_disk(self, place: str) -> Any:
        self.asked.append(("load_from_disk", place))
        return self.splits


def use(monkeypatch: pytest.MonkeyPatch, splits: Any, fault: Exception | None = None) -> Library:
    library = Library(splits, fault)
    monkeypatch.setitem(sys.modules, "datasets", library)
    return library


def reviews(count: int, start: int = 0, labels: list[Any] | None = None) -> dict[str, list[Any]]:
    texts = [f"text {start + i}" for i in range(count)]
    return {"text": texts, "label": labels or [i % 2 for i in range(count)], "site": [i % 3 for i in range(count)]}


def load(name: str, **options: Any) -> Task:
    return load_task(name, seed_key=KEY, **options)


@pytest.mark.parametrize(
    ("name", "options", "asked"),
    [
        ("hub:imdb", {}, ("imdb", "None")),
        ("hub:owner/set", {}, ("owner/set", "None")),
        ("hub:owner/set/part", {}, ("owner/set", "part")),
        ("hub:owner/set", {"config": "part"}, ("owner/set", "part")),
        ("hub:glue/sst2", {}, ("nyu-mll/glue", "sst2")),
        ("hub:super_glue/cb", {}, ("aps/super_glue", "cb")),
    ],
)
def test_names_become_addresses(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], asked: tuple[str, str]
) -> None:
    library = use(monkeypatch, {"train": Table(reviews(20)), "test": Table(reviews(4, 50))})
    task = load(name, **options)
    assert library.asked == [("load_dataset", *asked)]
    assert task.name == name and asked[0] in task.source


def test_declared_classes_keep_their_numbers_even_where_some_never_occur(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"label": ["bad", "fair", "good"]}
    splits = {
        "train": Table(reviews(6, labels=[2, 0, 2, 0, 2, 0]), names),
        "test": Table(reviews(2, 50, labels=[0, 2]), names),
    }
    use(monkeypatch, splits)
    task = load("hub:owner/set", group="site")
    assert task.label_names == ("bad", "fair", "good") and task.train.labels.tolist() == [2, 0, 2, 0, 2, 0]
    assert task.test.labels.tolist() == [0, 2] and task.train.groups == ("0", "1", "2", "0", "1", "2")


def test_labels_that_are_texts_or_truth_values_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    for labels, names in ((["x", "a", "x", "a"], ("a", "x")), ([True, False, True, False], ("false", "true"))):
        use(monkeypatch, {"train": Table(reviews(4, labels=labels)), "dev": Table(reviews(2, 9, labels=labels[:2]))})
        task = load("hub:owner/set")
        assert task.label_names == names and task.train.labels.tolist() == [1, 0, 1, 0]
        assert task.notes == ("the test set is the split 'dev'",)


def test_a_test_split_without_labels_gives_way_to_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = Table(reviews(4, 80, labels=[-1] * 4))
    without = Table({"text": ["a"], "idx": [0]})
    for test in (hidden, without):
        use(monkeypatch, {"train": Table(reviews(10)), "test": test, "validation": Table(reviews(4, 50))})
        task = load("hub:owner/set")
        assert task.test.texts[0] == "text 50" and task.notes == ("the test set is the split 'validation'",)
    use(monkeypatch, {"train": Table(reviews(10)), "test": hidden})
    with pytest.raises(DataError, match="the split 'test' has no labels"):
        load("hub:owner/set", test_split="test")


def test_without_a_labelled_test_split_a_share_is_split_off(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"train": Table(reviews(20))})
    task = load("hub:owner/set", test_fraction=0.25)
    assert (len(task.train), len(task.test)) == (15, 5)
    with pytest.raises(DataError, match="between 0 and 1, or name a test_split"):
        load("hub:owner/set", test_fraction=2.0)


def test_columns_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table({"q1": ["a", "b"], "q2": ["c", "d"], "same": [0, 1]})
    use(monkeypatch, {"fit": table, "validation_matched": Table({"q1": ["e"], "q2": ["f"], "same": [1]})})
    task = load("hub:owner/set", text="q1", pair="q2", label="same", train_split="fit")
    assert task.train.texts == ("a", "b") and task.train.pairs == ("c", "d") and task.test.pairs == ("f",)


def test_a_folder_is_read_and_a_saved_one_as_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = use(monkeypatch, {"train": Table(reviews(20))})
    load(f"hub:{tmp_path}")
    (tmp_path / "dataset_dict.json").write_text("{}")
    task = load(f"hub:{tmp_path}")
    assert library.asked == [("load_dataset", str(tmp_path), "None"), ("load_from_disk", str(tmp_path))]
    assert tmp_path.name in task.source and str(tmp_path.parent) not in task.source


def test_a_missing_library_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"hub:owner/set' needs the library datasets; .*coterie\[hub\]"):
        load("hub:owner/set")


@pytest.mark.parametrize(
    "fault", [ConnectionError("Couldn't reach 'owner/set' on the Hub\nmore"), ValueError("Unknown config"), KeyError()]
)
def test_whatever_the_library_raises_is_one_line(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    use(monkeypatch, {}, fault)
    with pytest.raises(DataError) as caught:
        load("hub:owner/set")
    message = str(caught.value)
    assert "\n" not in message and "hub:owner/set" in message and "check name and connection" in message
    assert str(fault).split("\n")[0] in message


@pytest.mark.parametrize(
    ("splits", "options", "said"),
    [
        ({"fit": Table(reviews(4))}, {}, "no split 'train'"),
        ({"train": Table(reviews(4))}, {"test_split": "tset"}, "no split 'tset'"),
        ({"train": Table(reviews(4))}, {"text": "txt"}, "no column 'txt'; did you mean 'text'"),
        ({"train": Table(reviews(4, labels=[0.5, 1.0, 0.0, 1.0]))}, {}, "row 0: the label is '0.5'"),
        ({"train": Table({**reviews(2), "text": ["a", None]})}, {}, "row 1: no text"),
        ({"train": Table(reviews(2, labels=[-1, -1]))}, {}, "no labelled examples"),
        ([Table(reviews(2))], {}, "holds no splits"),
    ],
)
def test_what_does_not_fit_is_one_line(
    monkeypatch: pytest.MonkeyPatch, splits: Any, options: dict[str, Any], said: str
) -> None:
    use(monkeypatch, splits)
    with pytest.raises(CoterieError) as caught:
        load("hub:owner/set", **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_names_that_cannot_be_meant_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"train": Table(reviews(4))})
    for name in ("hub:a/b/c/d", "hub:owner//x", "hub:/x"):
        with pytest.raises(ConfigError, match="is no data set"):
            load(name)
    with pytest.raises(ConfigError, match="names the configuration 'c', and config is 'd'"):
        load("hub:a/b/c", config="d")


def asked(count: int, start: int = 0, answers: list[Any] | None = None) -> dict[str, list[Any]]:
    numbers = range(start, start + count)
    return {
        "stem": [f"What is {i}?" for i in numbers],
        "choices": [{"text": [f"red {i}", f"blue {i}"], "label": ["A", "B"]} for i in numbers],
        "key": answers or ["AB"[i % 2] for i in numbers],
        "topic": [i % 3 for i in numbers],
    }


ASKED = {"question": "stem", "answer": "key"}


def test_questions_of_the_hub_are_read_and_hidden_answers_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"train": asked(6, answers=["A", "B", "", "A", "B", "A"]), "test": asked(2, 20, ["", ""])}
    use(monkeypatch, {name: Table(columns) for name, columns in splits.items()} | {"validation": Table(asked(3, 40))})
    task = load_task("hub-choices:owner/name/config", seed_key=KEY, **ASKED, group="topic", score="mean")
    assert isinstance(task.train, Questions) and task.train.score == "mean" and task.label_names[1] == "answer 2"
    assert (len(task.train), len(task.test)) == (5, 3) and task.train.labels.tolist() == [0, 1, 0, 1, 0]
    assert task.train.groups == ("0", "1", "0", "1", "2") and "the test set is the split 'validation'" in task.notes
    with pytest.raises(DataError, match="the split 'test' has no questions with answers"):
        load_task("hub-choices:owner/name", seed_key=KEY, test_split="test", **ASKED)
    with pytest.raises(DataError, match="split 'train': no column 'question'"):
        load_task("hub-choices:owner/name", seed_key=KEY)


def test_questions_without_a_test_split_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {name: values for name, values in asked(10).items() if name != "choices"}
    several = {"a": [f"one {i}" for i in range(10)], "b": [f"two {i}" for i in range(10)]}
    use(monkeypatch, {"train": Table(columns | several)})
    task = load_task("hub-choices:owner/name", seed_key=KEY, **ASKED, choices=["a", "b"])
    assert (len(task.train), len(task.test)) == (8, 2) and task.train.choices[0][0].startswith("one ")
    with pytest.raises(DataError, match="test_fraction is 2"):
        load_task("hub-choices:owner/name", seed_key=KEY, **ASKED, choices=["a", "b"], test_fraction=2)


def test_instructions_of_the_hub_are_read_without_empty_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"ask": [f"Say {i}" for i in range(6)], "answer": ["x", "", "y", "z", "u", "v"], "lang": list("aabbab")}
    tested = {"ask": ["Say 9"], "answer": ["w"], "lang": ["b"]}
    use(monkeypatch, {"train": Table(columns), "test": Table(tested)})
    task = load_task("hub-instructions:owner/name", seed_key=KEY, prompt="ask", group="lang")
    assert isinstance(task.train, Instructions) and task.train.answers == ("x", "y", "z", "u", "v")
    assert task.label_names == ("a", "b") and task.test.labels.tolist() == [1]
    whole = load_task("hub-instructions:owner/name", seed_key=KEY, text="answer")
    assert isinstance(whole.train, Instructions) and set(whole.train.prompts) == {""}
    use(monkeypatch, {"train": Table(columns | {"answer": [1] * 6})})
    with pytest.raises(DataError, match="row 0: no text in a text column"):
        load_task("hub-instructions:owner/name", seed_key=KEY, prompt="ask")


@pytest.mark.parametrize("kind", ["hub-choices", "hub-instructions"])
def test_language_tasks_of_the_hub_need_a_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"write {kind}:owner/name"):
        load_task(kind, seed_key=KEY)
