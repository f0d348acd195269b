"""Questions and requests by what they are about: TREC and Banking77, from the files of their authors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coterie.data.files import Row, read_rows, read_text
from coterie.data.tasks.base import Examples, Pool, benchmark_folder, named, numbered, train_and_test
from coterie.errors import DataError

TREC_CLASSES: Mapping[str, str] = {
    "DESC": "description",
    "ENTY": "entity",
    "ABBR": "abbreviation",
    "HUM": "human",
    "LOC": "location",
    "NUM": "number",
}
"""The six coarse classes of Li & Roth (2002), in the order of the numbers of one public copy."""


def trec(path: str | None = None) -> Pool:
    """Questions by the type of their answer, six coarse classes: TREC (Li & Roth 2002).

    Read are the authors' files (train_5500.label and TREC_10.label: `DESC:manner How …`) or TREC.train.all and
    TREC.test.all, where a digit stands for the coarse class; both are Latin-1.
    """
    folder = benchmark_folder("trec", path, "trec", "TREC")

    def read(place: Path) -> Examples:
        codes = tuple(TREC_CLASSES) if place.suffix == ".label" else tuple("012345")
        return numbered(place, prefixed_lines(place), codes, "TREC")

    train, test, notes = train_and_test(
        folder, read, ("train_5500.label", "TREC.train.all"), ("TREC_10.label", "TREC.test.all")
    )
    where = "COTERIE_DATA" if path is None else f"the folder {folder.name}"
    source = f"TREC question classification (Li & Roth 2002), from {where}"
    return Pool(train, test, tuple(TREC_CLASSES.values()), source, notes)


def banking77(path: str | None = None) -> Pool:
    """Customers' requests to a bank by what they want, 77 classes: Banking77 (Casanueva et al. 2020; CC-BY-4.0)."""
    folder = benchmark_folder("banking77", path, "banking77")
    whole = [place for place in (folder / "train.csv", folder / "test.csv") if place.is_file()]
    if not whole:
        raise DataError(f"{folder}: neither train.csv nor test.csv is there")
    _, names = named([row for place in whole for row in _requests(place)])

    def read(place: Path) -> Examples:
        return numbered(place, _requests(place), names, "Banking77")

    train, test, notes = train_and_test(folder, read, ("train.csv",), ("test.csv",))
    where = "COTERIE_DATA" if path is None else f"the folder {folder.name}"
    return Pool(train, test, names, f"Banking77 (Casanueva et al. 2020, CC-BY-4.0), from {where}", notes)


def prefixed_lines(path: Path, encoding: str = "latin-1") -> list[Row]:
    """Rows of a file whose lines are a label, a space and a text; of a label like DESC:manner the part before `:`."""
    cut = (raw.partition(" ") for raw in read_text(path, encoding=encoding).split("\n"))
    return [
        Row(line, text, None, label.partition(":")[0])
        for line, (label, _, text) in enumerate(cut, start=1)
        if text.strip()
    ]


def _requests(place: Path) -> list[Row]:
    return read_rows(place, text="text", pair=None, label="category")
