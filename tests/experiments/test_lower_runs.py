"""Runs whose adapters leave blocks below them alone: stored activations are part of the plan, and found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie.errors import ConfigError
from coterie.experiments.build import build
from coterie.experiments.config import parse
from coterie.experiments.runs import resume, run

UPPER = ["1.attention.self.query", "1.attention.self.value"]


@pytest.fixture
def raw(tiny_base: Path, reviews_csv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    return {
        "method": "fedit",
        "rounds": 3,
        "task": {"name": "file", "path": str(reviews_csv)},
        "model": {"base": str(tiny_base), "targets": UPPER},
        "clients": {"count": 3, "ranks": 4},
        "partition": {"minimum": 10},
        "train": {"batch_size": 8, "epochs": 2, "optimizer": "sgd", "lr": 0.05},
        "evaluate": {"objective_examples": 4, "pooled_limit": 20, "clients_every": 2},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 2},
    }


def changed(raw: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {**raw, **{name: {**raw.get(name, {}), **own} for name, own in sections.items()}}


def room(raw: dict[str, Any]) -> tuple[int, int]:
    plan = build(parse(raw)).plan
    return plan.lower_memory, plan.lower_disk


def results(folder: Path) -> dict[str, bytes]:
    adapters = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("adapter_model.safetensors")}
    assert adapters
    return adapters | {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "ledger.jsonl")}


def test_auto_stores_where_examples_come_again_below_an_adapter(raw: dict[str, Any]) -> None:
    assert room(raw) == (512, 4096)
    assert room(changed(raw, execution={"lower_memory": 3, "lower_disk": 0})) == (3, 0)
    assert room(changed(raw, execution={"lower": "off"})) == (0, 0)
    assert room(changed(raw, model={"targets": ["query"]})) == (0, 0)
    rarely = changed(raw, train={"epochs": None, "steps": 1, "batch_size": 2})
    assert room(rarely) == (0, 0)
    assert room(changed(rarely, execution={"lower": "stored"})) == (512, 4096)
    assert room(changed(raw, federation={"sample": 1})) == (512, 4096)
    assert room(changed(raw, federation={"sample": 1}, train={"epochs": 1})) == (0, 0)  # each is seen once
    with pytest.raises(ConfigError, match="lower=stored needs room"):
        parse(changed(raw, execution={"lower": "stored", "lower_memory": 0, "lower_disk": 0}))


def test_runs_agree_with_and_without(raw: dict[str, Any], tmp_path: Path) -> None:
    stored = run(raw, tmp_path / "stored").metrics
    plain = run(changed(raw, execution={"lower": "off"}), tmp_path / "plain").metrics
    for one, other in zip(stored, plain, strict=True):
        assert one["train"]["loss"] == pytest.approx(other["train"]["loss"], abs=1e-5)
        assert one["global"]["pooled"]["loss"] == pytest.approx(other["global"]["pooled"]["loss"], abs=1e-5)


@pytest.mark.usefixtures("forked_workers")
def test_a_run_is_the_same_to_the_bit_whatever_was_stored_and_by_however_many_workers(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    run(raw, tmp_path / "first")
    assert list((tmp_path / "cache/lower").glob("*/*.safetensors"))
    run(changed(raw, model={"targets": UPPER[:1]}), tmp_path / "another method's")
    run(raw, tmp_path / "again")
    run(changed(raw, execution={"workers": 2, "clients_per_step": 1}), tmp_path / "workers")
    run(changed(raw, execution={"lower_disk": 0, "clients_per_step": 1}), tmp_path / "memory")
    expected = results(tmp_path / "first")
    assert results(tmp_path / "again") == expected
    assert results(tmp_path / "workers") == results(tmp_path / "memory")


class _Killed(Exception):
    pass


def test_a_run_that_was_broken_off_resumes_on_its_plan_to_the_same_bits(raw: dict[str, Any], tmp_path: Path) -> None:
    class Breaking:
        def begin(self, about: Any) -> None: ...

        def note(self, text: str) -> None: ...

        def end(self) -> None: ...

        def round(self, metrics: Any, seconds: Any) -> None:
            if metrics["round"] == 2:
                raise _Killed

    run(raw, tmp_path / "whole")
    with pytest.raises(_Killed):
        run(raw, tmp_path / "broken", Breaking())
    place = tmp_path / "broken/config.yaml"
    recorded = yaml.safe_load(place.read_text(encoding="utf-8"))
    assert recorded["recorded"]["plan"]["lower_disk"] == 4096
    for shard in (tmp_path / "cache/lower").glob("*/*.safetensors"):
        shard.unlink()
    resume(tmp_path / "broken")
    assert results(tmp_path / "broken") == results(tmp_path / "whole")
    assert json.loads((tmp_path / "broken/summary.json").read_text())["rounds"] == 3
