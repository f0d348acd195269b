"""The scripts behind the table: what they count and compare, and that each runs in small."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from training import small as small_world
from training.small import texts

from coterie.data.text import TextSet
from coterie.maths.keys import root_key
from coterie.models.loading import Base, load_base
from coterie.protocol import Fit
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.executor import Executor

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Any:
    """What the script's main writes, called in this process."""
    out = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments), "--json", str(out)])
    assert not import_module(name).main()
    return json.loads(out.read_text())


def small(folder: Path, targets: tuple[str, ...]) -> Base:
    return load_base(folder, targets=targets, num_labels=3, head_key=root_key(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_useful_flops_are_those_of_the_products_that_a_step_executes(tiny_base: Path, dtype: str) -> None:
    peak: ModuleType = import_module("peak")
    base = small(tiny_base, peak.TARGETS)
    shape = peak.shape_of(base, 3, 8, 8)
    assert (shape.layers, shape.d, shape.classes) == (2, 32, 3)
    executor = Executor({"base": base}, TrainSettings(batch_size=8, steps=2), Plan(dtype))  # type: ignore[arg-type]
    with import_module("standin").counting() as counter:
        (done,) = executor.answer([peak.ask_of(base, shape, 2)])
    assert isinstance(done, Done)
    assert counter.get_total_flops() == 2 * peak.useful(shape)


def test_the_share_of_the_peak_is_told(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = import_module("peak")
    monkeypatch.setattr(peak, "GOOD", ((64, 64, 64),))
    options = ["--model", tiny_base, "--batch", 8, "--length", 8, "--steps", 1, "--repeats", 2, "--tries", 2]
    found = told("peak", tmp_path, monkeypatch, *options)
    assert found["share"] == pytest.approx(found["flops"] / found["step"] / found["peak"])
    assert 0 < found["share"] <= found["best_share"] and len(found["seconds"]) == 2
    assert len(found["tries"]) == 2


def test_of_several_tries_the_steadiest_counts_and_not_the_best() -> None:
    peak = import_module("peak")
    noisy, steady = {"share": 0.9, "seconds": [1.0, 2.0, 3.0]}, {"share": 0.5, "seconds": [2.0, 2.0, 2.1]}
    found = peak.steadiest([noisy, steady, noisy])
    assert found["share"] == 0.5 and [one["share"] for one in found["tries"]] == [0.9, 0.5, 0.9]


def test_the_parts_of_a_step_make_it_up(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = import_module("parts")
    monkeypatch.setattr(import_module("peak"), "GOOD", ((64, 64, 64),))
    found = told("parts", tmp_path, monkeypatch, "--model", tiny_base, "--batch", 8, "--length", 8)
    shares = found["shares"]
    assert set(shares) == {*parts.KINDS, parts.REST}
    assert min(shares.values()) > 0  # the rest too: kinds together take less than the whole step
    assert set(found["step"]) == {"fused", "plain", "ratio"} and min(found["step"].values()) > 0
    assert all(rate > 0 for ways in found["rates"].values() for rate in ways.values())


def test_what_padding_costs_is_told_of_the_same_work_on_both_sides(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    padding = import_module("padding")
    drawn = texts(64, "padding", 3, 31)
    data = TextSet(drawn.ids, drawn.offsets, drawn.labels % 2, drawn.rows, 2)
    monkeypatch.setattr(padding, "reviews", lambda *_: data)
    found = told("padding", tmp_path, monkeypatch, "--model", tiny_base, "--repeats", 1)
    rows = {(row["dtype"], row["buckets"]): row for row in found["rows"]}
    assert len(rows) == 4 and rows["float32", True]["tokens"] > rows["float32", False]["tokens"]
    assert rows["float32", False]["tokens"] == pytest.approx(int(data.lengths.sum()) / (64 * int(data.lengths.max())))
    for row in rows.values():
        times = row["seconds"]
        assert row["gains"]["step"] == pytest.approx(times["all"]["step"] / times["packed"]["step"])
    bases = padding.encoders(tiny_base, "float32")
    assert bases["packed"].packs and not bases["all"].packs
    answers = [
        Executor({"base": base}, padding.TRAIN, Plan()).answer(
            [Ask("c", Fit(padding.adapter(base)), "base", base.head, data, root_key(1))]
        )[0]
        for base in bases.values()
    ]
    assert small_world.farthest(*map(small_world.tensors, answers)) < 1e-4


def test_both_sides_of_the_centralised_row_take_the_same_steps(tiny_base: Path) -> None:
    centralised = import_module("centralised")
    base = small(tiny_base, ("query", "value"))
    seen: list[int] = []
    answer = Executor.answer

    def counting(self: Executor, asks: Any) -> Any:
        found = answer(self, asks)
        seen.extend(done.answer.steps_taken for done in found if hasattr(done.answer, "steps_taken"))
        return found

    played, plan = centralised.contenders(base, 3, 2, 4, 8, Plan(clients_per_step=3, padding_rank=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "answer", counting)
        played["federated"]()
        assert seen == [2, 2, 2] and plan.clients_per_step == 3
        seen.clear()
        played["central"]()
    assert seen == [6]


def test_the_centralised_row_runs(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--model", tiny_base, "--clients", 2, "--steps", 1, "--batch", 4, "--length", 8, "--repeats", 2]
    found = told("centralised", tmp_path, monkeypatch, *options)
    assert len(found["ratios"]) == 2 and min(found["ratios"]) > 0 and "Plan(" in found["plan"]


def test_unequal_ranks_train_in_one_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = told("ranks", tmp_path, monkeypatch, "--only", "small", "--repeats", 1)
    assert found["ranks"] == [2, 4, 6, 8, 10, 12, 14, 16] and found["rows"]["small"]["ratio"] > 0


def test_the_servers_share_of_a_round_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server_round = import_module("server_round")
    monkeypatch.setattr(server_round, "dense_flexlora", lambda layers: 10.0)
    found = told("server_round", tmp_path, monkeypatch, "--layers", 2, "--size", 64, "--clients", 3, "--repeats", 1)
    assert set(found["rows"]) == set(server_round.METHODS)
    for row in found["rows"].values():
        assert row["times"] == pytest.approx(10.0 / row["seconds"])
        assert row["share"] == pytest.approx(row["seconds"] / (row["seconds"] + found["training"]))
    assert found["training"] == pytest.approx(3 * 8 * found["step"]) and found["above"] > -1e-9


def test_imports_are_timed_in_fresh_processes_beside_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imports = import_module("imports")
    assert imports.STATEMENTS["torch"] == "import torch"
    assert compile(imports.STATEMENTS["all public names"], "statement", "exec")
    monkeypatch.setattr(imports, "STATEMENTS", {"torch": "pass", "slow": "time.sleep(0.3)"})
    rows = told("imports", tmp_path, monkeypatch, "--repeats", 2)["rows"]
    assert rows["torch"]["more"] == 0 and 0.25 < rows["slow"]["more"] < 2 and rows["slow"]["more_cpu"] < 0.2
    assert len(rows["slow"]["all"]) == 2


def test_a_paired_difference_is_over_rows_of_all_seeds() -> None:
    paired = import_module("fast_plan").paired
    fast = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1]]).bool()
    other = torch.tensor([[1, 0, 0, 1], [1, 0, 1, 1]]).bool()
    found = paired(fast, other)
    assert found["difference"] == 0 and found["by_seed"] == [0.25, -0.25]
    assert found["of_rows"] == pytest.approx(torch.tensor([0, 0.5, -0.5, 0]).std().item() / 2)
    assert found["of_seeds"] == pytest.approx(0.25)
    assert found["error"] ** 2 == pytest.approx(found["of_rows"] ** 2 + 0.25**2)
    better, same = torch.ones(3, 100).bool(), torch.zeros(3, 100).bool()
    assert paired(better, same)["reached"] and not paired(same, better)["reached"]
    rare = same.clone()
    rare[:, 0] = True  # one row of a hundred: within two errors, and one point
    assert paired(same, rare)["reached"]
    rare[:, 1] = True
    assert not paired(same, rare)["reached"]  # two points


def test_both_plans_answer_the_same_rows(
    tiny_base: Path, reviews_csv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_plan = import_module("fast_plan")
    monkeypatch.setitem(fast_plan.PLANS["fast"], "dtype", "bfloat16")
    options = ["--tasks", "file", "--path", reviews_csv, "--model", tiny_base, "--rounds", 1, "--steps", 1]
    found = told("fast_plan", tmp_path, monkeypatch, *options, "--seeds", 0)
    assert {run["plan"]: run["way"].split(",")[0] for run in found["runs"]} == {
        "fast": "bfloat16",
        "fp32, buckets": "float32",
        "fp32": "float32",
    }
    assert {run["rows"] for run in found["runs"]} == {found["rows"]} and not found["enough"]
    assert set(found["pairs"]) == {"fp32", "fp32, buckets"}


def test_the_accelerator_command_runs_on_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = import_module("gpu")
    monkeypatch.setattr(gpu, "GOOD", ((64, 64, 64),))
    found = told("gpu", tmp_path, monkeypatch, "--device", "cpu", "--quick")
    for row in found["rows"].values():
        assert set(row["ways"]) == {f"{dtype}, {attention}" for dtype, attention in gpu.WAYS}
        assert set(row["stacks"]) == {"1", "2"} and row["compile"] is None and row["left_out"] == []
        assert all(one["tokens"] > 0 and one["peak_mib"] > 0 and one["share"] > 0 for one in row["stacks"].values())


def test_the_accelerator_command_begins_nothing_after_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = import_module("gpu")
    monkeypatch.setattr(gpu, "GOOD", ((64, 64, 64),))
    monkeypatch.setattr(gpu, "WAYS", gpu.WAYS[:1])
    monkeypatch.setattr(gpu, "SMALL", {"encoder": gpu.SMALL["encoder"]})
    found = told("gpu", tmp_path, monkeypatch, "--device", "cpu", "--quick", "--limit", 0)
    assert found["rows"]["encoder"]["left_out"] == ["1 clients", "2 clients"]


def test_without_a_gpu_the_accelerator_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert import_module("gpu").main() == 2
    assert "--device cpu --quick" in capsys.readouterr().err
