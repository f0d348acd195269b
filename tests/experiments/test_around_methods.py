"""What a configuration puts around a method: a server optimiser, a proximal term; where they fit, what they change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from coterie.algorithms import FedIT, FlexLoRA
from coterie.algorithms.proximal import Proximal
from coterie.algorithms.server_optimised import ServerOptimised
from coterie.errors import ConfigError
from coterie.experiments.config import ServerOptimizerSection, parse
from coterie.experiments.methods import configured
from coterie.experiments.runs import resume, run
from coterie.maths.server_optim import ServerOptimizer

ADAM = {"name": "adam", "lr": 0.02}


@pytest.fixture
def raw(tiny_base: Path, reviews_csv: Path) -> dict[str, Any]:
    return {
        "method": "fedit",
        "rounds": 3,
        "task": {"name": "file", "path": str(reviews_csv)},
        "model": {"base": str(tiny_base), "targets": ["query", "value"]},
        "clients": {"count": 4, "ranks": 4},
        "partition": {"minimum": 10},
        "train": {"batch_size": 4, "steps": 3, "lr": 1e-2},
        "evaluate": {"objective_examples": 4, "pooled_limit": 20},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 2},
    }


def around(**federation: Any) -> Any:
    return configured(parse({"method": "fedit", "task": {"name": "movie"}, "federation": federation}))


def test_nothing_stands_around_a_method_unless_asked_for() -> None:
    assert around() == FedIT()
    assert around(proximal=0, server_optimizer=None) == FedIT()


def test_what_is_asked_for_stands_around_it() -> None:
    assert around(proximal=0.5) == Proximal(FedIT(), 0.5)
    assert around(server_optimizer=ADAM) == ServerOptimised(FedIT(), ServerOptimizer("adam", 0.02))
    both = around(proximal=0.5, server_optimizer={"name": "sgd", "lr": 1, "momentum": 0.5})
    assert both == ServerOptimised(Proximal(FedIT(), 0.5), ServerOptimizer("sgd", 1.0, 0.5))


def test_the_section_has_the_fields_and_defaults_of_what_it_becomes() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(ServerOptimizer)}
    assert set(ServerOptimizerSection.model_fields) == set(fields)
    for name, field in ServerOptimizerSection.model_fields.items():
        assert field.is_required() == (fields[name] is dataclasses.MISSING)
        assert field.is_required() or field.default == fields[name]


@pytest.mark.parametrize("setting", [{"proximal": 0.1}, {"server_optimizer": ADAM}])
def test_a_method_that_does_not_average_is_refused_with_the_settings_name(setting: dict[str, Any]) -> None:
    config = parse({"method": "flexlora", "task": {"name": "movie"}, "federation": setting})
    with pytest.raises(ConfigError) as caught:
        configured(config)
    told = str(caught.value)
    assert told.startswith(f"federation.{next(iter(setting))}: {FlexLoRA.traits.title} does not average factors;")
    assert "leave this setting out" in told and "\n" not in told


@pytest.mark.parametrize(
    ("federation", "told"),
    [
        ({"server_optimizer": {"name": "adm", "lr": 1}}, "did you mean 'adam'?"),
        ({"server_optimizer": {"name": "adam"}}, "federation.server_optimizer.lr is missing"),
        ({"server_optimizer": {"name": "adam", "lr": 0}}, "lr: must be greater than 0"),
        (
            {"server_optimizer": {"name": "adam", "lr": 1, "beta1": 0.9}},
            "no setting 'federation.server_optimizer.beta1'",
        ),
        ({"proximal": -1}, "federation.proximal: must be greater than or equal to 0"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(federation: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        around(**federation)
    assert told in str(caught.value)


def test_a_run_with_both_plays_says_so_and_is_resumed_with_the_same_bytes(raw: dict[str, Any], tmp_path: Path) -> None:
    with_both = raw | {"federation": {"proximal": 0.1, "server_optimizer": ADAM}}
    whole = run(with_both, tmp_path / "whole")
    assert whole.summary["title"] == "FedIT + FedProx + FedAdam"
    plain = run(raw, tmp_path / "plain")
    assert whole.metrics[0]["train"] != plain.metrics[0]["train"]
    before = (whole.folder / "metrics.jsonl").read_bytes()
    adapter = (whole.folder / "adapters" / "global" / "adapter_model.safetensors").read_bytes()
    again = resume(whole.folder, round=2)
    assert (again.folder / "metrics.jsonl").read_bytes() == before
    assert (again.folder / "adapters" / "global" / "adapter_model.safetensors").read_bytes() == adapter
    assert json.loads((again.folder / "summary.json").read_text(encoding="utf-8"))["title"] == whole.summary["title"]
