"""From run folders to files: the page, and its figures one by one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from coterie.errors import ConfigError
from coterie.report import drawing
from coterie.report.groups import grouped
from coterie.report.page import GENERATOR, page
from coterie.report.pictures import sections_of
from coterie.report.reading import collect

PAGE = "report.html"


def write_report(
    places: Sequence[Path], out: Path | None = None, figures: Path | None = None
) -> tuple[Path, list[Path]]:
    """The page of these runs, by default report.html in the one folder that is named, or here; and the files of its
    figures in the folder `figures`, each as SVG and as PNG. Returns what was written.

    places: run folders, comparisons, or folders that hold runs.

    Raises:
        ConfigError: no run there, matplotlib missing, or a file in the way that is no report.
        RunError: no round was played.
    """
    drawing.require()
    found = collect(places)
    groups, left_out = grouped(found.runs)
    target = out or default_place(places)
    _check_free(target)
    with drawing.settings(outlines=False):
        text = page(found, groups, places, [*found.notes, *left_out])
    _write(target, text.encode())
    written = []
    if figures is not None:
        with drawing.settings(outlines=True):
            drawn = {p.name: drawing.files(p) for _, _, pictures in sections_of(groups) for p in pictures}
        for name, contents in drawn.items():
            for ending, content in contents.items():
                written.append(figures / f"{name}.{ending}")
                _write(written[-1], content)
    return target, written


def default_place(places: Sequence[Path]) -> Path:
    """report.html in the only folder that is named, else in the working folder."""
    return places[0] / PAGE if len(places) == 1 else Path(PAGE)


def _check_free(target: Path) -> None:
    """Raises ConfigError where a file would be lost that no report has written."""
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; name a file, such as --out {target / PAGE}")
    if target.is_file() and target.stat().st_size:
        with target.open("rb") as file:
            if f'content="{GENERATOR}"'.encode() not in file.read(1000):
                raise ConfigError(f"{target} is there and is no report; choose another file with --out")


def _write(place: Path, content: bytes) -> None:
    """The file as a whole or not at all."""
    part = place.with_name(f".{place.name}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, place)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise ConfigError(f"{place}: cannot be written ({error.strerror or error})") from error
