"""What image models are trained on and tested with: images and their classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from coterie.data.images import Picture, fingerprint


@dataclass(frozen=True, eq=False)
class Images:
    """Images and their classes: labels (n,) int64. groups: as of `Examples`."""

    kind: ClassVar[Literal["images"]] = "images"

    pictures: Sequence[Picture]
    labels: np.ndarray
    groups: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.pictures)

    def select(self, indices: ArrayLike) -> Images:
        """The images at `indices` (m,), in that order."""
        places = np.asarray(indices, dtype=np.int64).reshape(-1)
        groups = None if self.groups is None else tuple(self.groups[i] for i in places)
        return Images([self.pictures[i] for i in places.tolist()], self.labels[places], groups)

    def contents(self) -> list[tuple[str, str]]:
        """What makes an image the same as another: a hash of its file or pixels."""
        return [(fingerprint(picture), "") for picture in self.pictures]
