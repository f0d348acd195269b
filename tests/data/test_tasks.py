"""Tasks: their splits, limits and labels, and the errors a user meets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.data.tasks import Task, find_loader, load_task, task_options
from coterie.errors import ConfigError, DataError
from coterie.maths.keys import root_key

KEY = root_key(0)


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[tuple[str, str]], name: str = "own.csv") -> str:
        path = tmp_path / name
        path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
        return str(path)

    return write


def own(count: int, kinds: int = 2) -> list[tuple[str, str]]:
    return [(f"text {i}", f"k{i % kinds}") for i in range(count)]


def load(path: str, seed: int = 0, **options: Any) -> Task:
    return load_task("file", seed_key=root_key(seed), path=path, **options)


def test_a_file_without_a_test_file_is_split_alike_for_every_seed(table: Callable[..., str]) -> None:
    path = table(own(100))
    one, other = load(path, seed=1), load(path, seed=2)
    assert (len(one.train), len(one.test)) == (80, 20)
    assert one.test.texts == other.test.texts and one.train.texts == other.train.texts
    assert np.bincount(one.test.labels).tolist() == [10, 10]
    assert not set(one.train.texts) & set(one.test.texts)
    assert any("20 examples were split off" in note for note in one.notes)


def test_limits_are_exact_in_proportion_and_only_training_follows_the_seed(table: Callable[..., str]) -> None:
    path = table(own(300, kinds=3))
    one, other = (load(path, seed=s, limit_train=30, limit_test=12) for s in (1, 2))
    assert np.bincount(one.train.labels).tolist() == [10, 10, 10]
    assert np.bincount(one.test.labels).tolist() == [4, 4, 4]
    assert one.test.texts == other.test.texts and one.train.texts != other.train.texts
    assert "limit_train: 30 of 240 examples were kept" in one.notes
    assert set(one.test.texts) <= set(load(path).test.texts)


def test_training_texts_that_stand_in_the_test_set_are_dropped_and_counted(table: Callable[..., str]) -> None:
    train = table([("a", "x"), ("b", "y"), ("c", "x"), ("a", "y")])
    task = load(train, test_path=table([("a", "x"), ("d", "y")], "test.csv"))
    assert task.train.texts == ("b", "c") and task.test.texts == ("a", "d")
    assert task.notes == ("2 training examples were dropped because their text stands in the test set",)


def test_even_the_texts_that_limit_test_leaves_out_are_dropped_from_training(
    table: Callable[..., str],
) -> None:
    rows = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "y")]
    path, test_path = table(rows), table([("a", "x"), ("b", "y")], "test.csv")
    task = load(path, test_path=test_path, limit_test=1)
    assert task.train.texts == ("c", "d") and len(task.test) == 1


def test_a_pair_is_a_duplicate_only_as_a_whole(tmp_path: Path) -> None:
    train, test = tmp_path / "a.tsv", tmp_path / "b.tsv"
    train.write_text("text\tsecond\tlabel\np\tq\t0\np\tr\t1\ns\tq\t0\n")
    test.write_text("text\tsecond\tlabel\np\tq\t0\n")
    task = load(str(train), test_path=str(test), pair="second")
    assert task.train.texts == ("p", "s") and task.train.pairs == ("r", "q") and task.test.pairs == ("q",)


def test_label_order_is_sorted_and_numeric_where_all_are_numbers(table: Callable[..., str]) -> None:
    words = [("a", "pear"), ("b", "apple"), ("c", "pear"), ("d", "apple")]
    numbers = [(f"t{i}", str(i % 12 - 1)) for i in range(120)]
    assert load(table(words), test_fraction=0.5).label_names == ("apple", "pear")
    task = load(table(numbers))
    assert task.label_names == tuple(str(i) for i in range(-1, 11)) and task.num_classes == 12


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (own(10), {"text": "txt"}, "no column 'txt'; did you mean 'text'"),
        ([("a", "x"), ("b", "x")], {}, "holds 1 class"),
        ([], {}, "holds 0 class"),
        (own(10), {"test_fraction": 1.5}, "must lie between 0 and 1"),
        (own(3), {"test_fraction": 0.01}, "raise test_fraction"),
        (own(10), {"limit_train": 1}, "fewer than two classes are left"),
        (own(10), {"test_path": "nowhere.csv"}, "nowhere.csv: cannot be read"),
    ],
)
def test_errors_of_an_own_file_are_one_line(
    table: Callable[..., str], rows: list[tuple[str, str]], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError) as caught:
        load(table(rows), **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_test_label_that_training_never_shows_is_named(table: Callable[..., str]) -> None:
    test_path = table([("p", "k0"), ("q", "kk1")], "test.csv")
    with pytest.raises(DataError, match=r"test\.csv, line 3: the label 'kk1' does not occur in own\.csv"):
        load(table(own(10)), test_path=test_path)
    with pytest.raises(DataError, match=r"empty\.csv: no examples"):
        load(table(own(10)), test_path=table([], "empty.csv"))


def test_unknown_tasks_and_options_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'movie'"):
        load_task("movies", seed_key=KEY)
    with pytest.raises(ConfigError, match="no option 'test_fractoin'; did you mean 'test_fraction'"):
        load_task("file", seed_key=KEY, path="a.csv", test_fractoin=0.1)
    with pytest.raises(ConfigError, match="needs the option 'path'"):
        load_task("file", seed_key=KEY)


def test_limits_below_one_are_refused(table: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="limit_test is 0"):
        load(table(own(10)), limit_test=0)


def test_benchmark_folders_are_read_from_coterie_data_or_from_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    with pytest.raises(DataError, match="COTERIE_DATA, which is not set"):
        load_task("sst2", seed_key=KEY)
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    with pytest.raises(DataError, match="COTERIE_DATA, which has no folder 'sst2'"):
        load_task("sst2", seed_key=KEY)
    (tmp_path / "sst2").mkdir()
    with pytest.raises(DataError, match=r"neither train_full\.tsv nor train\.tsv nor dev\.tsv is there"):
        load_task("sst2", seed_key=KEY)
    (tmp_path / "sst2" / "train_full.tsv").write_text("sentence\tlabel\nfine film \t1\ndull\t0\nseen \t0\n")
    (tmp_path / "sst2" / "dev.tsv").write_text("sentence\tlabel\nseen\t0\n")
    task = load_task("sst2", seed_key=KEY)
    assert task.train.texts == ("fine film", "dull") and task.train.labels.tolist() == [1, 0]
    assert task.label_names == ("negative", "positive") and task.test.texts == ("seen",)
    assert task.source.endswith("from COTERIE_DATA")
    monkeypatch.delenv("COTERIE_DATA")
    by_path = load_task("sst2", seed_key=KEY, path=str(tmp_path / "sst2"))
    assert by_path.train.texts == task.train.texts and by_path.source.endswith("from the folder sst2")
    with pytest.raises(DataError, match="nowhere is no folder"):
        load_task("sst2", seed_key=KEY, path=str(tmp_path / "nowhere"))


def test_where_a_set_is_missing_the_other_is_split_and_a_note_says_so(tmp_path: Path) -> None:
    rows = "".join(f"text {i}\t{i % 2}\n" for i in range(50))
    for missing, present in (("train_full.tsv", "dev.tsv"), ("dev.tsv", "train_full.tsv")):
        folder = tmp_path / missing
        folder.mkdir()
        (folder / present).write_text("sentence\tlabel\n" + rows)
        one, other = (load_task("sst2", seed_key=root_key(seed), path=str(folder)) for seed in (1, 2))
        assert (len(one.train), len(one.test)) == (40, 10) and one.test.texts == other.test.texts
        assert one.notes[0] == f"{missing} is missing from the folder: {present} stands for both"


def test_the_registry_says_what_each_task_takes() -> None:
    assert task_options("movie") == () and task_options("qnli") == ("path",)
    assert task_options("file")[:3] == ("path", "test_path", "text") and "group" in task_options("file")
    assert "name" not in task_options("hub:owner/set") and "config" in task_options("hub:owner/set")
    for wrong in ("movies", "file:a.csv", "hub", "hub:"):
        with pytest.raises(ConfigError, match="hub:owner/name" if "hub" in wrong else "there is no task"):
            find_loader(wrong)


def test_groups_of_an_own_file_follow_its_examples(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("text,label,ward\n" + "".join(f"text {i},{i % 2},ward {i % 3}\n" for i in range(60)))
    task = load(str(path), group="ward", limit_train=20)
    assert task.train.groups is not None and len(task.train.groups) == 20
    for text, group in zip(task.train.texts, task.train.groups, strict=True):
        assert group == f"ward {int(text.split()[1]) % 3}"
    assert load(str(path)).train.groups is None
    path.write_text("text,label,ward\na,0,x\nb,1,\n")
    with pytest.raises(DataError, match="line 3: nothing in column 'ward'"):
        load(str(path), group="ward")
