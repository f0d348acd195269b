"""What images a model takes, as its preprocessor and its configuration say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from coterie.errors import ModelError
from coterie.maths.tiling import Tiling

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True)
class Vision:
    """What images a model takes: squares of `size` pixels, normalised by each channel's mean and deviation (of pixels
    in [0, 1]), as patches of `patch` pixels a side. settings: the folder's own preprocessor_config.json. placeholder:
    of a language model that sees, the token whose places an image takes; places: how many it takes; tiling: of one that
    cuts images into tiles of `size` pixels, how, and then places depend on the image."""

    size: int
    patch: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    settings: dict[str, Any]
    placeholder: int | None = None
    places: int = 0
    tiling: Tiling | None = None

    @property
    def tokens(self) -> int:
        """About how many places an image takes in the model's layers: its patches and the class token."""
        return (self.size // self.patch) ** 2 + 1

    def save_pretrained(self, folder: str | Path) -> None:
        """Write preprocessor_config.json, as transformers reads it, for images of this size."""
        square = {"height": self.size, "width": self.size}
        shortest = isinstance(held := self.settings.get("size"), dict) and "shortest_edge" in held
        settings = self.settings | {"size": {"shortest_edge": self.size} if shortest else square}
        settings |= {"crop_size": square} if "crop_size" in settings else {}
        settings |= {"image_mean": list(self.mean), "image_std": list(self.std)}
        if self.tiling is not None:
            settings |= {"image_grid_pinpoints": [list(frame) for frame in self.tiling.frames]}
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (Path(folder) / PROCESSOR).write_text(text, encoding="utf-8")


def read_settings(name: str) -> dict[str, Any]:
    """A model's preprocessor_config.json; empty where it has none."""
    from transformers.utils.hub import cached_file

    place = cached_file(name, PROCESSOR, _raise_exceptions_for_missing_entries=False)
    return {} if place is None else dict(json.loads(Path(place).read_text(encoding="utf-8")))


def vision_of(network: nn.Module, settings: dict[str, Any], image_size: int | None, name: str) -> Vision:
    """What images a network takes, by its preprocessor's settings and its configuration.

    Raises:
        ModelError: no patches, or an `image_size` that they do not divide.
    """
    config: Any = getattr(network.config, "vision_config", network.config)
    patch = getattr(config, "patch_size", None)
    if not isinstance(patch, int):
        raise ModelError(f"{name!r} ({type(network).__name__}) sees no square patches; choose a vision transformer")
    size = image_size or _side(settings) or _first(config.image_size)
    if image_size is not None and size % patch:
        raise ModelError(
            f"model.image_size is {size}, and {name!r} sees patches of {patch} pixels; take a multiple of {patch}"
        )
    mean, std = settings.get("image_mean") or _IMAGENET[0], settings.get("image_std") or _IMAGENET[1]
    return Vision(size, patch, _three(mean), _three(std), settings)


def _side(settings: dict[str, Any]) -> int | None:
    """The side of the squares that a preprocessor makes: after cropping, where it crops."""
    for key in ("crop_size", "size"):
        held = settings.get(key)
        if isinstance(held, int):
            return held
        if isinstance(held, dict) and isinstance(side := held.get("height", held.get("shortest_edge")), int):
            return side
    return None


def _first(sides: Any) -> int:
    return int(sides if isinstance(sides, int) else sides[0])


def _three(values: Any) -> tuple[float, float, float]:
    first, second, third = (float(value) for value in values)
    return first, second, third
