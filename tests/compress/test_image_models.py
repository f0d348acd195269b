"""Compressors on a vision transformer, and QSVD's joint query, key and value there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference.vision import picture, write_image_model
from torch import Tensor, nn

from coterie.compress import METHODS, QSVD, FactoredLinear, cut, rank_layers
from coterie.compress.calibration import batched
from coterie.data.images import normalised
from coterie.models.loading import load_whole
from coterie.models.targets import select_layers


def whole(folder: Path) -> nn.Module:
    network, _ = load_whole(write_image_model(folder))
    return network


def windows(count: int = 8) -> Tensor:
    shots = np.stack([picture(n % 3, n) for n in range(count)])
    return normalised(torch.from_numpy(shots).permute(0, 3, 1, 2), 16, (0.5,) * 3, (0.25,) * 3)


def own_classes(network: nn.Module, pixels: Tensor) -> Tensor:
    """How sure the network is of what it says now, in place of labels."""
    logits = network(pixel_values=pixels).logits
    return F.cross_entropy(logits, logits.detach().argmax(dim=1))


def logits(network: nn.Module, pixels: Tensor) -> Tensor:
    with torch.no_grad():
        return network(pixel_values=pixels).logits


@pytest.mark.parametrize("name", ["svd", "asvd", "svd-llm", "svd-llm-v2"])
def test_more_parameters_leave_less_error_and_all_leave_none(tmp_path: Path, name: str) -> None:
    network, shown = whole(tmp_path), windows()
    names = list(select_layers(network, "all-linear"))
    before = logits(network, shown)
    far = []
    for ratio in (0.3, 0.8):
        smaller = whole(tmp_path)
        ranking = rank_layers(smaller, names, METHODS[name](), shown, ratio)
        made = cut(smaller, ranking, METHODS[name](), ratio, shown)
        assert made.parameters <= ratio * made.parameters_before
        far.append(float((logits(smaller, shown) - before).norm()))
    assert far[1] < far[0]


def test_query_key_and_value_share_one_factor_of_a_vision_transformer(tmp_path: Path) -> None:
    network, shown = whole(tmp_path), windows()
    names = [name for name in select_layers(network, "all-linear") if "attention" in name]
    ranking = rank_layers(network, names, QSVD(), shown, 0.5, loss=own_classes)
    made = cut(network, ranking, QSVD(), 0.5, shown)
    joint = [group for group in made.shared if len(group) == 3]
    assert len(joint) == 2
    for group in joint:
        q, k, v = (network.get_submodule(name) for name in group)
        assert isinstance(q, FactoredLinear) and isinstance(k, FactoredLinear) and isinstance(v, FactoredLinear)
        assert q.V is k.V is v.V
    assert torch.isfinite(logits(network, shown)).all() and made.parameters <= 0.5 * made.parameters_before


def test_a_batch_of_images_holds_about_as_many_places_as_one_of_text() -> None:
    assert [len(batch) for batch in batched(torch.zeros(8, 3, 224, 224))] == [4, 4]
    assert [len(batch) for batch in batched(torch.zeros(8, 3, 16, 16))] == [8]
