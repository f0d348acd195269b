"""Mixtures told by contributions, against those that clients hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from experiments.reproducing import computed

import coterie
from coterie.errors import ConfigError
from coterie.experiments.folders import read_lines
from coterie.experiments.observers import Silent
from coterie.experiments.papers.estimates import estimated, mean_absolute_error, missed, pairs, requested, slope
from coterie.experiments.papers.estimates_picture import draw
from coterie.experiments.papers.reading import FIGURES, finished_runs

TRUTH = {"a": {"x": 1.0}, "b": {"x": 0.25, "y": 0.75}}
"""As a partition.json has it: without the tasks of which a client has nothing."""
WHOLE = {"a": {"x": 1.0, "y": 0.0}, "b": {"x": 0.25, "y": 0.75}}


def _rows(*told: dict[str, dict[str, float]], phase: str = "main") -> list[dict[str, object]]:
    return [{"phase": phase, "measures": {"contributions": one}} for one in told]


def test_estimates_are_means_over_the_main_rounds_that_tell_of_the_client() -> None:
    first, second = {"a": {"x": 0.5, "y": 0.5}}, {"a": {"x": 1.0, "y": 0.0}, "b": {"x": 0.0, "y": 1.0}}
    silent = [{"phase": "main", "measures": {}}, {"phase": "main"}, *_rows({"a": {"x": 0.0, "y": 1.0}}, phase="init")]
    assert estimated([*silent, *_rows(first, second)]) == {"a": {"x": 0.75, "y": 0.25}, "b": {"x": 0.0, "y": 1.0}}
    assert estimated([]) == {}


def test_true_estimates_have_no_error_and_slope_one() -> None:
    found = pairs(estimated(_rows(WHOLE)), TRUTH)
    assert sorted(found) == [(0.0, 0.0), (0.25, 0.25), (0.75, 0.75), (1.0, 1.0)]
    assert mean_absolute_error(found) == 0.0
    assert slope(found) == pytest.approx(1.0)
    assert missed(WHOLE, TRUTH) == 0.0


def test_pure_clients_have_a_slope_too() -> None:
    found = pairs({"a": {"x": 0.75, "y": 0.25}, "b": {"x": 0.25, "y": 0.75}}, {"a": {"x": 1.0}, "b": {"y": 1.0}})
    assert slope(found) == pytest.approx(0.5)


def test_estimates_halfway_to_uniform_have_half_the_slope() -> None:
    half = {client: {task: 0.5 * share + 0.25 for task, share in own.items()} for client, own in WHOLE.items()}
    found = pairs(half, TRUTH)
    assert slope(found) == pytest.approx(0.5)
    assert mean_absolute_error(found) == pytest.approx((0.25 + 0.25 + 0.125 + 0.125) / 4)


def test_a_mistaken_largest_task_is_counted() -> None:
    assert missed({"a": {"x": 0.4, "y": 0.6}, "b": {"x": 0.4, "y": 0.6}}, TRUTH) == 0.5


def test_what_is_not_known_is_none() -> None:
    assert (mean_absolute_error([]), slope([]), missed({}, TRUTH)) == (None, None, None)
    assert slope([(0.5, 0.1), (0.5, 0.9)]) is None
    assert pairs({"c": {"x": 1.0}}, TRUTH) == []


def test_mixtures_are_those_that_the_partitioner_wanted() -> None:
    one = {"id": "a", "mixture": {"requested": {"x": 1.0}, "realised": {"x": 0.9, "y": 0.1}}}
    assert requested({"clients": [one, {"id": "b"}]}) == {"a": {"x": 1.0}}


def toy_of_fedsee(tiny_base: Path, reviews_csv: Path, **clients: Any) -> dict[str, Any]:
    """Two pure clients of two tasks."""
    part = {"task": "file", "path": str(reviews_csv), "test_fraction": 0.3}
    return {
        "method": "fedsee",
        "rounds": 2,
        "task": {"name": "mixture", "parts": [{"name": "one", **part}, {"name": "two", **part}]},
        "model": {"base": str(tiny_base), "targets": ["query", "value"]},
        "clients": {"count": 2, "ranks": 2, **clients},
        "partition": {"kind": "mixture", "alpha": 0, "minimum": 1, "test_size": 4},
        "server_data": {"public": 8},
        "train": {"steps": 2, "batch_size": 4},
        "options": {"steps": 5, "examples": 4},
    }


def test_a_run_of_fedsee_has_all_three_figures(tmp_path: Path, tiny_base: Path, reviews_csv: Path) -> None:
    content = toy_of_fedsee(tiny_base, reviews_csv)
    coterie.run(content, tmp_path / "runs" / "fedsee-seed0", Silent())
    (run,) = finished_runs(tmp_path / "runs", "fedsee", [0])
    assert len(pairs(estimated(run.metrics), run.mixtures)) == 4
    found = [FIGURES[name].pick(run, "") for name in ("mixture_error", "mixture_slope", "mixture_missed")]
    assert all(value is not None for value in found)
    error, steep, _ = found
    assert error == pytest.approx((1 - steep) / 2)  # of two pure clients whose columns balance, one number says it all


def test_clients_of_unequal_capacity_are_sent_and_send_back_as_many_experts_as_they_can(
    tmp_path: Path, tiny_base: Path, reviews_csv: Path
) -> None:
    capable = toy_of_fedsee(tiny_base, reviews_csv, routed_experts=[1, 2], trained_experts=[1, 2])
    whole = {**capable, "options": {**capable["options"], "tau": 0.0}}
    folder = coterie.run(whole, tmp_path / "run", Silent()).folder
    rows = [row for row in read_lines(folder / "ledger.jsonl") if (row["round"], row["kind"]) == (3, "message")]
    size = {(row["client"], row["direction"]): row["payload"] for row in rows}
    small, large = sorted({client for client, _ in size})
    block = size[large, "down"] - size[small, "down"]
    assert block > 0 and size[large, "up"] - size[small, "up"] == block  # one expert more, either way
    with pytest.raises(ConfigError, match="would train 2 of the 1 experts that it routes to, of 2 in all; set options"):
        coterie.run(
            toy_of_fedsee(tiny_base, reviews_csv, routed_experts=1, trained_experts=2), tmp_path / "no", Silent()
        )


def test_the_picture_has_a_panel_for_each_regime_with_every_pair_and_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    half = {client: {task: 0.5 * share + 0.25 for task, share in own.items()} for client, own in WHOLE.items()}
    flat = {client: {"x": 0.5, "y": 0.5} for client in TRUTH}
    told = {"α = 0": pairs(half, TRUTH), "α = 50": pairs(WHOLE, flat)}
    svg, png = draw(told, tmp_path / "figure")
    text = svg.read_text(encoding="utf-8")
    assert "slope 0.50, MAE 0.188" in text and "slope –, MAE 0.375" in text  # equal shares have no line
    assert text.count("α = ") == 2 and png.stat().st_size > 1000
    dots = re.findall(r'<g id="PathCollection_\d+">(.*?)</g>\s*</g>', text, re.DOTALL)
    assert [panel.count("<use ") for panel in dots] == [4, 4]
    assert draw(told, tmp_path / "again")[0].read_bytes() == svg.read_bytes()


def test_table_2_is_written_with_its_picture(
    tmp_path: Path, tiny_base: Path, reviews_csv: Path, in_this_process: list[str]
) -> None:
    pytest.importorskip("matplotlib")
    toy = toy_of_fedsee(tiny_base, reviews_csv)
    settings = [f"{name}={json.dumps(toy[name])}" for name in ("rounds", "task", "model", "clients", "server_data")]
    settings += ["partition={minimum: 1, test_size: 4}", "train={steps: 1, batch_size: 4}", "options.training=1"]
    settings += ["execution={dtype: float32, clients_per_step: 2}"]
    done = computed("fedsee/table2", tmp_path, settings, seeds=[0], methods=["fedsee"])
    assert done.failed == {} and done.result["picture"] == "figure.svg"
    text = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    for column, title in done.result["columns"].items():
        here = done.result["rows"]["fedsee"]["here"][column]
        steep, error = (here[f"mixture_{name}"]["mean"] for name in ("slope", "error"))
        assert title in text and f"slope {steep:z.2f}, MAE {error:.3f}" in text  # of one seed, the table's own
    assert "![" in (tmp_path / "result.md").read_text(encoding="utf-8") and str(tmp_path) not in text
