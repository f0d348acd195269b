"""Every configuration that comes with the project can be read, and those for single methods play."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.algorithms import METHODS
from coterie.experiments.config import load
from coterie.experiments.methods import algorithm
from coterie.experiments.runs import run

CONFIGS = Path(__file__).parents[2] / "configs"
ALL = sorted(CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("place", ALL, ids=[str(place.relative_to(CONFIGS)) for place in ALL])
def test_every_configuration_is_sound_for_its_own_method_and_all_others(place: Path) -> None:
    config = load(place)
    algorithm(config.method, config.options)
    if not config.options:
        for method in METHODS:
            other = load(place, [f"method={method}"])
            algorithm(other.method, other.options)


def test_there_is_a_small_configuration_for_every_method() -> None:
    assert {place.stem for place in (CONFIGS / "methods").glob("*.yaml")} == set(METHODS)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_small_configurations_play(
    method: str, toy_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(toy_assets))
    small = ["rounds=1", "task.train_limit=200", "task.test_limit=50", "train.steps=1", "execution.attention=eager"]
    result = run(load(CONFIGS / "methods" / f"{method}.yaml", [*small, "execution.dtype=float32"]), tmp_path / "r")
    phases = algorithm(result.config.method, result.config.options).phases(1)
    assert result.summary["rounds"] == sum(phase.rounds for phase in phases)
