"""A user's own labelled files."""

from __future__ import annotations

from pathlib import Path

from coterie.data.files import read_rows
from coterie.data.tasks.base import Pool, named, numbered
from coterie.errors import DataError


def file(
    path: str,
    test_path: str | None = None,
    text: str = "text",
    pair: str | None = None,
    label: str = "label",
    group: str | None = None,
    test_fraction: float = 0.2,
) -> Pool:
    """A user's own CSV, TSV or JSON-lines file (`files.read_rows`), with a test file or a share split off.

    Classes are the labels in sorted order, as numbers where all of them are. `group` names the column of what an
    example naturally belongs to, such as a hospital, for the partitioner `natural`.
    """
    train_path = Path(path).expanduser()
    rows = read_rows(train_path, text=text, pair=pair, label=label, group=group)
    train, names = named(rows)
    if len(names) < 2:
        raise DataError(f"{train_path}: column {label!r} holds {len(names)} class(es); at least two are needed")
    if test_path is None:
        check_fraction(test_fraction, "or give a test_path")
        return Pool(train, None, names, f"the file {train_path.name}", test_fraction=test_fraction)
    apart = Path(test_path).expanduser()
    test_rows = read_rows(apart, text=text, pair=pair, label=label)
    if not test_rows:
        raise DataError(f"{apart}: no examples")
    test = numbered(apart, test_rows, names, train_path.name)
    return Pool(train, test, names, f"the files {train_path.name} and {apart.name}")


def check_fraction(test_fraction: float, way_out: str) -> None:
    """Refuse a share to split off that is no share."""
    if not 0 < test_fraction < 1:
        raise DataError(f"test_fraction is {test_fraction}; it must lie between 0 and 1, {way_out}")
