"""Images in tiles: as transformers' preprocessor cuts them, from files or pixels, batched, shared, refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from reference.vision import FRAMES, PATCH, SIDE, file_of, picture
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from coterie.data.pictured import with_pictures
from coterie.data.sequences import SequenceSet
from coterie.data.tiles import tiled_set
from coterie.errors import DataError
from coterie.maths.tiling import Tiling

TILING = Tiling(SIDE, PATCH, FRAMES)
SHAPES = ((20, 20), (10, 33), (50, 7), (16, 32), (64, 90), (1, 40))
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.3, 0.2)


def pictures() -> list[np.ndarray]:
    return [picture(1, place, *shape) for place, shape in enumerate(SHAPES)]


def test_images_of_many_shapes_become_what_transformers_makes_of_them() -> None:
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=[list(frame) for frame in FRAMES],
        image_mean=list(MEAN),
        image_std=list(STD),
    )
    theirs = processor([Image.fromarray(one) for one in pictures()], return_tensors="pt")
    ours = tiled_set(pictures(), TILING, MEAN, STD).inputs(torch.arange(len(SHAPES)))
    assert torch.equal(ours["image_sizes"], torch.as_tensor(theirs["image_sizes"]))
    assert ours["pixel_values"].shape == theirs["pixel_values"].shape == (6, TILING.most, 3, SIDE, SIDE)
    # Pillow and torch round a resized pixel to neighbouring whole numbers now and then.
    steps = (ours["pixel_values"] - theirs["pixel_values"]) * torch.tensor(STD).view(3, 1, 1) * 255
    assert steps.abs().max() < 1.01 and (steps.abs() > 0.5).float().mean() < 0.02


def test_a_file_and_its_pixels_are_one_image_and_a_grey_one_has_three_equal_channels() -> None:
    grey = picture(0, 3, 9, 30)[:, :, 0]
    data = tiled_set([pictures()[1], file_of(pictures()[1]), grey, file_of(grey)], TILING, (0.5,) * 3, (0.5,) * 3)
    pixels = data.inputs(torch.arange(4))["pixel_values"]
    assert torch.equal(pixels[0], pixels[1]) and torch.equal(pixels[2], pixels[3])
    assert torch.equal(pixels[2][:, 0], pixels[2][:, 2]) and not torch.equal(pixels[0], pixels[2])


def test_a_batch_is_the_same_whoever_shares_it() -> None:
    data = tiled_set(pictures(), TILING, MEAN, STD)
    alone, together = data.inputs(torch.tensor([2])), data.inputs(torch.tensor([4, 2, 2, 0]))
    for name in ("pixel_values", "image_sizes"):
        assert torch.equal(together[name][1], alone[name][0]) and torch.equal(together[name][2], alone[name][0])


def test_each_sequence_has_the_places_of_its_own_image() -> None:
    ids = torch.tensor([1, 5, 7, 6, 8, 9], dtype=torch.int32)
    texts = SequenceSet(ids, torch.tensor([0, 3, 6]), torch.tensor([2, 1]), torch.arange(2))
    images = tiled_set(pictures(), TILING, MEAN, STD)
    made = with_pictures(texts, images, [2, 0], token=4, begin=1)
    few, many = (TILING.places(*SHAPES[place]) for place in (2, 0))
    assert few != many and images.places[:3].tolist()[::2] == [many, few]
    assert made.lengths.tolist() == [few + 3, many + 3] and made.labelled.tolist() == [1, 2]
    batch = made.batch([1, 0], many + 3)
    assert batch["input_ids"][0].tolist() == [4] * many + [6, 8, 9]
    assert batch["input_ids"][1].tolist() == [1] + [4] * few + [5, 7] + [0] * (many - few)
    assert batch["image_sizes"].tolist() == [[20, 20], [50, 7]]
    chosen = made.select([1])
    assert torch.equal(chosen.batch([0], many + 3)["pixel_values"], images.inputs(torch.tensor([0]))["pixel_values"])


def test_a_file_that_is_no_image_is_named_before_anything_is_batched() -> None:
    with pytest.raises(DataError, match="image 1 cannot be read"):
        tiled_set([pictures()[0], b"nothing"], TILING, MEAN, STD)
