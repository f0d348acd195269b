"""What the contenders of `coterie bench` share: everybody sees the same batches."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
LENGTHS = torch.tensor([5, 8, 3, 6])


@pytest.fixture(autouse=True)
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PEERS))
    return import_module("common")


def work(folder: Path, **tables: torch.Tensor) -> Any:
    """Four examples of at most ten tokens, one client's batches of two rounds."""
    mask = torch.arange(10) < LENGTHS[:, None]
    ids = torch.arange(1, 41).view(4, 10) * mask
    save_file({"ids": ids, "mask": mask.long(), **tables}, folder / "data.safetensors")
    batches = [[[([0, 2], 5), ([1, 3], 8)]], [[([3, 0], 6)]]]
    return import_module("common").Work(folder, {"classes": 3}, [[0], [0]], batches)


def test_padded_batches_have_the_longest_length_and_the_same_examples(tmp_path: Path) -> None:
    made = work(tmp_path, labels=torch.tensor([0, 1, 2, 1]))
    padded = made.padded()
    assert padded.batches == [[[([0, 2], 10), ([1, 3], 10)]], [[([3, 0], 10)]]]
    short, long = made.batch([0, 2], 5), padded.batch([0, 2], 10)
    assert long["input_ids"].shape == (2, 10) and torch.equal(long["input_ids"][:, :5], short["input_ids"])
    assert not long["attention_mask"][:, 5:].any() and torch.equal(long["labels"], short["labels"])


@pytest.mark.parametrize("language", [False, True])
def test_scripts_and_coterie_see_the_same_batch(tmp_path: Path, language: bool) -> None:
    own = {"prompts": torch.tensor([2, 4, 1, 5])} if language else {"labels": torch.tensor([0, 1, 2, 1])}
    made = work(tmp_path, **own)
    assert made.language == language
    theirs, ours = made.batch([1, 3], 8), import_module("ours").texts(made).batch([1, 3], 8)
    for name, value in theirs.items():
        assert torch.equal(value, ours[name]), name
    if language:
        assert (theirs["labels"] >= 0).sum(dim=1).tolist() == [4, 1]
