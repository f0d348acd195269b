"""Sequences about images: an image's places among a prompt's tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from coterie.data.images import ImageSet
from coterie.data.sequences import SequenceSet
from coterie.data.tiles import TiledSet


def with_pictures(
    data: SequenceSet, pictures: ImageSet | TiledSet, picture_of: ArrayLike | Tensor, token: int, begin: int | None
) -> SequenceSet:
    """Each stored sequence with as many places of an image, `token`, as its own takes, before its first token.

    picture_of: (stored,) integers, the image of each sequence. begin: the tokeniser's begin token, which stays first.
    """
    images = torch.as_tensor(picture_of, dtype=torch.int64)
    counts, lengths = pictures.places[images], torch.diff(data.offsets)
    first = data.ids[data.offsets[:-1].clamp(max=max(len(data.ids) - 1, 0))]
    kept = torch.zeros_like(lengths) if begin is None else ((first == begin) & (lengths > 0)).long()
    # The image goes in after `kept` tokens of each sequence: where each old token lands among the new ones.
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    within = torch.arange(len(data.ids)) - data.offsets[owner]
    offsets = torch.cat([data.offsets[:1], data.offsets[1:] + counts.cumsum(0)])
    ids = torch.full((len(data.ids) + int(counts.sum()),), token, dtype=data.ids.dtype)
    ids[offsets[owner] + within + counts[owner] * (within >= kept[owner])] = data.ids
    return replace(data, ids=ids, offsets=offsets, prompts=data.prompts + counts, pictures=pictures, picture_of=images)
