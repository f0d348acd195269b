"""Small image models on disk, pictures whose class a glance tells, and folders of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference.tokenisers import WORDS, write_tokenizer
from transformers import (
    CLIPConfig,
    CLIPForImageClassification,
    CLIPVisionConfig,
    Dinov2Config,
    Dinov2ForImageClassification,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

SIDE, PATCH = 16, 4
FRAMES = ((SIDE, 2 * SIDE), (2 * SIDE, SIDE), (2 * SIDE, 2 * SIDE), (3 * SIDE, SIDE), (SIDE, 3 * SIDE))
"""Of the model that sees in tiles: height and width."""
CLASSES = ("dark", "light", "striped")
_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "initializer_range": 0.2,
}


def write_image_model(folder: Path, kind: str = "dinov2") -> Path:
    """A random image classifier of two layers: dinov2, vit or clip."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "dinov2":
            shape = {name: value for name, value in _SHAPE.items() if name != "intermediate_size"}
            network: Any = Dinov2ForImageClassification(Dinov2Config(**shape, mlp_ratio=2))
        elif kind == "vit":
            network = ViTForImageClassification(ViTConfig(**_SHAPE))
        else:
            towers = {"vision_config": {**_SHAPE, "projection_dim": 8}, "text_config": {"vocab_size": 20}}
            network = CLIPForImageClassification(CLIPConfig(**towers))
    network.save_pretrained(folder)
    settings = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "size": {"height": SIDE, "width": SIDE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def write_seeing_model(folder: Path, *, tiles: bool = False, layers: int = 2) -> Path:
    """A random LLaVA, or with tiles a LLaVA-NeXT, whose tokeniser has a token for images."""
    vision = CLIPVisionConfig(**{**_SHAPE, "num_hidden_layers": 2})
    text = LlamaConfig(
        vocab_size=80,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        initializer_range=0.2,
    )
    told: dict[str, Any] = {"image_token_index": 79, "vision_feature_layer": -1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if tiles:
            frames = [list(frame) for frame in FRAMES]
            config: Any = LlavaNextConfig(vision_config=vision, text_config=text, image_grid_pinpoints=frames, **told)
            network: Any = LlavaNextForConditionalGeneration(config)
        else:
            network = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, **told))
    network.save_pretrained(folder)
    assert len(WORDS) < 20
    write_tokenizer(folder, eos_token="<end>")
    settings: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    settings |= {"crop_size": {"height": SIDE, "width": SIDE}, "size": {"shortest_edge": SIDE}}
    settings |= {"image_grid_pinpoints": [list(frame) for frame in FRAMES]} if tiles else {}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def picture(label: int, number: int, side: int = SIDE, wide: int | None = None) -> np.ndarray:
    """uint8 (side, wide, 3), a square by default: dark, light or striped, no two alike."""
    noise = np.random.default_rng(1000 * label + number).integers(0, 60, (side, wide or side, 3))
    level = (0, 190, 0)[label] + (np.arange(side)[:, None, None] % 2 * 190 if label == 2 else 0)
    return (noise + level).astype(np.uint8)


def file_of(pixels: np.ndarray, form: str = "PNG") -> bytes:
    from PIL import Image

    held = io.BytesIO()
    Image.fromarray(pixels).save(held, form)
    return held.getvalue()


def write_pictures(folder: Path, each: int, *, classes: tuple[str, ...] = CLASSES, side: int = SIDE) -> Path:
    """A folder for each class with so many PNG files."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(each):
            (folder / name / f"{number:03}.png").write_bytes(file_of(picture(label, number, side)))
    return folder
