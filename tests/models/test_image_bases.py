"""Image bases: the head is drawn, positions are interpolated, and what a model takes is read from its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from reference.vision import PATCH, SIDE, write_image_model, write_seeing_model
from transformers import AutoModelForImageClassification

from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.models.image_bases import load_image_base, load_seeing_language_base
from coterie.models.loading import load_whole

KINDS = ("dinov2", "vit", "clip")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {kind: write_image_model(place / kind, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_loads_with_a_head_of_its_own_and_query_and_value_by_default(
    folders: dict[str, Path], kind: str
) -> None:
    base = load_image_base(folders[kind], targets=None, num_labels=5, head_key=root_key(1))
    assert base.vision is not None and (base.vision.size, base.vision.patch) == (SIDE, PATCH)
    assert base.vision.tokens == 17 and base.vision.mean == (0.5, 0.5, 0.5)
    assert base.head["classifier.weight"].shape[0] == 5 and not base.is_language
    assert len(base.layers) == 4 and len({name.rpartition(".")[2] for name in base.layers}) == 2
    again = load_image_base(folders[kind], targets="all-linear", num_labels=5, head_key=root_key(1))
    assert torch.equal(again.head["classifier.weight"], base.head["classifier.weight"])
    assert again.digest == base.digest and len(again.layers) > 4


@pytest.mark.parametrize("kind", KINDS)
def test_another_size_is_what_transformers_makes_of_it_by_interpolating(folders: dict[str, Path], kind: str) -> None:
    plain = AutoModelForImageClassification.from_pretrained(folders[kind]).eval()
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    base = load_image_base(folders[kind], targets=None, num_labels=2, image_size=24, head_key=root_key(1))
    assert base.vision is not None and base.vision.tokens == 37
    head = {name: value[None] for name, value in plain.state_dict().items() if name.startswith("classifier.")}
    options = {} if kind == "dinov2" else {"interpolate_pos_encoding": True}
    with torch.no_grad(), base.slots.bound(1, None, head):
        assert torch.allclose(base.network(pixel_values=pixels).logits, plain(pixels, **options).logits, atol=1e-5)


def test_a_size_that_its_patches_do_not_divide_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"model\.image_size is 18.*a multiple of 4"):
        load_image_base(folders["vit"], targets=None, num_labels=2, image_size=18, head_key=root_key(1))


def test_a_compressor_gets_what_the_model_takes_in_place_of_a_tokeniser(folders: dict[str, Path]) -> None:
    network, sees = load_whole(folders["dinov2"])
    assert network.config.model_type == "dinov2" and sees.size == SIDE


def test_what_a_model_takes_is_written_as_it_is_read(folders: dict[str, Path], tmp_path: Path) -> None:
    base = load_image_base(folders["vit"], targets=None, num_labels=2, image_size=24, head_key=root_key(1))
    assert base.vision is not None
    base.vision.save_pretrained(tmp_path)
    held = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert held["size"] == {"height": 24, "width": 24} and held["image_std"] == [0.25] * 3


def test_a_model_of_llavas_make_tells_how_many_places_an_image_takes(tmp_path: Path) -> None:
    base = load_seeing_language_base(write_seeing_model(tmp_path), targets=None)
    assert base.is_language and base.vision is not None
    assert (base.vision.placeholder, base.vision.places) == (79, 16)
    assert len(base.layers) == 4 and all("language_model" in name for name in base.layers)


def test_a_language_model_without_eyes_is_refused(tmp_path: Path) -> None:
    from experiments.decoders import write_decoder

    with pytest.raises(ModelError):
        load_seeing_language_base(write_decoder(tmp_path, "llama"), targets=None)
