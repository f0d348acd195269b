"""Language models that are shown images: what images they take, in how many places, and which layers are language's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.compress.calibration import LANGUAGE
from coterie.errors import ModelError
from coterie.maths.tiling import Tiling
from coterie.models.targets import Targets, linears, select_layers
from coterie.models.vision import Vision, read_settings, vision_of

_TILED = "llava_next"


@dataclass(frozen=True)
class Seeing:
    """What stands beside a whole language model that sees: its tokeniser, and what images it takes."""

    tokenizer: Any
    vision: Vision

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes both as transformers reads them."""
        self.tokenizer.save_pretrained(str(folder))
        self.vision.save_pretrained(folder)


def read_companion(name: str) -> tuple[Any, dict[str, Any]]:
    """The tokeniser and the preprocessor's settings of a folder or hub name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name), read_settings(name)


def is_seeing(config: Any) -> bool:
    """Whether a model's configuration is of a language model beside a vision tower."""
    return hasattr(config, "vision_config") and hasattr(config, "text_config")


def sight_of(network: nn.Module, settings: dict[str, Any], name: str) -> Vision:
    """What images a language model takes, tried out on one; settings: of its preprocessor.

    Raises:
        ModelError: a network that takes images in another form than LLaVA or LLaVA-NeXT.
    """
    config: Any = network.config
    token = getattr(config, "image_token_id", None)
    try:
        if not is_seeing(config) or token is None:
            raise ValueError("it has no vision tower, or no token for images")
        side = config.vision_config.image_size
        size = int(side if isinstance(side, int) else side[0])
        sees = replace(vision_of(network, settings, None, name), size=size)
        if config.model_type != _TILED:
            if hasattr(config, "image_grid_pinpoints"):
                raise ValueError("it has tiles, but is no llava_next")
            return replace(sees, placeholder=token, places=len(_features(network, sees, 1, None)))
        tiling = Tiling(size, sees.patch, tuple((int(tall), int(wide)) for tall, wide in config.image_grid_pinpoints))
        if any(edge % size for frame in tiling.frames for edge in frame):
            raise ValueError(f"frames {tiling.frames} are no multiples of {size}")
        shape = (size + size // 4, size)
        found = len(_features(network, sees, tiling.squares(*shape), shape))
        if found != tiling.places(*shape):
            raise ValueError(f"{found} features where {tiling.places(*shape)} are expected")
    except Exception as error:  # whatever a network of another form raises
        said = str(error).split("\n")[0]
        raise ModelError(
            f"{name!r} ({type(network).__name__}) takes images in a form that is not known here ({said[:100]}); choose "
            "a model of the make of LLaVA or LLaVA-NeXT"
        ) from error
    return replace(sees, placeholder=token, tiling=tiling)


def language_layers(network: nn.Module, targets: Targets) -> list[str]:
    """The layers of the language model that `targets` name; None: its query and value projections.

    What lies beside it, such as the vision tower, is taken only where a target names that part, as in
    "vision_tower.….q_proj": all of LLaVA's towers have layers that are called like those of the language model.

    Raises:
        ModelError: as `select_layers`, or no layer of the language model.
    """
    if targets is None:
        return [name for name in linears(network) if _inside(name) and name.endswith(("q_proj", "v_proj"))]
    asked = [targets] if isinstance(targets, str) else list(targets)
    found = [
        name for name in select_layers(network, targets) if _inside(name) or any(_part(name) in one for one in asked)
    ]
    if not found:
        raise ModelError(
            f"none of the chosen layers ({', '.join(asked[:4])}) lies in the language model of "
            f"{type(network).__name__}; name some of it, or the part, such as vision_tower, as well"
        )
    return found


@torch.no_grad()
def image_features(network: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What the images of a batch become in the places of its tokens, (places, d) each; inputs: of `shown` images.

    Raises:
        ValueError: features of another form.
    """
    witness = next(network.parameters())
    given = {name: value.to(witness.device) for name, value in inputs.items()}
    given["pixel_values"] = given["pixel_values"].to(witness.dtype)
    found = network.get_image_features(**given)  # type: ignore[operator]
    features = list(getattr(found, "pooler_output", found))
    if len(features) != len(given["pixel_values"]) or any(one.dim() != 2 for one in features):
        raise ValueError("its features have another form")
    return features


def _features(network: nn.Module, sees: Vision, squares: int, shape: tuple[int, int] | None) -> Tensor:
    """Of one blank image: of a network with tiles in so many squares, of that height and width."""
    blank = torch.zeros(1, squares, 3, sees.size, sees.size)
    if shape is None:
        (found,) = image_features(network, {"pixel_values": blank[:, 0]})
    else:
        (found,) = image_features(network, {"pixel_values": blank, "image_sizes": torch.tensor([shape])})
    return found


def _inside(name: str) -> bool:
    return LANGUAGE in name.split(".")


def _part(name: str) -> str:
    """The part of the model that a layer lies in, such as vision_tower."""
    return name.removeprefix("model.").partition(".")[0]
