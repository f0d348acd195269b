"""FedSLM's tables on a toy decoder: every model of one run is a row, and losses of groups are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from experiments.decoders import write_decoder
from experiments.reproducing import computed
from reference.tokenisers import WORDS

from coterie.errors import ConfigError
from coterie.experiments.config import load, parse
from coterie.experiments.papers.definition import definition
from coterie.experiments.papers.reading import BENCHMARKS, FIGURES, Finished, curve, of_model

MODELS = {
    "untrained-full": "untrained/base",
    "stage-04": "personal/bases/ratio-0.4",
    "teacher": "global/further/weak",
    "student-0": "global/further/entropy-0",
    "student": "global",
}

AMONG_FULL = ("fedit", "ffa-lora", "hetlora", "flexlora", "fed-rac-lora")
AMONG_MIXED = ("fedmkt", "fedproto", "fedproto-full", "fedbiot")


def write(place: Path, name: str, count: int) -> Path:
    """Questions of words that the toy's tokeniser has, so that unequal models score them unequally, as JSON lines."""
    rows = [
        {
            "question": f"{name} {i} the film {'very ' * (i % 5)}{('bad', 'good')[i % 2]}",
            "choices": [WORDS[(i + step) % len(WORDS)] for step in (0, 3 + i // len(WORDS), 8)],
            "answer": i % 3,
        }
        for i in range(count)
    ]
    path = place / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def toy(tmp_path: Path) -> list[str]:
    """Settings in place of every run's: a random decoder of width 32, two benchmarks of questions, a text."""
    base = write_decoder(tmp_path / "llama", "llama", layers=4)
    text = tmp_path / "calibration.txt"
    text.write_text("\n\n".join(" ".join(WORDS) for _ in range(20)), encoding="utf-8")
    parts = [
        f"{{name: {name}, task: choices-file, path: {write(tmp_path, name, count)}}}"
        for name, count in (("arc-easy", 60), ("openbookqa", 50))
    ]
    return [
        f"task.parts=[{', '.join(parts)}]",
        f"model.base={base}",
        f"compression={{method: svd, text: {text}, samples: 4, length: 16}}",
        "per_method.fedbiot.options.outer=1",
        "rounds=2",
        "train.steps=2",
        "server_data={unlabeled: 8, public: 4, pool: 0.3}",
        "partition.minimum=2",
        "execution={dtype: float32, attention: eager}",
    ]


def test_every_model_of_a_run_is_a_row_of_its_own(tmp_path: Path, toy: list[str], in_this_process: list[str]) -> None:
    pytest.importorskip("matplotlib")
    done = computed("fedslm/table2", tmp_path / "out", toy, seeds=[0])
    assert len(in_this_process) == 9 and not done.failed
    rows = done.result["rows"]
    summary = json.loads((tmp_path / "out/runs/skewed_mixed/fedslm-seed0/summary.json").read_text(encoding="utf-8"))
    losses = set()
    for row, model in MODELS.items():
        found: Any = summary
        for key in model.split("/"):
            found = found[key]
        here = rows[row]["here"]["skewed"]
        accuracies = [found["more"][name]["accuracy"] for name in ("arc-easy", "openbookqa")]
        assert [here[name]["mean"] for name in ("arc-easy", "openbookqa")] == accuracies
        assert here["benchmarks"]["mean"] == pytest.approx(sum(accuracies) / 2)
        losses.add(found["pooled"]["loss"])
    assert len(losses) == len(MODELS)  # so that one model read in the place of another would be seen
    assert len({rows[row]["here"]["skewed"]["benchmarks"]["mean"] for row in MODELS}) > 1
    assert all(rows[row]["here"]["skewed"]["benchmarks"]["mean"] is not None for row in (*AMONG_FULL, *AMONG_MIXED))
    # The pooled test is that of both benchmarks together, and scored as such without a pass of its own.
    for found in (summary["global"], summary["untrained"]["base"], summary["personal"]["bases"]["ratio-0.6"]):
        pooled, more = found["pooled"], found["more"].values()
        assert pooled["examples"] == sum(one["examples"] for one in more) == 22
        right = sum(one["examples"] * one["accuracy"] for one in more)
        assert pooled["accuracy"] == pytest.approx(right / 22) and pooled["score"] == pooled["accuracy"]
    drawn = {row for row, entry in rows.items() if "series" in entry}
    assert drawn == {"stage-04", "stage-06", "stage-full", *AMONG_FULL, *AMONG_MIXED}
    assert rows["stage-04"]["series"]["skewed"]["train_loss"]["rounds"] == [1, 2]
    assert (tmp_path / "out/figure.svg").is_file() and done.result["picture"] == "figure.svg"
    told = {line["aspect"]: line["here"] for line in done.result["setting"]}
    assert told["models of clients"].startswith("0.4 × 3, 0.6 × 4, full × 3") and "svd" in told["compression"]
    assert "8 unlabelled examples, 3 epochs, LoRA of rank 16" in told["teaching at the server"]
    text = (tmp_path / "out/result.md").read_text(encoding="utf-8")
    assert "| student, α = 0.5 (Appendix B) |" in text and "| FedAvg + LoRA |" in text


def test_table5_scores_the_fused_model_of_four_placements(
    tmp_path: Path, toy: list[str], in_this_process: list[str]
) -> None:
    done = computed("fedslm/table5", tmp_path / "out", toy)
    assert len(in_this_process) == 4 and done.result["seeds"] == [0]
    attention, mlp = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
    trained = {"qv": ["q_proj", "v_proj"], "attention": attention, "mlp": mlp, "all": attention + mlp}
    losses = set()
    for row, layers in trained.items():
        folder = tmp_path / f"out/runs/skewed_{row}/fedslm-seed0"
        config = load(folder / "config.yaml")
        assert (config.options["trained"], config.options["epochs"]) == (layers, 1)
        weak = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["global"]["further"]["weak"]
        accuracies = [weak["more"][name]["accuracy"] for name in ("arc-easy", "openbookqa")]
        here = done.result["rows"][row]["here"]["skewed"]
        assert [here[name]["mean"] for name in ("arc-easy", "openbookqa")] == accuracies
        assert here["benchmarks"]["mean"] == pytest.approx(sum(accuracies) / 2)
        losses.add(weak["pooled"]["loss"])
    assert len(losses) == len(trained)  # four placements make four models


def test_rows_of_one_method_s_models_cannot_be_replaced_by_methods(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not single methods"):
        computed("fedslm/table2", tmp_path, [], methods=["fedit"])


def test_a_model_of_a_run_stands_in_the_place_of_the_deployed_one() -> None:
    more = {"arc-easy": {"accuracy": 0.25}, "exam": {"accuracy": 1.0}}
    losses = {"base": 2.0, "ratio-0.4": 3.0}
    whole = Finished(
        parse({"method": "fedit", "task": {"name": "mixture", "parts": ["arc-easy"]}}),
        {"global": {"more": {"arc-easy": {"accuracy": 0.5}}}, "personal": {"bases": {"ratio-0.4": {"more": more}}}},
        [{"round": 1, "train": {"loss": 2.5, "bases": losses}}, {"round": 2, "train": {"loss": 1.0}}],
        {},
    )
    part = of_model(whole, "personal/bases/ratio-0.4")
    assert of_model(whole, "") is whole
    assert [FIGURES["benchmarks"].pick(run, "") for run in (whole, part)] == [0.5, 0.25]
    assert FIGURES["arc-easy"].pick(part, "") == 0.25 and FIGURES["own"].pick(part, "") is None
    assert curve(whole, "train_loss", "") == {1: 2.5, 2: 1.0} and curve(part, "train_loss", "") == {1: 3.0}
    assert curve(of_model(whole, "untrained/base"), "train_loss", "") == {}
    assert curve(of_model(whole, "personal"), "train_loss", "") == curve(whole, "train_loss", "") != {}
    nowhere = of_model(whole, "global/further/weak")
    assert FIGURES["benchmarks"].pick(nowhere, "") is None and curve(nowhere, "train_loss", "") == {}


def test_every_benchmark_of_the_definitions_has_a_figure() -> None:
    for name in ("fedslm/table2", "fedslm/table5"):
        whole = definition(name)
        parts = whole.scales["small"].config["task"]["parts"]
        assert {part["name"] for part in parts} <= set(BENCHMARKS) & set(whole.figures)
