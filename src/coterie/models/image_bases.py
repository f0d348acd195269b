"""Base models that see: encoders of patches with a head for classes, and language models that are shown images."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch import nn

from coterie.errors import ModelError
from coterie.maths.keys import Key
from coterie.models.loading import Base, from_language_network, from_network, load_network
from coterie.models.quantisation import Quantization, quantised_options
from coterie.models.seeing import language_layers, read_companion, sight_of
from coterie.models.targets import Targets
from coterie.models.vision import read_settings, vision_of


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
    """A language model that is shown images: one of LLaVA's make, or of LLaVA-NeXT's, which sees them in tiles as well.

    An image's features stand in the places of its image token. targets: by default the query and value projections of
    the language model; see `language_layers`. Images are shown at the one size that the model was trained with, whole
    or as tiles of it.

    Raises:
        ModelError: as `load_language_base`, or a model that takes images in another form.
    """
    from transformers import AutoModelForImageTextToText

    name = str(name_or_path)
    options = quantised_options(quantization, dtype)
    network, (tokenizer, settings), missing = load_network(
        AutoModelForImageTextToText, name, attention, dtype, read=read_companion, **options
    )
    if missing:
        raise ModelError(f"{name!r} is no whole model: its files give no {missing[0]}")
    sees = sight_of(network, settings, name)
    base = from_language_network(network, tokenizer, language_layers(network, targets), attention=attention)
    base.vision = sees
    return base


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
