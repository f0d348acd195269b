"""What a model is compressed along: text, images, or questions about images, as windows of equal length."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coterie.data.images import Picture, fingerprint
from coterie.data.pictured import with_pictures
from coterie.data.sequences import tokenise_sequences
from coterie.data.tasks import ExampleSet, Instructions, Questions
from coterie.data.tasks.language import spaced
from coterie.errors import ConfigError, DataError
from coterie.experiments.bases import images_for, require_plain_text
from coterie.maths.keys import root_key
from coterie.models.seeing import Seeing, image_features


@dataclass(frozen=True)
class Calibration:
    """The text to calibrate on, and to measure on: `text` is a task's name or a .txt file.

    samples windows of `length` tokens are drawn by `seed` to calibrate on; at least `held_out` tokens at the end of the
    text are measured on.
    """

    text: str = "nyt"
    samples: int = 32
    length: int = 256
    held_out: int = 8192
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Seen:
    """A question about an image, and its answer."""

    picture: Picture
    prompt: str
    answer: str


Material = Sequence[str] | Sequence[Picture] | Sequence[Seen]
"""Texts; images for a model of these; or questions about images for a language model that sees."""


@dataclass(frozen=True, eq=False)
class Windows:
    """text (N, L) to calibrate on and held (H, L), tokens int64, or images (N, 3, h, w) float32.

    features: (K, d), for which tokens below 0 stand (see `with_images`); images: a hash of those that they are of.
    """

    text: Tensor
    held: Tensor
    features: Tensor | None = None
    images: str = ""


def seen(examples: ExampleSet) -> list[Seen]:
    """Questions about images with their answers, of choices the right one; nothing of a task without images."""
    if not isinstance(examples, Questions | Instructions) or examples.pictures is None:
        return []
    if isinstance(examples, Instructions):
        answers = examples.answers
    else:
        answers = tuple(own[label] for own, label in zip(examples.choices, examples.labels.tolist(), strict=True))
    return [Seen(*one) for one in zip(examples.pictures, examples.prompts, answers, strict=True)]


def check_length(network: nn.Module, length: int) -> None:
    """Raises ConfigError for windows longer than the model takes, or in which nothing is predicted."""
    config: Any = network.config
    longest = getattr(getattr(config, "text_config", config), "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ConfigError(f"windows of {length} tokens are longer than the model takes; use at most {longest}")
    if length < 2:
        raise ConfigError(f"windows of {length} tokens hold nothing to predict; use at least 2")


def pictured_windows(network: nn.Module, seeing: Seeing, material: Sequence[Seen], chosen: Calibration) -> Windows:
    """Windows that begin with an image and its question and answer, and go on with others until they are full.

    They are as long as `length` tokens of text and the places of the largest image; a text is cut to `length`. Examples
    are drawn without replacement, those held out after those to calibrate on.

    Raises:
        ConfigError: windows longer than the model takes.
        DataError: too few examples, an image that cannot be read, or a text that cannot be tokenised.
    """
    sees = seeing.vision
    length = chosen.length + (sees.places if sees.tiling is None else sees.tiling.most_places)
    check_length(network, length)
    held = math.ceil(chosen.held_out / (length - 1))
    order = iter(root_key(chosen.seed).fold("calibration").permutation(len(material)).tolist())
    rows: list[Tensor] = []
    features: list[Tensor] = []
    hashed = hashlib.blake2b(digest_size=16)
    while len(rows) < chosen.samples + held:
        row = torch.empty(0, dtype=torch.int64)
        while len(row) < length:
            if (place := next(order, None)) is None:
                raise DataError(
                    f"too few questions about images to calibrate on: {len(material)} give {len(rows)} windows of "
                    f"{length} tokens, and {chosen.samples} with {held} held out are wanted; give more, or ask for less"
                )
            ids, own = _one(network, seeing, material[place], chosen.length)
            taken = sum(map(len, features))
            row = torch.cat([row, ids.where(ids >= 0, ids - taken)])
            features.append(own)
            hashed.update(fingerprint(material[place].picture).encode())
        rows.append(row[:length])
    windows = torch.stack(rows)
    first, last = windows[: chosen.samples], windows[chosen.samples :]
    return Windows(first, last, torch.cat(features), hashed.hexdigest())


def _one(network: nn.Module, seeing: Seeing, example: Seen, length: int) -> tuple[Tensor, Tensor]:
    """One example as tokens (L,), -1 - k in the k-th place of its image, and the features (places, d) of that."""
    sees, tokenizer = seeing.vision, seeing.tokenizer
    assert sees.placeholder is not None
    answer = spaced(example.prompt, example.answer)
    data = tokenise_sequences([example.prompt], [answer], tokenizer, length, cut=True)
    require_plain_text(data, sees.placeholder)
    images = images_for([example.picture], sees)
    (features,) = image_features(network, images.inputs(torch.tensor([0])))
    ids = with_pictures(data, images, [0], sees.placeholder, tokenizer.bos_token_id).ids.long()
    places = torch.arange(len(ids))[ids == sees.placeholder]
    return ids.index_put((places,), -1 - torch.arange(len(features))), features.float().cpu()
