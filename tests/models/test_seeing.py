"""Language models that see: what they take is found out, layers beside language are left alone, others refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from reference.tokenisers import write_tokenizer
from reference.vision import FRAMES, PATCH, SIDE, file_of, picture, write_seeing_model
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Idefics2Config,
    Idefics2ForConditionalGeneration,
    LlamaConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from coterie.data.sequences import SequenceSet, tokenise_sequences
from coterie.errors import DataError, ModelError
from coterie.experiments.bases import images_for, shown, sight_for
from coterie.models.image_bases import load_seeing_language_base
from coterie.models.loading import Base, inputs_of, load_whole
from coterie.models.seeing import Seeing

SHAPES = {"square": (20, 20), "wide": (12, 50), "tall": (61, 13)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("next") / "llava", tiles=True)


@pytest.fixture(scope="module")
def base(folder: Path) -> Base:
    return load_seeing_language_base(folder, targets=None)


def asked(base: Base, pictures: list[Any]) -> SequenceSet:
    """A question about each."""
    count = len(pictures)
    prompts = [f"is the film {'very ' * place}good" for place in range(count)]
    data = tokenise_sequences(prompts, [" yes"] * count, base.tokenizer, 64)
    return shown(data, images_for(pictures, sight_for(base)), torch.arange(count), base)


def test_what_it_takes_is_read_from_its_folder(base: Base) -> None:
    assert base.is_language and base.vision is not None and base.vision.tiling is not None
    assert (base.vision.placeholder, base.vision.size, base.vision.patch) == (79, SIDE, PATCH)
    assert base.vision.tiling.frames == FRAMES and base.vision.tiling.most == 5
    assert len(base.layers) == 4 and all("language_model" in name for name in base.layers)


def test_logits_of_a_batch_of_many_shapes_are_those_of_transformers_one_by_one(folder: Path, base: Base) -> None:
    plain = AutoModelForImageTextToText.from_pretrained(folder).eval()
    data = asked(base, [picture(1, place, *shape) for place, shape in enumerate(SHAPES.values())])
    longest = int(data.lengths.max())
    batch = data.batch(range(len(data)), longest)
    with torch.no_grad(), base.slots.bound(1, None, None):
        together = base.network(**inputs_of(base, batch)).logits
        for place, length in enumerate(data.lengths.tolist()):
            squares = base.vision.tiling.squares(*batch["image_sizes"][place].tolist())  # type: ignore[union-attr]
            alone = plain(
                input_ids=batch["input_ids"][place : place + 1, :length],
                pixel_values=batch["pixel_values"][place : place + 1, :squares],
                image_sizes=batch["image_sizes"][place : place + 1],
            ).logits
            assert torch.allclose(together[place, :length], alone[0], atol=1e-5)
    assert len(set(data.lengths.tolist())) == 3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_from_the_file_to_the_logits_it_is_as_with_transformers_preprocessor(
    folder: Path, base: Base, shape: tuple[int, int]
) -> None:
    plain = AutoModelForImageTextToText.from_pretrained(folder).eval()
    pixels = np.full((*shape, 3), (200, 20, 90), dtype=np.uint8)  # one colour, which every way of resizing keeps
    processor = LlavaNextImageProcessorPil.from_pretrained(folder)
    theirs = processor([Image.fromarray(pixels)], return_tensors="pt")
    data = asked(base, [file_of(pixels)])
    batch = data.batch([0], int(data.lengths[0]))
    with torch.no_grad(), base.slots.bound(1, None, None):
        ours = base.network(**inputs_of(base, batch)).logits
        told = plain(input_ids=batch["input_ids"], **{name: torch.as_tensor(theirs[name]) for name in theirs}).logits
    assert torch.allclose(ours, told, atol=1e-5)


def test_the_image_matters(base: Base) -> None:
    data = asked(base, [picture(0, 0, 20, 20), picture(1, 0, 20, 20)])
    same = data.batch([0, 1], int(data.lengths.max()))
    with torch.no_grad(), base.slots.bound(1, None, None):
        logits = base.network(**inputs_of(base, same)).logits
    assert (logits[0, 0] - logits[1, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("tiles", [False, True])
def test_names_mean_layers_of_the_language_model_unless_they_name_the_tower(tmp_path: Path, tiles: bool) -> None:
    place = write_seeing_model(tmp_path, tiles=tiles)
    for targets in ("all-linear", ["q_proj", "k_proj"], r".*\.v_proj"):
        layers = load_seeing_language_base(place, targets=targets).layers
        assert layers and all("language_model" in name for name in layers)
    tower = load_seeing_language_base(place, targets=["vision_tower.encoder.layers.0.self_attn.q_proj", "down_proj"])
    beside = [name for name in tower.layers if "language_model" not in name]
    assert beside == ["model.vision_tower.encoder.layers.0.self_attn.q_proj"] and len(tower.layers) == 3
    with pytest.raises(ModelError, match=r"none of the chosen layers \(fc1\) lies in the language model"):
        load_seeing_language_base(place, targets=["fc1"])


def test_a_whole_model_comes_with_its_tokeniser_and_what_it_sees(folder: Path, tmp_path: Path) -> None:
    network, seeing = load_whole(folder)
    assert isinstance(seeing, Seeing) and network.config.model_type == "llava_next"
    seeing.save_pretrained(tmp_path)
    processor = LlavaNextImageProcessorPil.from_pretrained(tmp_path)
    assert processor.image_grid_pinpoints == [list(frame) for frame in FRAMES]
    assert (tmp_path / "tokenizer.json").is_file()


def test_an_image_that_leaves_no_room_for_its_text_is_told_of(tmp_path: Path) -> None:
    place = write_seeing_model(tmp_path, tiles=True)
    base = load_seeing_language_base(place, targets=None)
    base.network.config.text_config.max_position_embeddings = 70  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"example 1: its image takes 88 places, and with its text .*lower model\.max"):
        asked(base, [picture(0, 0, 16, 32), picture(0, 0, 32, 32)])


def test_a_text_that_holds_the_image_token_is_refused(base: Base) -> None:
    data = tokenise_sequences(["good", "film"], [" yes", " no"], base.tokenizer, 64)
    base_token = int(data.ids[data.offsets[1]])
    odd = SequenceSet(torch.where(data.ids == base_token, 79, data.ids), data.offsets, data.prompts, data.rows)
    with pytest.raises(DataError, match="sequence 1: its text holds the model's image token"):
        shown(odd, images_for([picture(0, 0)] * 2, sight_for(base)), torch.arange(2), base)


SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def other(kind: str) -> Any:
    """A small model that takes images in another form."""
    tower = {**SHAPE, "image_size": SIDE, "patch_size": PATCH}
    if kind == "idefics2":
        perceiver = {"hidden_size": 32, "n_latents": 4, "resampler_depth": 1, "num_key_value_heads": 2}
        perceiver |= {"resampler_n_heads": 2, "resampler_head_dim": 16}
        text = {"model_type": "mistral", **SHAPE, "num_key_value_heads": 2, "vocab_size": 80, "pad_token_id": 0}
        return Idefics2ForConditionalGeneration(
            Idefics2Config(vision_config=tower, perceiver_config=perceiver, text_config=text, image_token_id=79)
        )
    return LlavaOnevisionForConditionalGeneration(
        LlavaOnevisionConfig(
            vision_config=SiglipVisionConfig(**tower),
            text_config=Qwen2Config(**SHAPE, num_key_value_heads=2, vocab_size=80),
            image_token_index=79,
            image_grid_pinpoints=[list(frame) for frame in FRAMES],
        )
    )


@pytest.mark.parametrize("kind", ["idefics2", "onevision"])
def test_models_that_take_images_in_another_form_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    other(kind).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, eos_token="<end>")
    for load in (load_whole, lambda place: load_seeing_language_base(place, targets=None)):
        with pytest.raises(
            ModelError, match=r"in a form that is not known here .* make of LLaVA or LLaVA-NeXT"
        ) as told:
            load(tmp_path)
        assert "\n" not in str(told.value)


def test_frames_that_are_no_multiples_of_a_tile_are_refused(tmp_path: Path) -> None:
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    vision = CLIPVisionConfig(**SHAPE, image_size=SIDE, patch_size=PATCH)
    config = LlavaNextConfig(
        vision_config=vision, text_config=LlamaConfig(**SHAPE, vocab_size=80), image_grid_pinpoints=[[16, 40]]
    )
    LlavaNextForConditionalGeneration(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, eos_token="<end>")
    with pytest.raises(ModelError, match="no multiples of 16"):
        load_seeing_language_base(tmp_path, targets=None)
