"""Data sets of the Hugging Face hub, or folders that the library `datasets` reads, through the extra `hub`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.files import Row
from coterie.data.tasks.base import Examples, Pool, named
from coterie.data.tasks.columns import cells, holder, joined
from coterie.data.tasks.own import check_fraction
from coterie.errors import ConfigError, DataError, nearest

_MOVED: Mapping[str, str] = {"glue": "nyu-mll/glue", "super_glue": "aps/super_glue"}
"""Names from the time when a data set needed no owner."""

TEST_SPLITS = ("test", "validation", "dev", "validation_matched")
"""What test splits are usually called, in order of preference."""


def hub(
    name: str,
    config: str | None = None,
    text: str = "text",
    pair: str | None = None,
    label: str = "label",
    group: str | None = None,
    train_split: str = "train",
    test_split: str | None = None,
    test_fraction: float = 0.2,
) -> Pool:
    """A labelled data set of the hub: `owner/name`, `owner/name/config`, `glue/config`, or a folder.

    text, pair, label, group: its columns; `a.b` is what column a has under b, and several texts there are put together.
    test_split: by default the first of test, validation and dev that has labels; where there is none, `test_fraction`
    of the training split is split off. Examples without a label (-1) are left out. Classes are the data set's own, or
    else the labels in sorted order.

    Raises:
        ConfigError: a name that cannot be meant.
        DataError: `datasets` is not installed, the data set cannot be had (offline, unknown), or lacks a split or
            column.
    """
    place, chosen = address(name, config)
    splits = load_splits(name, place, chosen)
    check_splits(f"hub:{name}", splits, train_split, test_split)
    columns = (text, pair, label, group)
    rows = _rows(name, train_split, splits[train_split], columns)
    if not rows:
        raise DataError(f"task 'hub:{name}': the split {train_split!r} has no labelled examples")
    if test_split is not None:
        used, test_rows = test_split, _rows(name, test_split, splits[test_split], columns)
        if not test_rows:
            raise DataError(f"task 'hub:{name}': the split {test_split!r} has no labels; choose another as test_split")
    else:
        used, test_rows = _labelled_split(name, splits, train_split, columns)
        if not test_rows:
            check_fraction(test_fraction, "or name a test_split")
    whole, names = _classes(splits[train_split], label, [*rows, *test_rows])
    test = whole.select(np.arange(len(rows), len(whole))) if test_rows else None
    notes = (f"the test set is the split {used!r}",) if test_rows else ()
    said = origin(place, chosen)
    return Pool(whole.select(np.arange(len(rows))), test, names, said, notes, test_fraction=test_fraction)


def origin(place: str, config: str | None) -> str:
    """Where a data set's examples come from."""
    title = Path(place).name if Path(place).is_dir() else place
    return f"the data set {title}{'' if config is None else f' ({config})'}, through datasets"


def check_splits(task: str, splits: Mapping[str, Any], *wanted: str | None) -> None:
    """Raises DataError for a split that the data set does not have."""
    for split in wanted:
        if split is not None and split not in splits:
            raise DataError(f"task {task!r} has no split {split!r}{nearest(split, splits)}")


def _labelled_split(
    name: str, splits: Mapping[str, Any], train_split: str, columns: tuple[str, str | None, str, str | None]
) -> tuple[str, list[Row]]:
    """The first of the usual test splits that has labels, and its rows; none where there is none."""
    for split in TEST_SPLITS:
        if split == train_split or split not in splits or holder(columns[2], splits[split].column_names) is None:
            continue
        if rows := _rows(name, split, splits[split], columns):
            return split, rows
    return "", []


def address(name: str, config: str | None) -> tuple[str, str | None]:
    """The data set's place and configuration; of three parts, the third is the configuration."""
    if Path(name).expanduser().is_dir():
        return str(Path(name).expanduser()), config
    parts = name.split("/")
    if not all(parts) or len(parts) > 3:
        raise ConfigError(f"'hub:{name}' is no data set; write hub:owner/name or hub:owner/name/config")
    if parts[0] in _MOVED:
        parts = [*_MOVED[parts[0]].split("/"), *parts[1:]]
    if len(parts) == 3:
        if config is not None and config != parts[2]:
            raise ConfigError(f"'hub:{name}' names the configuration {parts[2]!r}, and config is {config!r}; give one")
        config = parts.pop()
    return "/".join(parts), config


def load_splits(name: str, place: str, config: str | None) -> Mapping[str, Any]:
    """The data set's splits by name."""
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"task 'hub:{name}' needs the library datasets; install it with: pip install 'coterie[hub]'"
        ) from error
    saved = (Path(place) / "dataset_dict.json").is_file()
    try:
        loaded = library.load_from_disk(place) if saved else library.load_dataset(place, config)
    except Exception as error:  # whatever the hub's client raises: its kinds differ between versions
        said = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(
            f"task 'hub:{name}' cannot be loaded ({said[:200]}); check name and connection, or save the data as "
            "CSV and use the task file"
        ) from error
    if not isinstance(loaded, Mapping):
        raise DataError(f"task 'hub:{name}': {place} holds no splits; save a DatasetDict")
    return loaded


def _rows(name: str, split: str, table: Any, columns: tuple[str, str | None, str, str | None]) -> list[Row]:
    """The labelled examples of a split; a label is a class number or what the column holds, as text."""
    for column in columns:
        if column is not None and holder(column, table.column_names) is None:
            hint = nearest(column, table.column_names)
            raise DataError(f"task 'hub:{name}', split {split!r}: no column {column!r}{hint}")
    text, pair, label, group = (None if column is None else cells(table, column) for column in columns)
    assert text is not None and label is not None
    rows = []
    for place, kind in enumerate(label):
        if kind is None or kind == -1:
            continue
        if isinstance(kind, float | list | dict):
            raise DataError(
                f"task 'hub:{name}', split {split!r}, row {place}: the label is {str(kind)[:40]!r}; classes are whole "
                "numbers or texts"
            )
        texts = [joined(text[place]), None if pair is None else joined(pair[place])]
        if not isinstance(texts[0], str) or not (pair is None or isinstance(texts[1], str)):
            raise DataError(f"task 'hub:{name}', split {split!r}, row {place}: no text in a text column")
        belongs = None if group is None else str(group[place])
        rows.append(Row(place, texts[0], texts[1], str(kind).lower() if isinstance(kind, bool) else str(kind), belongs))
    return rows


def _classes(table: Any, label: str, rows: list[Row]) -> tuple[Examples, tuple[str, ...]]:
    """All rows as examples, and the names of their classes: those that the column declares, if it does."""
    examples, found = named(rows)
    declared = getattr(table.features.get(label), "names", None)
    if not declared:
        return examples, found
    # The column holds class numbers, which `named` has put in the order of those that occur.
    numbers = np.array([int(kind) for kind in found], dtype=np.int64)
    return Examples(examples.texts, examples.pairs, numbers[examples.labels], examples.groups), tuple(declared)
