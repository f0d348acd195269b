"""An image's places among a prompt's tokens."""

from __future__ import annotations

import torch
from reference.vision import picture

from coterie.data.images import ImageSet, image_set
from coterie.data.pictured import with_pictures
from coterie.data.sequences import SequenceSet


def two_pictures() -> ImageSet:
    return image_set(
        [picture(0, 0), picture(1, 0)], [0, 0], num_classes=1, size=16, mean=(0.5,) * 3, std=(0.5,) * 3, tokens=3
    )


def sequences() -> SequenceSet:
    """Prompts 1 5 and 6, answers 7 and 8 9, the first with the begin token 1."""
    ids = torch.tensor([1, 5, 7, 6, 8, 9], dtype=torch.int32)
    return SequenceSet(ids, torch.tensor([0, 3, 6]), torch.tensor([2, 1]), torch.arange(2))


def test_an_image_stands_before_the_prompt_but_after_a_begin_token() -> None:
    made = with_pictures(sequences(), two_pictures(), [1, 0], token=4, begin=1)
    batch = made.batch([0, 1], 6)
    assert batch["input_ids"].tolist() == [[1, 4, 4, 4, 5, 7], [4, 4, 4, 6, 8, 9]]
    assert batch["labels"].tolist() == [[-100] * 5 + [7], [-100] * 4 + [8, 9]]
    assert made.lengths.tolist() == [6, 6] and made.labelled.tolist() == [1, 2]
    pixels = two_pictures().batch([1, 0], 0)["pixel_values"]
    assert torch.equal(batch["pixel_values"], pixels)


def test_without_a_begin_token_an_image_comes_first() -> None:
    made = with_pictures(sequences(), two_pictures(), [0, 0], token=4, begin=None)
    assert made.batch([0], 6)["input_ids"].tolist() == [[4, 4, 4, 1, 5, 7]]


def test_a_selection_shows_each_sequence_its_own_image() -> None:
    made = with_pictures(sequences(), two_pictures(), [0, 1], token=4, begin=1).select([1])
    batch = made.batch([0], 8)
    assert torch.equal(batch["pixel_values"], two_pictures().batch([1], 0)["pixel_values"])
    assert batch["input_ids"].tolist() == [[4, 4, 4, 6, 8, 9, 0, 0]]
