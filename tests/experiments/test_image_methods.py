"""Every method plays a round on images, with the options of its small configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from reference.vision import write_image_model, write_pictures

from coterie.algorithms import METHODS
from coterie.experiments.config import parse
from coterie.experiments.methods import algorithm
from coterie.experiments.runs import run

CONFIGS = Path(__file__).parents[2] / "configs" / "methods"
OTHERWISE = {
    "fedslm": "fuses compressed language models",
    "fedmkt": "aligns the tokens of language models",
    "fedbiot": "gives clients an emulator of a language model",
    "fedsee": "needs a mixture of tasks of texts",
    "centralised-per-task": "needs a mixture of tasks of texts",
}
"""Methods that are for language models or mixtures."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("images")
    return {
        "task": {"name": "image-folder", "path": str(write_pictures(place / "shots", 20))},
        "model": {"base": str(write_image_model(place / "model"))},
        "partition": {"kind": "iid", "minimum": 4},
        "train": {"batch_size": 4, "steps": 2},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 4},
        "evaluate": {"objective_examples": 0},
        "rounds": 1,
    }


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(OTHERWISE)))
def test_a_method_plays_on_images(method: str, world: dict[str, Any], tmp_path: Path) -> None:
    own = yaml.safe_load((CONFIGS / f"{method}.yaml").read_text(encoding="utf-8"))
    kept = {name: own[name] for name in ("method", "options", "clients", "lora", "federation") if name in own}
    ranks = kept.get("clients", {}).get("ranks", 2)
    few = [min(rank, 8) for rank in ranks] if isinstance(ranks, list) else min(ranks, 8)
    held = {**kept.get("clients", {}), "count": 4, "ranks": few}
    settings = {**world, **kept, "clients": held}
    if needed := METHODS[method].traits.server_data:
        settings["server_data"] = {needed: 8}
    result = run(parse(settings), tmp_path / "run")
    phases = algorithm(result.config.method, result.config.options).phases(1)
    assert result.summary["rounds"] == sum(phase.rounds for phase in phases)
    scores = result.summary["personal"]["clients"] or result.summary["global"]["pooled"]
    assert 0 <= scores.get("mean", scores.get("accuracy")) <= 1 and result.summary["failures"] == 0
