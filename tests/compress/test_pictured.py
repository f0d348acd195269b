"""A language model that sees, compressed along images: its layers meet what they meet when it is shown the images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference.vision import FRAMES, PATCH, SIDE, picture, write_seeing_model
from torch import Tensor, nn

from coterie.compress import METHODS, cut, rank_layers
from coterie.compress.base import language_loss
from coterie.compress.calibration import Stream, blocks
from coterie.compress.factored import FactoredLinear
from coterie.compress.pictured import with_images
from coterie.compress.text import perplexity
from coterie.data.tiles import tiled_set
from coterie.errors import ConfigError, DataError
from coterie.experiments.bases import images_for
from coterie.experiments.calibrating import Calibration, Seen, Windows
from coterie.experiments.compression import layers_to_compress, windows_for
from coterie.maths.tiling import Tiling
from coterie.models.loading import load_whole
from coterie.models.seeing import Seeing

SHAPES = ((20, 20), (12, 40), (45, 14), (32, 32))
CHOSEN = Calibration(samples=3, length=24, held_out=200)
MATERIAL = [Seen(picture(n % 2, n, *SHAPES[n % 4]), "is the film good", ("no", "yes")[n % 2]) for n in range(40)]

Whole = tuple[nn.Module, Seeing]


@pytest.fixture(scope="module", params=[True, False], ids=["tiles", "one-size"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return load_whole(write_seeing_model(tmp_path_factory.mktemp("llava") / "base", tiles=request.param))


def drawn(whole: Whole, material: list[Seen] = MATERIAL, chosen: Calibration = CHOSEN) -> Windows:
    return windows_for(*whole, material, chosen)


def inputs_at(network: nn.Module, name: str, **given: Tensor) -> Tensor:
    seen: list[Tensor] = []
    hook = network.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        network(**given)
    hook.remove()
    return seen[0]


def test_windows_are_equally_long_begin_with_an_image_and_share_no_example(whole: Whole) -> None:
    windows = drawn(whole)
    sees = whole[1].vision
    most = sees.places if sees.tiling is None else sees.tiling.most_places
    assert windows.text.shape == (3, 24 + most) and windows.held.shape[1] == 24 + most
    assert windows.held.shape[0] == -(-200 // (23 + most))
    assert (windows.text[:, 0] < 0).all() and windows.features is not None
    rows = torch.cat([windows.text, windows.held]).flatten()
    pictured = rows[rows < 0]
    assert len(pictured.unique()) == len(pictured) and int(-pictured.min()) <= len(windows.features)
    again, other = drawn(whole), drawn(whole, chosen=Calibration(samples=3, length=24, held_out=200, seed=1))
    assert torch.equal(again.text, windows.text) and again.images == windows.images != other.images


def test_a_layer_meets_in_a_window_what_it_meets_when_the_image_is_shown(whole: Whole) -> None:
    network, seeing = whole
    windows = drawn(whole)
    name = next(reversed(blocks(network))) + ".mlp.down_proj"
    with with_images(network, windows.features):
        found = inputs_at(network, name, input_ids=windows.text)
    # The first example of a window is found again as the one whose pixels give the same inputs.
    for row, inputs in zip(windows.text, found, strict=True):
        places = int((row >= 0).nonzero()[0])
        length = places + int((row[places:] < 0).nonzero()[0])
        ids = row[:length].where(row[:length] >= 0, seeing.vision.placeholder)
        distances = []
        for example in MATERIAL:
            given = shown_as(seeing, example, places)
            if given is not None:
                expected = inputs_at(network, name, input_ids=ids[None], **given)[0]
                distances.append(float((expected - inputs[:length]).abs().max()))
        assert min(distances) < 1e-5 and sorted(distances)[1] > 1e-3


def shown_as(seeing: Seeing, example: Seen, places: int) -> dict[str, Tensor] | None:
    """An example's image as the network takes it, if it takes so many places."""
    images = images_for([example.picture], seeing.vision)
    return images.inputs(torch.tensor([0])) if int(images.places[0]) == places else None


def test_images_are_seen_but_not_predicted(whole: Whole) -> None:
    network, _ = whole
    windows = drawn(whole)
    with torch.no_grad(), with_images(network, windows.features):
        logits = network(input_ids=windows.text).logits
        losses = [
            torch.nn.functional.cross_entropy(logits[i, t - 1], windows.text[i, t])
            for i in range(len(windows.text))
            for t in range(1, windows.text.shape[1])
            if windows.text[i, t] >= 0
        ]
        mean = torch.stack(losses).mean()
        assert torch.allclose(language_loss(network, windows.text), mean, atol=1e-5)
        found, count = perplexity(network, windows.text)
    assert count == len(losses) and found == pytest.approx(float(mean.exp()), rel=1e-4)


def test_nothing_is_left_on_the_network(whole: Whole) -> None:
    network, _ = whole
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        before = network(input_ids=ids).logits
        with with_images(network, torch.ones(4, 32)):
            assert torch.equal(network(input_ids=ids).logits, before)
            assert not torch.equal(network(input_ids=torch.tensor([[3, -1, 5]])).logits, before)
        assert torch.equal(network(input_ids=ids).logits, before)
        with pytest.raises(IndexError):
            network(input_ids=torch.tensor([[3, -1, 5]]))


@pytest.mark.parametrize("method", ["qsvd", "svd-llm", "dobi"])
def test_methods_cut_all_of_the_language_model_and_nothing_beside_it(tmp_path: Path, method: str) -> None:
    network, seeing = load_whole(write_seeing_model(tmp_path, tiles=True))
    windows = windows_for(network, seeing, MATERIAL, CHOSEN)
    names = layers_to_compress(network, seeing, "all-linear")
    assert len(names) == 14
    how = METHODS[method]()
    with with_images(network, windows.features):
        ranking = rank_layers(network, names, how, windows.text, 0.9)
        made = cut(network, ranking, how, 0.9, windows.text)
    assert set(made.ranks) == set(names) and all(0 <= error < 1 for error in made.errors.values())
    assert {name for name, module in network.named_modules() if isinstance(module, FactoredLinear)} == set(names)


def test_calibration_along_other_images_makes_other_factors(tmp_path: Path) -> None:
    factors = []
    for material in (MATERIAL, [Seen(255 - one.picture, one.prompt, one.answer) for one in MATERIAL]):  # type: ignore[operator]
        network, seeing = load_whole(write_seeing_model(tmp_path / str(len(factors)), tiles=True))
        windows = windows_for(network, seeing, material, CHOSEN)
        names = layers_to_compress(network, seeing, ["q_proj", "k_proj", "v_proj"])
        assert len(names) == 6
        how: Any = METHODS["qsvd"]()
        with with_images(network, windows.features):
            cut(network, rank_layers(network, names, how, windows.text, 0.6), how, 0.6, windows.text)
        factors.append(network.get_submodule(names[-1]).V)
    assert factors[0].shape[1] == factors[1].shape[1] and not torch.equal(factors[0], factors[1])


def test_text_alone_calibrates_too_if_that_is_asked(whole: Whole) -> None:
    windows = drawn(whole, ["a film is good or bad\n"] * 60)  # type: ignore[list-item]
    assert windows.features is None and windows.text.shape == (3, 24)
    assert Stream(whole[0], windows.text).states[0].shape[1] == 24


def test_what_cannot_calibrate_is_refused(whole: Whole) -> None:
    with pytest.raises(DataError, match="too few questions about images to calibrate on: 4 give"):
        drawn(whole, MATERIAL[:4])
    with pytest.raises(DataError, match="calibrated on text, or on questions about images"):
        drawn(whole, [one.picture for one in MATERIAL])  # type: ignore[misc]
    with pytest.raises(ConfigError, match="longer than the model takes"):
        drawn(whole, chosen=Calibration(length=4000))


def test_the_largest_image_fits_a_window() -> None:
    tiling = Tiling(SIDE, PATCH, FRAMES)
    images = tiled_set([picture(0, 0, *shape) for shape in SHAPES], tiling, (0.5,) * 3, (0.5,) * 3)
    assert int(images.places.max()) == tiling.most_places == 88
