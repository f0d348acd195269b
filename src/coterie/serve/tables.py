"""Files of texts in, the same rows with a prediction out."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.data.files import read_everything, read_records, read_text
from coterie.errors import DataError

ADDED = ("prediction", "probability")
"""The columns that are added to those of the input."""

_SHOWN = 12


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of a file. records: every column of each row, whatever stands there; texts, pairs: what is predicted on."""

    columns: tuple[str, ...]
    records: list[dict[str, Any]]
    texts: list[str]
    pairs: list[str] | None

    def __len__(self) -> int:
        return len(self.records)


def read_table(path: Path, text: str = "text", pair: str | None = None) -> Table:
    """The rows of a CSV, TSV or JSON-lines file (`coterie.data.files`), or the lines of a .txt file as one column.

    text: the column of the texts; pair: that of the second texts, if any.

    Raises:
        DataError: a missing, empty or malformed file, no such column, a column that a prediction would replace, or
            no text in some row.
    """
    if path.suffix.lower() == ".txt":
        if pair is not None:
            raise DataError(f"{path}: the lines of a .txt file are one column, so there is no column {pair!r}")
        lines = [line.removesuffix("\r") for line in read_text(path).split("\n") if line.strip()]
        columns: tuple[str, ...] = (text,)
        records = [{text: line} for line in lines]
        wanted = records
    else:
        content = read_text(path)
        columns, records = read_everything(path, content)
        for option, name in (("--text", text), ("--pair", pair)):
            if columns and name is not None and name not in columns:
                more = ", …" if len(columns) > _SHOWN else ""
                there = ", ".join(columns[:_SHOWN]) + more
                raise DataError(f"{path}: there is no column {name!r} among {there}; name another with {option}")
        names = [text] if pair is None else [text, pair]
        wanted = [values for _, values in read_records(path, names, content=content)] if columns else []
    if not records:
        raise DataError(f"{path}: there are no rows in it")
    for name in ADDED:
        if name in columns:
            raise DataError(f"{path}: there is a column {name!r} already; rename it, lest it be replaced")
    second = None if pair is None else [str(row[pair]) for row in wanted]
    return Table(columns, records, [str(row[text]) for row in wanted], second)


def check_out(path: Path) -> None:
    """Raises DataError for an output file of another kind, or one that is there already."""
    if path.suffix.lower() not in (".csv", ".jsonl"):
        raise DataError(f"{path}: the name must end in .csv or .jsonl")
    if path.exists():
        raise DataError(f"{path} is there already; name another file, or remove it")
    if not path.absolute().parent.is_dir():
        raise DataError(f"{path}: there is no folder {path.parent}")


def write_table(table: Table, added: Sequence[Mapping[str, Any]], path: Path | None, kind: str) -> None:
    """The rows of `table`, each with what is `added` to it, as csv or jsonl; to standard output without a `path`.

    A file is there as a whole or not at all.

    Raises:
        DataError: it cannot be written.
    """
    columns = [*table.columns, *dict.fromkeys(name for values in added for name in values)]
    rows = [{**record, **values} for record, values in zip(table.records, added, strict=True)]
    text = _json_lines(rows) if kind == "jsonl" else _csv(columns, rows)
    if path is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error


def _json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_plain(row.get(column)) for column in columns] for row in rows)
    return text.getvalue()


def _plain(value: Any) -> Any:
    """A value as it stands in a CSV field: text as such, nothing as nothing, the rest as JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
