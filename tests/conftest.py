"""What all tests share: one thread, no model hub, and fixtures of the toy world in `toy.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import toy
from hypothesis import settings

# Before anything imports the hub's client; subprocesses inherit it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

torch.set_num_threads(1)
settings.register_profile("coterie", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("coterie")


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random BERT (2 layers, width 32, 2 heads) with its tokeniser. Read only."""
    return toy.write_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def reviews_csv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 short texts, good or bad, that a few words decide: columns text and label. Read only."""
    return toy.write_reviews(tmp_path_factory.mktemp("reviews") / "reviews.csv")


@pytest.fixture(scope="session")
def toy_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder (for COTERIE_CACHE) in which the assets are the toy base and toy reviews."""
    return toy.write_assets(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of benchmark data that COTERIE_DATA names; skips where there is none."""
    named = os.environ.get("COTERIE_DATA")
    if not named:
        pytest.skip("COTERIE_DATA is not set: this test reads benchmark data from the folder that it names")
    folder = Path(named).expanduser()
    if not folder.is_dir():
        pytest.skip(f"COTERIE_DATA names {folder}, which is no folder")
    return folder
