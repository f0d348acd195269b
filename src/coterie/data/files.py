"""Labelled text out of CSV, TSV and JSON-lines files, with errors that name file, line and column."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coterie.errors import DataError, nearest

_KINDS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_FIELD_LIMIT = 2**31 - 1


class Row(NamedTuple):
    """One example of a file and the line where it ends (where a quoted field spans several)."""

    line: int
    text: str
    pair: str | None
    label: str
    group: str | None = None


def read_rows(
    path: Path,
    *,
    text: str,
    pair: str | None,
    label: str,
    group: str | None = None,
    kind: str | None = None,
    header: Sequence[str] | None = None,
    content: str | None = None,
) -> list[Row]:
    """The examples of a file; `text`, `pair`, `label` and `group` name its columns (JSON keys).

    CSV has a header, commas, and double quotes round fields that need them. TSV has a header and no quoting
    at all, as the media type says: a quotation mark is text. JSON lines are one object a line. All are
    UTF-8. kind, header and content: as `read_records` takes them.

    Raises:
        DataError: a missing file or column, another encoding, a line of the wrong shape, an empty text, label or
            group.
    """
    wanted = [column for column in (text, pair, label, group) if column is not None]
    return [
        Row(
            line,
            values[text],
            None if pair is None else values[pair],
            values[label].strip(),
            None if group is None else values[group].strip(),
        )
        for line, values in read_records(path, wanted, kind=kind, header=header, content=content)
    ]


def read_records(
    path: Path,
    wanted: Sequence[str],
    *,
    kind: str | None = None,
    header: Sequence[str] | None = None,
    content: str | None = None,
) -> list[tuple[int, dict[str, str]]]:
    """The line and the `wanted` columns of each record of a file, read as by `read_rows`; none of them is empty.

    kind: csv, tsv or jsonl, by default what the name ends in. header: the columns of a table that begins without.
    content: the file's text, where it was read before.
    """
    kind = kind or _kind(path)
    content = read_text(path) if content is None else content
    if kind == "jsonl":
        records = _json_lines(path, content, wanted)
    else:
        lines = _csv_records(path, content) if kind == "csv" else _tsv_records(content)
        records = _table(path, lines, wanted, header)
    found = []
    for line, values in records:
        for column in wanted:
            if not values[column].strip():
                raise DataError(f"{path}, line {line}: nothing in column {column!r}; drop the line or fill it in")
        found.append((line, values))
    return found


def read_everything(path: Path, content: str | None = None) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """All columns of a file, in order, and its records with whatever stands in them, empty or not.

    Values are strings, of JSON lines whatever JSON holds; a key that only some lines have is a column too. content: as
    `read_records` takes it, which gives the same records in the same order.

    Raises:
        DataError: as `read_rows`, or two columns of one name.
    """
    kind = _kind(path)
    content = read_text(path) if content is None else content
    if kind == "jsonl":
        objects = [record for _, record in _objects(path, content)]
        return tuple(dict.fromkeys(column for record in objects for column in record)), objects
    lines = _csv_records(path, content) if kind == "csv" else _tsv_records(content)
    _, header = next(lines, (0, []))
    return tuple(header), [values for _, values in _table(path, lines, header, header)]


def read_text(path: Path, encoding: str = "utf-8-sig") -> str:
    """A whole text file, less a byte order mark.

    Raises:
        DataError: no such file, one that cannot be read, or bytes that are not of the encoding.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 (perhaps Latin-1 or UTF-16); save the file as UTF-8"
        ) from error


def _kind(path: Path) -> str:
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise DataError(f"{path}: the name must end in {', '.join(sorted(_KINDS))}")
    return kind


def _table(
    path: Path, records: Iterator[tuple[int, list[str]]], wanted: Sequence[str], header: Sequence[str] | None
) -> Iterator[tuple[int, dict[str, str]]]:
    if header is None:
        _, header = next(records, (0, []))
    for column in wanted:
        if header.count(column) != 1:
            many = "more than one" if column in header else "no"
            raise DataError(f"{path}, line 1: {many} column {column!r}{nearest(column, header)}")
    places = {column: header.index(column) for column in wanted}
    for line, fields in records:
        if len(fields) != len(header):
            raise DataError(f"{path}, line {line}: {len(fields)} columns where the header has {len(header)}")
        yield line, {column: fields[place] for column, place in places.items()}


def _csv_records(path: Path, content: str) -> Iterator[tuple[int, list[str]]]:
    # The csv module's limit of 128 KiB a field is one setting for the whole process, so it is put back.
    limit = csv.field_size_limit(_FIELD_LIMIT)
    try:
        reader = csv.reader(io.StringIO(content, newline=""), strict=True)
        records = []
        try:
            for fields in reader:
                if fields:
                    records.append((reader.line_num, fields))
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not CSV ({error}); check the quotation marks") from error
    finally:
        csv.field_size_limit(limit)
    return iter(records)


def _tsv_records(content: str) -> Iterator[tuple[int, list[str]]]:
    # Not splitlines, which also cuts at characters that may stand in a text, such as U+2028.
    for line, raw in enumerate(content.split("\n"), start=1):
        if raw.strip():
            yield line, raw.removesuffix("\r").split("\t")


def _json_lines(path: Path, content: str, wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    for line, record in _objects(path, content):
        for column in wanted:
            if column not in record:
                raise DataError(f"{path}, line {line}: no key {column!r}{nearest(column, record)}")
        yield line, {column: _plain(path, line, column, record[column]) for column in wanted}


def _objects(path: Path, content: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, raw in enumerate(content.split("\n"), start=1):
        if not raw.strip():
            continue
        try:
            record = json.loads(raw)
        except ValueError as error:
            raise DataError(f"{path}, line {line}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {line}: not a JSON object")
        yield line, record


def _plain(path: Path, line: int, column: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int):
        return str(value).lower()
    shown = "null" if value is None else json.dumps(value)[:40]
    raise DataError(f"{path}, line {line}: {column!r} is {shown}; a text or a whole number is needed")
