"""Images as pixels: the square in the middle, one size, a byte each, normalised in a batch."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from reference.vision import file_of, picture

from coterie.data.images import ImageSet, Picture, decoded, fingerprint, image_set
from coterie.errors import DataError

MEAN, STD = (0.5, 0.25, 0.0), (0.5, 0.25, 1.0)


def made(pictures: list[Picture], size: int = 8, labels: list[int] | None = None) -> ImageSet:
    classes = [0] * len(pictures) if labels is None else labels
    return image_set(pictures, classes, num_classes=3, size=size, mean=MEAN, std=STD, tokens=5)


def test_a_batch_is_each_channel_less_its_mean_in_its_deviations() -> None:
    pixels = picture(0, 1, 8)
    batch = made([pixels], labels=[2]).batch([0], 0)
    expected = (pixels.astype(np.float64) / 255 - np.array(MEAN)) / np.array(STD)
    assert torch.allclose(batch["pixel_values"][0].double(), torch.from_numpy(expected).permute(2, 0, 1), atol=1e-6)
    assert batch["pixel_values"].dtype == torch.float32 and batch["labels"].tolist() == [2]


def test_a_selection_shares_the_pixels_and_keeps_the_order_asked_for() -> None:
    whole = made([picture(label, 0, 8) for label in range(3)], labels=[0, 1, 2])
    part = whole.select([2, 0])
    assert part.pixels is whole.pixels and part.labels.tolist() == [2, 0] and len(part) == 2
    assert torch.equal(part.batch([1], 0)["pixel_values"], whole.batch([0], 0)["pixel_values"])
    assert part.lengths.tolist() == [5, 5]
    with pytest.raises(DataError, match="set of 2"):
        part.batch([2], 0)


def test_small_pictures_stay_small_in_the_store_and_grey_ones_have_one_channel() -> None:
    held = made([picture(1, n, 8)[:, :, 0] for n in range(4)], size=16)
    assert held.pixels.shape == (4, 1, 8, 8) and held.pixels.dtype == torch.uint8
    values = held.batch(range(4), 0)["pixel_values"]
    assert values.shape == (4, 3, 16, 16)
    shades = values * torch.tensor(STD).view(1, 3, 1, 1) + torch.tensor(MEAN).view(1, 3, 1, 1)
    assert torch.allclose(shades[:, 0], shades[:, 2], atol=1e-6)


def test_pictures_of_several_sizes_become_squares_of_the_models() -> None:
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:16] = 200  # the square in the middle
    held = made([wide, picture(0, 0, 32), picture(1, 0, 4)[:, :, 0]], size=16)
    assert held.pixels.shape == (3, 3, 16, 16)
    assert int(held.pixels[0].min()) == 200 == int(held.pixels[0].max())
    assert torch.equal(held.pixels[2, 0], held.pixels[2, 1])


def test_a_shrunk_picture_keeps_its_mean_shade() -> None:
    stripes = picture(2, 0, 32)
    shrunk = made([stripes], size=4).pixels[0].double()
    assert abs(float(shrunk.mean()) - float(stripes.mean())) < 3  # without antialiasing one kind of line would win


def test_files_are_read_as_their_own_marks_say() -> None:
    from PIL import Image

    pixels = picture(2, 0, 8)
    assert np.array_equal(decoded(file_of(pixels), 0), pixels)
    assert decoded(file_of(pixels[:, :, 0]), 0).ndim == 2
    turned = io.BytesIO()
    image = Image.fromarray(pixels)
    marks = image.getexif()
    marks[274] = 6  # the camera was held upright
    image.save(turned, "PNG", exif=marks)
    assert np.array_equal(decoded(turned.getvalue(), 0), np.rot90(pixels, -1))


def test_equal_pictures_have_equal_fingerprints_and_others_not() -> None:
    one = picture(0, 0)
    assert fingerprint(one) == fingerprint(one.copy()) != fingerprint(picture(0, 1))
    assert fingerprint(np.zeros((2, 8), np.uint8)) != fingerprint(np.zeros((4, 4), np.uint8))
    assert fingerprint(file_of(one)) == fingerprint(file_of(one))


def test_what_is_no_picture_is_told_by_its_place() -> None:
    with pytest.raises(DataError, match=r"^image 1 cannot be read \(.*\)"):
        made([picture(0, 0), b"no picture"])
    with pytest.raises(DataError, match="image 0 is float64"):
        made([np.zeros((8, 8))])  # type: ignore[list-item]
    with pytest.raises(DataError, match="2 images and 1 labels"):
        image_set([picture(0, 0)] * 2, [0], num_classes=2, size=8, mean=MEAN, std=STD, tokens=5)
    with pytest.raises(DataError, match="labels run from 3 to 3"):
        made([picture(0, 0)], labels=[3])
