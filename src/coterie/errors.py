"""What can go wrong for a user, each said in one line that names the culprit and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CoterieError(Exception):
    """Anything a user can cause and mend; the command line prints it as one line and exits with 2."""


class ConfigError(CoterieError):
    """A setting that cannot be meant."""


class DataError(CoterieError):
    """Missing files, wrong columns, impossible partitions."""


class ModelError(CoterieError):
    """A model, layer or adapter that does not fit."""


class WireError(CoterieError):
    """Bytes that are not a message."""


class CheckpointError(CoterieError):
    """A checkpoint that cannot be written, read or trusted."""


class RunError(CoterieError):
    """A run that cannot go on; what was computed is kept."""


def nearest(wrong: str, known: Iterable[str]) -> str:
    """A tail for an error message: the nearest known name, or all of them when few, or nothing."""
    names = sorted(known)
    longer = sorted((name for name in names if len(wrong) > 2 and name.startswith(wrong)), key=len)
    close = longer or difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= 12 else ""


def said(error: Exception) -> str:
    """An error in one line; errors that are not ours keep their type's name."""
    text = " ".join(str(error).split())
    return text if isinstance(error, CoterieError) else f"{type(error).__name__}: {text}"
