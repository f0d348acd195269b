"""What is wrong with a configuration, in lines that name the setting and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic_core import ErrorDetails

from coterie.errors import nearest
from coterie.experiments.config_sections import Config, Section

_UNION_NAMES = {"int", "float", "str", "list", "constrained", "literal"}


def findings(details: Sequence[ErrorDetails]) -> list[str]:
    """Pydantic's findings, one for each setting; of a value that may be one thing or a list, the deepest finding."""
    by_path: dict[str, list[ErrorDetails]] = {}
    for detail in details:
        by_path.setdefault(_path(detail["loc"]), []).append(detail)
    return [
        _said(path, found)
        for path, found in by_path.items()
        if not any(other.startswith(f"{path}[") for other in by_path)
    ]


def nearest_key(path: str) -> str:
    """The tail of an error message about an unknown dotted key."""
    known = list(dotted_keys())
    parent, _, last = path.rpartition(".")
    elsewhere = [key for key in known if key.rpartition(".")[2] == last]
    if elsewhere:
        return f"; did you mean {elsewhere[0]!r}?"
    beside = nearest(path, [key for key in known if key.rpartition(".")[0] == parent])
    return beside if "did you mean" in beside else nearest(path, known) or beside


def dotted_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """Every key that a configuration may have, dotted."""
    for name, field in section.model_fields.items():
        inner = next((kind for kind in _kinds(field.annotation) if issubclass(kind, Section)), None)
        yield prefix + name
        if inner is not None:
            yield from dotted_keys(inner, f"{prefix}{name}.")


def _said(path: str, details: Sequence[ErrorDetails]) -> str:
    """What is wrong with one setting, in a line that names it and the way out."""
    first = details[0]
    given = first["input"]
    if first["type"] == "extra_forbidden":
        return f"there is no setting {path!r}{nearest_key(path)}"
    if first["type"] == "missing":
        examples = {"method": "; for example method: fedit", "task": "; for example task: {name: movie}"}
        return f"{path} is missing{examples.get(path, '')}"
    if first["type"] == "value_error":
        return f"{path}: {first['ctx']['error']}"
    if first["type"] == "model_type":
        return f"{path}: settings are expected, such as {{name: value}}, not {given!r}"
    allowed: list[str] = []
    wanted = []
    for detail in details:
        if detail["type"] == "literal_error":
            names = str(detail.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ")
            allowed += names.split(", ")
            wanted.append(names if len(allowed) == 1 else f"one of {names}")
        else:
            wanted.append(detail["msg"].removeprefix("Input should be ").partition(", ")[0])
    shown = repr(given) if len(repr(given)) <= 60 else f"{repr(given)[:57]}..."
    near = nearest(given, allowed) if isinstance(given, str) else ""
    return f"{path}: must be {' or '.join(wanted)}, not {shown}" + (near if "did you mean" in near else "")


def _path(location: tuple[int | str, ...]) -> str:
    """The dotted path, without the names that pydantic gives to the members of a union."""
    known = set(dotted_keys())
    parts: list[str] = []
    for part in location:
        if isinstance(part, int):
            parts[-1:] = [f"{parts[-1]}[{part}]"] if parts else [str(part)]
        elif part.isidentifier() or not parts or ".".join([*parts, part]) in known:
            parts.append(part)
    while len(parts) > 1 and ".".join(parts[:-1]) in known and parts[-1] in _UNION_NAMES:
        parts.pop()
    return ".".join(parts)


def _kinds(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)
