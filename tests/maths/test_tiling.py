"""Frames, tiles and places against transformers' own arithmetic, for images of any shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.modeling_llava_next import (
    get_anyres_image_grid_shape,
    image_size_to_num_patches,
    unpad_image,
)

from coterie.maths.tiling import Tiling

PUBLISHED = Tiling(336, 14, ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)))
SMALL = Tiling(16, 4, ((16, 32), (32, 16), (32, 32), (48, 16), (16, 48)))


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_an_image_takes_as_many_squares_and_places_as_the_model_makes_of_it(height: int, width: int) -> None:
    size = (height, width)
    for tiling in (PUBLISHED, SMALL):
        frames = [list(frame) for frame in tiling.frames]
        assert tiling.frame(*size) == tuple(select_best_resolution(size, frames))
        assert tiling.squares(*size) == image_size_to_num_patches(size, frames, tiling.size) <= tiling.most
        side = tiling.size // tiling.patch
        rows, columns = (side * part for part in get_anyres_image_grid_shape(size, frames, tiling.size))
        kept = unpad_image(torch.empty(1, rows, columns, device="meta"), size)
        assert tiling.places(*size) == side * side + kept.shape[1] * (kept.shape[2] + 1) <= tiling.most_places


# 576 of the whole and, of 48 x 48, 24 x 48 and 48 x 36 features without padding, an end for each row.
@pytest.mark.parametrize(("size", "places"), [((672, 672), 2928), ((336, 672), 1752), ((500, 375), 2352)])
def test_places_of_the_published_model_are_known_numbers(size: tuple[int, int], places: int) -> None:
    assert PUBLISHED.places(*size) == places


def test_tiles_put_together_are_the_image_in_its_frame_and_padding_is_black() -> None:
    pixels = torch.randint(1, 256, (3, 32, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    squares = SMALL.cut(pixels)
    assert squares.shape == (5, 3, 16, 16) and squares.dtype == torch.uint8
    upper, lower = torch.cat([*squares[1:3]], dim=-1), torch.cat([*squares[3:]], dim=-1)
    frame = torch.cat([upper, lower], dim=-2)
    assert torch.equal(frame[:, :, 6:26], pixels)  # it fits without being resized
    assert not frame[:, :, :6].any() and not frame[:, :, 26:].any()


def test_a_grey_image_is_cut_like_one_of_colours() -> None:
    grey = torch.randint(0, 256, (1, 11, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(SMALL.cut(grey).expand(-1, 3, -1, -1), SMALL.cut(grey.expand(3, -1, -1)))
