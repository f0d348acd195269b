"""What a task is, what a loader gives, and how labelled rows become examples."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from coterie.data.files import Row
from coterie.data.tasks.language import Instructions, Questions
from coterie.data.tasks.vision import Images
from coterie.errors import DataError, nearest


@dataclass(frozen=True, eq=False)
class Examples:
    """Texts, their second texts where the task is on pairs, and classes: labels (n,) int64.

    `groups`, where the data have them, names what each example naturally belongs to (a source, a hospital).
    """

    kind: ClassVar[Literal["classification"]] = "classification"

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None
    labels: np.ndarray
    groups: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, indices: ArrayLike) -> Examples:
        """The examples at `indices` (m,), in that order."""
        places = np.asarray(indices, dtype=np.int64).reshape(-1)
        pairs, groups = (None if had is None else tuple(had[i] for i in places) for had in (self.pairs, self.groups))
        return Examples(tuple(self.texts[i] for i in places), pairs, self.labels[places], groups)

    def contents(self) -> list[tuple[str, str]]:
        """What makes an example the same as another: its text and second text."""
        return list(zip(self.texts, self.pairs or [""] * len(self.texts), strict=True))


ExampleSet = Examples | Images | Questions | Instructions
"""What a task may consist of. All have `labels` and `groups`, by which they are shared out, and `contents`."""

Judged = Literal["exact", "number", "agreement", "code"]
"""How a generated answer is judged; see `coterie.serve.scoring`."""

SomeExamples = TypeVar("SomeExamples", bound=ExampleSet)


@dataclass(frozen=True, eq=False)
class Task:
    """What is learnt: examples to share out among clients, and a pooled test set, all of one kind.

    `label_names` name the labels: classes, the places of right answers, or groups of instructions. `source` says
    where it comes from and its licence, `notes` what was done to it on loading. `metrics` are names of
    `coterie.data.metrics.METRICS`, the first the one by which the task is judged. `more_tests` are the further test
    sets that the benchmark reports beside `test`, by name. `judged` says how generated answers are. `parts`, of a task
    that is several, has the names of each one's classes; an example's group is then the name of its part.
    """

    name: str
    train: ExampleSet
    test: ExampleSet
    label_names: tuple[str, ...]
    source: str
    notes: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    more_tests: Mapping[str, ExampleSet] = field(default_factory=dict)
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    judged: Judged = "exact"

    @property
    def kind(self) -> Literal["classification", "images", "choices", "instructions"]:
        """Whether texts or images are classified, choices are scored by their likelihood, or answers are learnt."""
        return self.train.kind

    @property
    def num_classes(self) -> int:
        """The classes of a classification task; of other kinds, how many different labels there are."""
        return len(self.label_names)


@dataclass(frozen=True, eq=False)
class Pool:
    """What a loader gives. Without a `test` of its own, `test_fraction` of `train` is split off; rest as of `Task`."""

    train: ExampleSet
    test: ExampleSet | None
    label_names: tuple[str, ...]
    source: str
    notes: tuple[str, ...] = ()
    test_fraction: float = 0.2
    metrics: tuple[str, ...] = ("accuracy",)
    more_tests: Mapping[str, ExampleSet] = field(default_factory=dict)
    judged: Judged = "exact"


def benchmark_folder(task: str, path: str | None, *names: str) -> Path:
    """The folder of a public benchmark: `path`, or the first of `names` under COTERIE_DATA.

    Raises:
        DataError: no such folder.
    """
    if path is not None:
        given = Path(path).expanduser()
        if not given.is_dir():
            raise DataError(f"task {task!r}: {given} is no folder; give the folder that holds its files")
        return given
    root = os.environ.get("COTERIE_DATA")
    if root:
        for name in names:
            if (folder := Path(root).expanduser() / name).is_dir():
                return folder
    where = f"which has no folder {names[0]!r}" if root else "which is not set"
    raise DataError(
        f"task {task!r} reads the folder {names[0]!r} under the environment variable COTERIE_DATA, {where}; "
        "set it, or give the folder as path"
    )


def first_file(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of the named files that is in the folder."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def train_and_test(
    folder: Path, read: Callable[[Path], SomeExamples], train: Sequence[str], test: Sequence[str]
) -> tuple[SomeExamples, SomeExamples | None, tuple[str, ...]]:
    """The examples of the first training and the first test file found, and notes.

    Where one of the two is missing the other stands as the training set with None as test set, and the note says so.

    Raises:
        DataError: neither is there, or what `read` refuses.
    """
    train_path, test_path = first_file(folder, train), first_file(folder, test)
    if train_path is not None and test_path is not None:
        return read(train_path), read(test_path), ()
    present = train_path or test_path
    if present is None:
        raise DataError(f"{folder}: neither {' nor '.join((*train, *test))} is there")
    missing = test[0] if train_path is not None else train[0]
    return read(present), None, (f"{missing} is missing from the folder: {present.name} stands for both",)


def numbered(path: Path, rows: Sequence[Row], names: Sequence[str], origin: str) -> Examples:
    """Rows as examples, each label as its place among known names; `origin` says where these are from."""
    place = {name: index for index, name in enumerate(names)}
    for row in rows:
        if row.label not in place:
            hint = nearest(row.label, names)
            raise DataError(f"{path}, line {row.line}: the label {row.label!r} does not occur in {origin}{hint}")
    return _examples(rows, np.array([place[row.label] for row in rows], dtype=np.int64))


def named(rows: Sequence[Row]) -> tuple[Examples, tuple[str, ...]]:
    """Rows as examples, each label as its place in their sorted order (as numbers where all are), and that order."""
    kinds = {row.label for row in rows}
    numeric = all(re.fullmatch(r"-?\d+", kind) for kind in kinds)
    names = sorted(kinds, key=lambda kind: (int(kind), kind)) if numeric else sorted(kinds)
    place = {name: index for index, name in enumerate(names)}
    return _examples(rows, np.array([place[row.label] for row in rows], dtype=np.int64)), tuple(names)


def joined(*parts: Examples) -> Examples:
    """The examples of all parts one after another; all or none of them have second texts, and likewise groups."""
    return Examples(
        tuple(text for part in parts for text in part.texts),
        tuple(pair for part in parts for pair in part.pairs or ()) or None,
        np.concatenate([part.labels for part in parts]),
        tuple(group for part in parts for group in part.groups or ()) or None,
    )


def _examples(rows: Sequence[Row], labels: np.ndarray) -> Examples:
    pairs = tuple(row.pair.strip() for row in rows if row.pair is not None)
    groups = tuple(row.group for row in rows if row.group is not None)
    return Examples(tuple(row.text.strip() for row in rows), pairs or None, labels, groups or None)
