"""How commands end that are interrupted: what was computed is kept, and it is told how to go on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


@contextmanager
def resumable(folder: Path, way: str = "") -> Iterator[None]:
    """An interruption ends in one line that says how to go on, with exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        begun = bool(way) or (folder / "config.yaml").is_file()
        told = f"what was computed is kept; to go on: {way or f'coterie resume {folder}'}"
        print(f"coterie: interrupted; {told if begun else 'nothing had been computed'}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def ends_when_told() -> Iterator[None]:
    """A termination signal unwinds this process, which ends its workers, instead of leaving them behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
