"""Runs of the methods for clients whose models differ, from a configuration to what stands in the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy

from coterie.errors import ConfigError
from coterie.experiments.runs import run


@pytest.fixture
def raw(tiny_base: Path, reviews_csv: Path) -> dict[str, Any]:
    return {
        "rounds": 2,
        "task": {"name": "file", "path": str(reviews_csv), "test_limit": 20},
        "model": {"base": str(tiny_base), "targets": ["query", "value"]},
        "clients": {"count": 3, "ranks": [2, 4]},
        "partition": {"minimum": 10},
        "train": {"batch_size": 4, "steps": 2, "lr": 1e-2},
        "evaluate": {"objective_examples": 0, "clients_every": 2},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 1},
    }


@pytest.fixture(scope="module")
def other_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model: wider, and of five blocks."""
    return toy.write_base(tmp_path_factory.mktemp("base") / "other", hidden=48, layers=5, heads=3, seed=1)


def test_fedproto_among_two_models_of_unequal_width(raw: dict[str, Any], other_base: Path, tmp_path: Path) -> None:
    raw["clients"]["bases"] = [raw["model"]["base"], str(other_base), raw["model"]["base"]]
    result = run(raw | {"method": "fedproto"}, tmp_path / "run")
    assert result.summary["failures"] == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert set(last["personal"]["further"]["nearest prototype"]["clients"]["accuracy"]) == {"00", "01", "02"}


def test_fedmkt_books_what_clients_give_as_data(raw: dict[str, Any], other_base: Path, tmp_path: Path) -> None:
    raw["clients"]["bases"] = [raw["model"]["base"], str(other_base), raw["model"]["base"]]
    with pytest.raises(ConfigError, match=r"server_data\.pool=0\.2"):
        run(raw | {"method": "fedmkt"}, tmp_path / "without")
    result = run(raw | {"method": "fedmkt", "server_data": {"pool": 0.2}}, tmp_path / "run")
    assert result.summary["failures"] == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    given = {(row["client"], row["direction"]): row["payload"] for row in rows if row["kind"] == "data"}
    up = {name: given[name, "up"] for name in ("00", "01", "02")}
    assert min(up.values()) > 0 and all(given[name, "down"] == sum(up.values()) - up[name] for name in up)
    held = json.loads((tmp_path / "run" / "partition.json").read_text())["clients"]
    assert all('"pool"' in json.dumps(client) for client in held)


def test_a_pool_is_set_aside_whatever_the_method_and_shared_by_those_that_share(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    run(raw | {"method": "fedit", "rounds": 1, "server_data": {"pool": 0.2}}, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert rows and not any(row["kind"] == "data" for row in rows)


@pytest.mark.parametrize("adapter", ["lora", "bottleneck"])
def test_fedbiot_makes_the_clients_model_itself(
    raw: dict[str, Any], tiny_base: Path, other_base: Path, adapter: str, tmp_path: Path
) -> None:
    raw["model"]["base"] = str(other_base)
    options = {"outer": 1, "align": 2, "adapter": adapter, "bottleneck": 4}
    config = raw | {"method": "fedbiot", "options": options, "server_data": {"public": 20}}
    result = run(config, tmp_path / "run")
    assert result.summary["failures"] == 0 and result.summary["global"]["pooled"]["examples"] == 20
    assert (tmp_path / "run" / "adapters" / "global").is_dir() == (adapter == "lora")
    assert not list((tmp_path / "run" / "adapters").glob("client-*")) and result.summary["mismatch"] is None
    config["clients"]["bases"] = [str(tiny_base)]
    with pytest.raises(ConfigError, match=r"fedbiot makes the clients' base model itself"):
        run(config, tmp_path / "refused")
