"""Labelled images of one size as pixels, kept in a byte each, and how image files become such."""

from __future__ import annotations

import hashlib
import importlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from coterie.errors import DataError

Picture = bytes | np.ndarray
"""An image file as it lies on disk (PNG, JPEG, …), or its pixels: uint8 (height, width) or (height, width, 3)."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images: rows of a shared store, ready for a model that takes squares of `size` pixels.

    pixels: (stored, c, h, h) uint8 with c 1 or 3 and h at most `size`; stored_labels: (stored,) int64 in
    [0, num_classes); rows: (n,) int64, the images that this set holds. mean, std: of each of the three channels of
    pixels in [0, 1], by which a batch is normalised. tokens: how many places an image has in the model's layers. A
    selection shares all but `rows`; grey images and such of fewer pixels than the model takes are widened in a batch.
    """

    pixels: Tensor
    stored_labels: Tensor
    rows: Tensor
    num_classes: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tokens: int

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Tensor:
        """The places that each image takes, (n,) int64: all alike."""
        return torch.full((len(self.rows),), self.tokens)

    @property
    def labels(self) -> Tensor:
        """Class of each image, (n,) int64."""
        return self.stored_labels[self.rows]

    @property
    def places(self) -> Tensor:
        """The places that each stored image takes among a text's tokens, (stored,) int64: all alike."""
        return torch.full((len(self.pixels),), self.tokens)

    def select(self, indices: ArrayLike | Tensor) -> ImageSet:
        """The images at `indices` (positions in this set, in this order) as a set over the same storage."""
        return replace(self, rows=self.rows[_positions(indices, len(self))])

    def batch(self, indices: ArrayLike | Tensor, pad_to: int) -> dict[str, Tensor]:
        """The images at `indices` (b,); `pad_to` is for sets whose examples have unequal lengths.

        Returns pixel_values (b, 3, size, size) float32 and labels (b,) int64.

        Raises:
            DataError: an index outside the set.
        """
        rows = self.rows[_positions(indices, len(self))]
        return self.inputs(rows) | {"labels": self.stored_labels[rows]}

    def inputs(self, stored: Tensor) -> dict[str, Tensor]:
        """pixel_values (b, 3, size, size) float32 of the images at `stored` (b,) in the store."""
        return {"pixel_values": normalised(self.pixels[stored], self.size, self.mean, self.std)}


def normalised(pixels: Tensor, size: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (b, c, h, h) as float32 (b, 3, size, size), each channel less its mean, in its deviations."""
    values = pixels.float().div_(255)
    if values.shape[-1] != size:
        values = F.interpolate(values, (size, size), mode="bicubic", align_corners=False).clamp_(0, 1)
    centre, spread = (torch.tensor(numbers, dtype=torch.float32).view(1, 3, 1, 1) for numbers in (mean, std))
    return values.expand(-1, 3, -1, -1).sub(centre).div_(spread)


def image_set(
    pictures: Sequence[Picture],
    labels: ArrayLike,
    *,
    num_classes: int,
    size: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    tokens: int,
) -> ImageSet:
    """Images as squares of `size` pixels: of each, the largest square in its middle, resized.

    Where these squares have one smaller size in common, they stay so in the store.

    Raises:
        DataError: images and labels of unequal number, a label outside the classes, a file that is no image, or image
            files where Pillow is not installed.
    """
    classes = np.asarray(labels, dtype=np.int64).reshape(-1)
    if len(pictures) != len(classes):
        raise DataError(f"{len(pictures)} images and {len(classes)} labels: there must be equally many")
    if len(classes) and not 0 <= classes.min() <= classes.max() < num_classes:
        raise DataError(f"labels run from {classes.min()} to {classes.max()}; they must lie in 0 … {num_classes - 1}")
    return ImageSet(
        pixels=stored_pixels(pictures, size),
        stored_labels=torch.from_numpy(classes.copy()),
        rows=torch.arange(len(pictures)),
        num_classes=num_classes,
        size=size,
        mean=mean,
        std=std,
        tokens=tokens,
    )


def fingerprint(picture: Picture) -> str:
    """blake2b of a file, or of pixels with their shape: 32 hexadecimal digits."""
    if isinstance(picture, bytes):
        return hashlib.blake2b(picture, digest_size=16).hexdigest()
    return hashlib.blake2b(f"{picture.shape}".encode() + picture.tobytes(), digest_size=16).hexdigest()


def stored_pixels(pictures: Sequence[Picture], size: int) -> Tensor:
    """Images as uint8 (n, c, h, h): h is `size`, or smaller where all are squares of that size; c is 1 if all are grey.

    Raises:
        DataError: as `image_set`.
    """
    parts: list[Tensor | None] = [_square(decoded(picture, place), size) for place, picture in enumerate(pictures)]
    shapes = {part.shape for part in parts if part is not None} or {torch.Size([1, size, size])}
    sides = {shape[-1] for shape in shapes}
    side = sides.pop() if len(sides) == 1 else size
    store = torch.empty(len(parts), max(shape[0] for shape in shapes), side, side, dtype=torch.uint8)
    for place, part in enumerate(parts):
        assert part is not None
        store[place] = part if part.shape[-1] == side else _resized(part, side)
        parts[place] = None  # so that both together take little more room than one
    return store


def decoded(picture: Picture, place: int) -> np.ndarray:
    """The pixels of an image, uint8 (height, width) of a grey one, else (height, width, 3); turned as its file says.

    place: of the image, for messages.

    Raises:
        DataError: see `image_set`.
    """
    if isinstance(picture, np.ndarray):
        fits = picture.dtype == np.uint8 and (picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] == 3))
        if not fits or 0 in picture.shape:
            raise DataError(
                f"image {place} is {picture.dtype} of shape {picture.shape}; uint8 pixels (height, width) or (height, "
                "width, 3) are needed"
            )
        return picture
    try:
        library: Any = importlib.import_module("PIL.Image")
        turning: Any = importlib.import_module("PIL.ImageOps")
    except ImportError as error:
        raise DataError(
            "image files are read with Pillow, not installed here; run: pip install 'coterie[images]'"
        ) from error
    try:
        with library.open(io.BytesIO(picture)) as opened:
            image = turning.exif_transpose(opened)
            return np.asarray(image if image.mode == "L" else image.convert("RGB"))
    except Exception as error:  # Pillow raises many kinds; a user needs the one line
        said = str(error).split("\n")[0] or type(error).__name__
        raise DataError(f"image {place} cannot be read ({said[:120]}); leave it out, or save it again") from error


def _square(pixels: np.ndarray, size: int) -> Tensor:
    """The largest square in the middle, (c, h, h) uint8, of at most `size` pixels a side."""
    values = torch.from_numpy(np.array(pixels))
    channels = values[None] if values.dim() == 2 else values.permute(2, 0, 1)
    height, width = channels.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = channels[:, top : top + side, left : left + side]
    return square if side <= size else _resized(square, size)


def _resized(channels: Tensor, size: int) -> Tensor:
    """(c, h, h) uint8 at another size, without the patterns that coarser pixels would show."""
    wide = F.interpolate(channels[None].float(), (size, size), mode="bicubic", align_corners=False, antialias=True)
    return wide[0].round_().clamp_(0, 255).to(torch.uint8)


def _positions(indices: ArrayLike | Tensor, count: int) -> Tensor:
    places = torch.as_tensor(np.asarray(indices), dtype=torch.int64).reshape(-1)
    if len(places) and (int(places.min()) < 0 or int(places.max()) >= count):
        raise DataError(f"indices run from {int(places.min())} to {int(places.max())} in a set of {count} examples")
    return places
