"""Images for models that cut them into tiles: kept as the files that they are, decoded and cut as a batch is made."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.data.images import Picture, decoded, normalised
from coterie.maths.tiling import Tiling

_ARRAY = b"\x93NUMPY"
"""How the bytes of stored pixels begin, which no image file does."""


@dataclass(frozen=True, eq=False)
class TiledSet:
    """Images of any shape, of which each takes as many places among a text's tokens as its shape asks for.

    contents: (bytes,) uint8, the files one after another; offsets: (stored + 1,) int64, file i is
    contents[offsets[i]:offsets[i + 1]]; sizes: (stored, 2) int64, height and width. Files, since the tiles of an image
    are several times its size. mean, std: as of `ImageSet`.
    """

    contents: Tensor
    offsets: Tensor
    sizes: Tensor
    tiling: Tiling
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def places(self) -> Tensor:
        """The places that each stored image takes, (stored,) int64."""
        return torch.tensor([self.tiling.places(*size) for size in self.sizes.tolist()], dtype=torch.int64)

    def inputs(self, stored: Tensor) -> dict[str, Tensor]:
        """What a model takes of the images at `stored` (b,) in the store.

        Returns pixel_values (b, t, 3, size, size) float32, of t squares at most, zeros where an image has fewer, and
        image_sizes (b, 2) int64. t is the same for all batches, so that those of several clients stack.
        """
        tiling = self.tiling
        images, place = torch.unique(stored, return_inverse=True)  # options of a question share theirs
        made = torch.zeros(len(images), tiling.most, 3, tiling.size, tiling.size)
        for row, image in zip(made, images.tolist(), strict=True):
            pixels = torch.from_numpy(np.array(decoded(self._picture(image), image)))
            squares = tiling.cut(pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1))
            row[: len(squares)] = normalised(squares, tiling.size, self.mean, self.std)
        return {"pixel_values": made[place], "image_sizes": self.sizes[stored]}

    def _picture(self, image: int) -> Picture:
        content = self.contents[self.offsets[image] : self.offsets[image + 1]].numpy().tobytes()
        return np.load(io.BytesIO(content), allow_pickle=False) if content.startswith(_ARRAY) else content


def tiled_set(pictures: Sequence[Picture], tiling: Tiling, mean: tuple[float, ...], std: tuple[float, ...]) -> TiledSet:
    """All images, each decoded once to see that it can be, and of what shape it is.

    Raises:
        DataError: as `image_set`.
    """
    sizes = [decoded(picture, place).shape[:2] for place, picture in enumerate(pictures)]
    files = [picture if isinstance(picture, bytes) else _as_file(picture) for picture in pictures]
    offsets = torch.tensor([0, *np.cumsum([len(file) for file in files])], dtype=torch.int64)
    contents = torch.empty(int(offsets[-1]), dtype=torch.uint8)
    for start, file in zip(offsets.tolist(), files, strict=False):
        contents[start : start + len(file)] = torch.frombuffer(bytearray(file), dtype=torch.uint8)
    return TiledSet(
        contents, offsets, torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2), tiling, tuple(mean), tuple(std)
    )


def _as_file(pixels: np.ndarray) -> bytes:
    held = io.BytesIO()
    np.save(held, pixels, allow_pickle=False)
    return held.getvalue()
