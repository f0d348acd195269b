"""Columns of records, also such as lie inside others: `a.b` is what the mapping in column a has under b."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def holder(name: str, columns: Collection[str]) -> str | None:
    """The one of `columns` that holds what is called `name`: of that name, or a for `a.b`; None where there is none."""
    return next((own for own in (name, name.partition(".")[0]) if own in columns), None)


def inside(record: Mapping[str, Any], name: str) -> Any:
    """What a record has under the name; an empty text where it has nothing."""
    if name in record:
        return record[name]
    outer, _, inner = name.partition(".")
    held = record.get(outer)
    return inside(held, inner) if inner and isinstance(held, Mapping) else ""


def cells(table: Any, name: str) -> list[Any]:
    """What the rows of a table of the hub have under the name, which one of its columns holds."""
    column = holder(name, table.column_names)
    assert column is not None
    return [inside({column: held}, name) for held in table[column]]


def joined(text: Any) -> Any:
    """Several texts as one, with spaces between them; all else as it is."""
    several = isinstance(text, list) and bool(text) and all(isinstance(part, str) for part in text)
    return " ".join(part.strip() for part in text) if several else text
