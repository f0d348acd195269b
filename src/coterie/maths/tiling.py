"""Images of any shape as tiles of one size: into which frame one is fitted, how it is cut, how many places it takes.

LLaVA-NeXT (Liu et al. 2024): an image is seen whole, as one square, and again in tiles that together are a frame. Of
each tile a model has a grid of features; those of the frame are put together, rows and columns that show padding alone
are left out, and each row ends with a feature of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Tiling:
    """size: the side of a tile in pixels; patch: of a patch; frames: (height, width) in pixels, multiples of `size`."""

    size: int
    patch: int
    frames: tuple[tuple[int, int], ...]

    @property
    def most(self) -> int:
        """The largest number of squares that an image becomes."""
        return max(map(self._squares, self.frames))

    @property
    def most_places(self) -> int:
        """The largest number of features that an image becomes."""
        side = self.size // self.patch
        return side * side + max(
            tall // self.size * side * (wide // self.size * side + 1) for tall, wide in self.frames
        )

    def frame(self, height: int, width: int) -> tuple[int, int]:
        """The frame in which most pixels of an image are kept, of equally good ones that with least left over."""

        def merit(frame: tuple[int, int]) -> tuple[int, int]:
            scale = min(frame[1] / width, frame[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - frame[0] * frame[1]

        return max(self.frames, key=merit)

    def squares(self, height: int, width: int) -> int:
        """How many squares an image becomes, the whole of it among them."""
        return self._squares(self.frame(height, width))

    def places(self, height: int, width: int) -> int:
        """How many features an image becomes: the whole, the frame's without padding, an end of each of its rows."""
        side = self.size // self.patch
        rows, columns = (edge // self.size * side for edge in self.frame(height, width))
        # Rounded as by the model, lest a share such as 5.9999999 lose a row.
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return side * side + rows * (columns + 1)

    def cut(self, pixels: Tensor) -> Tensor:
        """uint8 (c, height, width) as squares (k, c, size, size): the whole, then the frame's tiles row by row."""
        height, width = pixels.shape[1:]
        tall, wide = self.frame(height, width)
        if wide / width < tall / height:
            inner = (min(math.ceil(height * (wide / width)), tall), wide)
        else:
            inner = (tall, min(math.ceil(width * (tall / height)), wide))
        above, left = (tall - inner[0]) // 2, (wide - inner[1]) // 2
        frame = pixels.new_zeros(len(pixels), tall, wide)
        frame[:, above : above + inner[0], left : left + inner[1]] = _resized(pixels, inner)
        tiles = frame.unfold(1, self.size, self.size).unfold(2, self.size, self.size).flatten(1, 2).transpose(0, 1)
        return torch.cat([_resized(pixels, (self.size, self.size))[None], tiles])

    def _squares(self, frame: tuple[int, int]) -> int:
        return 1 + (frame[0] // self.size) * (frame[1] // self.size)


def _resized(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 (c, h, w) at another size; in whole numbers, as the models' own preprocessors compute it."""
    if tuple(pixels.shape[1:]) == size:
        return pixels
    return F.interpolate(pixels[None], size, mode="bicubic", align_corners=False, antialias=True)[0]
