"""Base models that see: encoders of patches with a head for classes, and language models that are shown images."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.errors import ModelError
from coterie.maths.keys import Key
from coterie.models.loading import Base, from_language_network, from_network, load_network
from coterie.models.quantisation import Quantization, quantised_options
from coterie.models.targets import Targets, linears
from coterie.models.vision import Vision, read_settings, vision_of


def load_image_base(
    name_or_path: str | Path,
    *,
    targets: Targets,
    num_labels: int,
    image_size: int | None = None,
    attention: str = "eager",
    dtype: str = "float32",
    head_key: Key,
    quantization: Quantization | None = None,
) -> Base:
    """An image classifier from a folder or the hub: ViT, DeiT, DINOv2, the vision tower of CLIP or SigLIP, and others.

    Args:
        name_or_path, targets, num_labels, attention, dtype, head_key, quantization: as of `load_base`.
        image_size: the side of the squares that it is shown, a multiple of its patches; by default what its
            preprocessor says. Positions are interpolated from those that the model has learnt.

    Raises:
        ModelError: as `load_base`, no model of images, or a size that its patches do not divide.
    """
    from transformers import AutoModelForImageClassification

    name = str(name_or_path)
    options = {"num_labels": num_labels} | quantised_options(quantization, dtype)
    network, settings, missing = load_network(
        AutoModelForImageClassification, name, attention, dtype, read=read_settings, **options
    )
    base = from_network(network, None, targets, head_key, attention=attention, missing=missing)
    base.vision = vision_of(network, settings, image_size, name)
    interpolate_positions(network, base.vision.size)
    return base


def load_seeing_language_base(
    name_or_path: str | Path,
    *,
    targets: Targets,
    attention: str = "eager",
    dtype: str = "float32",
    quantization: Quantization | None = None,
) -> Base:
    """A language model that is shown images, of LLaVA's make: one image's features in the places of its image token.

    targets: by default the query and value projections of the language model, not those of its vision tower. Images
    are shown at the one size that the model was trained with.

    Raises:
        ModelError: as `load_language_base`, or a model that takes images in another form, such as in tiles.
    """
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    name = str(name_or_path)

    def read(place: str) -> Any:
        return AutoTokenizer.from_pretrained(place), read_settings(place)

    options = quantised_options(quantization, dtype)
    network, (tokenizer, settings), missing = load_network(
        AutoModelForImageTextToText, name, attention, dtype, read=read, **options
    )
    if missing:
        raise ModelError(f"{name!r} is no whole model: its files give no {missing[0]}")
    config: Any = network.config
    sees = vision_of(network, settings, None, name)
    if sees.size != _side_of(config.vision_config):
        sees = replace(sees, size=_side_of(config.vision_config))
    token = getattr(config, "image_token_id", None)
    sees = replace(sees, placeholder=token, places=_places(network, sees, name))
    base = from_language_network(
        network, tokenizer, _language_layers(network) if targets is None else targets, attention=attention
    )
    base.vision = sees
    return base


def _side_of(config: Any) -> int:
    return int(config.image_size if isinstance(config.image_size, int) else config.image_size[0])


@torch.no_grad()
def _places(network: nn.Module, sees: Vision, name: str) -> int:
    """How many places an image takes, found by showing one.

    Raises:
        ModelError: a network that takes images in another form.
    """
    blank = torch.zeros(1, 3, sees.size, sees.size, dtype=next(network.parameters()).dtype)
    try:
        features = network.get_image_features(pixel_values=blank)  # type: ignore[operator]
        found = getattr(features, "pooler_output", features)
        (shown,) = found
        if shown.dim() != 2 or getattr(network.config, "image_token_id", None) is None:
            raise ValueError("features of another form")
    except Exception as error:  # whatever a network of another form raises
        said = str(error).split("\n")[0]
        raise ModelError(
            f"{name!r} ({type(network).__name__}) takes images in a form that is not known here ({said[:100]}); choose "
            "a model of LLaVA's make"
        ) from error
    return int(shown.shape[0])


def _language_layers(network: nn.Module) -> list[str]:
    """Query and value projections of the language model inside."""
    ends = ("q_proj", "v_proj")
    return [name for name in linears(network) if "language_model" in name and name.endswith(ends)]


def interpolate_positions(network: nn.Module, size: int) -> None:
    """Let a network that has learnt positions for one size of images take another, in place."""
    for module in network.modules():
        takes = inspect.signature(module.forward).parameters
        if "interpolate_pos_encoding" in takes and hasattr(module, "interpolate_pos_encoding"):
            learnt = module.image_size
            if size not in (learnt, learnt[0] if isinstance(learnt, list | tuple) else None):
                module.register_forward_pre_hook(_interpolating, with_kwargs=True)


def _interpolating(
    _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return given, named | {"interpolate_pos_encoding": True}
