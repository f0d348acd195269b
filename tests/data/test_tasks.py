"""Tasks: their splits, limits and labels, and the errors a user meets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.data.tasks import Task, load_task
from coterie.errors import ConfigError, CoterieError, DataError
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


def test_benchmark_folders_are_read_from_coterie_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    with pytest.raises(CoterieError, match="COTERIE_DATA, which is not set"):
        load_task("sst2", seed_key=KEY)
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    with pytest.raises(CoterieError, match="COTERIE_DATA, which has no folder 'sst2'"):
        load_task("sst2", seed_key=KEY)
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "train_full.tsv").write_text("sentence\tlabel\nfine film \t1\ndull\t0\nseen \t0\n")
    with pytest.raises(DataError, match=r"dev\.tsv: cannot be read"):
        load_task("sst2", seed_key=KEY)
    (tmp_path / "sst2" / "dev.tsv").write_text("sentence\tlabel\nseen\t0\n")
    task = load_task("sst2", seed_key=KEY)
    assert task.train.texts == ("fine film", "dull") and task.train.labels.tolist() == [1, 0]
    assert task.label_names == ("negative", "positive") and task.test.texts == ("seen",)


def test_trec_is_latin_1_with_a_label_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    (tmp_path / "trec").mkdir()
    (tmp_path / "trec" / "TREC.train.all").write_bytes(b"5 How many ?\n3 Who is Ren\xe9 ?\n")
    (tmp_path / "trec" / "TREC.test.all").write_bytes(b"4 Where ?\n")
    task = load_task("trec", seed_key=KEY)
    assert task.train.texts == ("How many ?", "Who is René ?") and task.train.labels.tolist() == [5, 3]
    assert task.label_names[4] == "location" and task.num_classes == 6


def benchmark(name: str) -> None:
    root = os.environ.get("COTERIE_DATA")
    if not root or not (Path(root) / name).is_dir():
        pytest.skip(f"COTERIE_DATA is not set or holds no {name!r}")


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "test"), [("sst2", 67_349, [428, 444]), ("trec", 5_442, [138, 94, 9, 65, 81, 113])]
)
def test_the_real_benchmarks_have_their_known_sizes(name: str, train: int, test: list[int]) -> None:
    benchmark(name)
    task = load_task(name, seed_key=KEY)
    assert len(task.train) == train and np.bincount(task.test.labels).tolist() == test


@pytest.mark.assets
def test_movie_is_balanced_and_leaves_out_exact_zeros() -> None:
    task = load_task("movie", seed_key=KEY)
    assert task.label_names == ("negative", "positive")
    total = np.bincount(task.train.labels) + np.bincount(task.test.labels)
    assert total.tolist() == [5326, 5242] and len(task.test) == 2114
    assert "37 sentences rated exactly 0 were left out" in task.notes


@pytest.mark.assets
def test_sms_recovers_the_whole_collection_and_shares_no_text_with_its_test_set() -> None:
    task = load_task("sms", seed_key=KEY)
    assert task.label_names == ("ham", "spam")
    assert not any("\nham\t" in text or "\nspam\t" in text for text in task.train.texts + task.test.texts)
    assert not set(task.train.texts) & set(task.test.texts)
    (dropped,) = (int(note.split()[0]) for note in task.notes if "dropped" in note)
    assert len(task.train) + len(task.test) + dropped == 5574
    assert np.bincount(task.test.labels).tolist() == [966, 149]
