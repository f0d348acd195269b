"""What all tests share: one thread, no model hub, and fixtures of the toy world in `toy.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import toy
from hypothesis import settings
from training.forked import Forked

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


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[list[Forked]]:
    """Pools fork their workers instead of starting them, in a tenth of the time; the list is of those so far."""
    from coterie.training import pool

    made: list[Forked] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_start", lambda threads: made.append(Forked()) or made[-1])
        yield made
