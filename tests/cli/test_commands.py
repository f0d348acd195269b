"""The commands do what their help says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from coterie.adapters.peft_folder import load_peft


def test_help_teaches_and_needs_no_torch() -> None:
    script = (
        "import sys; from coterie.cli.main import main\n"
        "try: main(['--help'])\n"
        "finally: sys.stderr.write(str('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "False"
    for command in ("run", "resume", "partition", "compare", "export", "list", "assets"):
        assert command in done.stdout
    assert "coterie run configs/demo.yaml" in done.stdout


def test_run_writes_what_it_says_and_shows_it(coterie: Callable[..., Any], small: Path, tmp_path: Path) -> None:
    told = coterie("run", small, "rounds=2", "train.lr=2e-2")
    folder = tmp_path / "runs" / "small-fedit-seed0"
    assert told.code == 0
    assert [line.split("  ")[0] for line in told.err.splitlines()[1:]] == ["round 1/2", "round 2/2"]
    assert "pooled" in told.err and "left" in told.err
    assert "global model, pooled test" in told.out and "runs/small-fedit-seed0" in told.out
    names = {"config.yaml", "partition.json", "metrics.jsonl", "timing.jsonl", "ledger.jsonl", "summary.json"}
    assert names <= {path.name for path in folder.iterdir()}
    adapters = {path.name for path in (folder / "adapters").iterdir()}
    assert adapters == {"global", "client-00", "client-01", "client-02", "client-03"}
    recorded = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert recorded["train"]["lr"] == 0.02
    assert recorded["recorded"]["plan"]["clients_per_step"] == 2
    assert {"python", "torch", "transformers", "coterie"} <= set(recorded["recorded"]["versions"])


def test_a_runs_own_config_plays_the_same_run_again(
    coterie: Callable[..., Any], finished: Path, tmp_path: Path
) -> None:
    assert coterie("run", finished / "config.yaml", "--folder", "again").code == 0
    for name in ("metrics.jsonl", "ledger.jsonl", "partition.json"):
        assert (tmp_path / "again" / name).read_bytes() == (finished / name).read_bytes()


def test_resuming_a_finished_run_says_so(coterie: Callable[..., Any], finished: Path) -> None:
    told = coterie("resume", finished)
    assert told.code == 0 and "nothing was left to do" in told.out


def test_an_older_checkpoint_can_be_gone_back_to(coterie: Callable[..., Any], small: Path, tmp_path: Path) -> None:
    coterie("run", small, "--folder", "r")
    before = (tmp_path / "r/metrics.jsonl").read_bytes()
    told = coterie("resume", "r", "--round", 2)
    assert told.code == 0 and "rounds 3 to 3" in told.err
    assert (tmp_path / "r/metrics.jsonl").read_bytes() == before


def test_exported_adapters_are_those_of_the_run(coterie: Callable[..., Any], finished: Path, tmp_path: Path) -> None:
    for arguments, source in (((), "global"), (("--global",), "global"), (("--client", "02"), "client-02")):
        target = tmp_path / source / str(len(arguments))
        assert coterie("export", finished, target, *arguments).code == 0
        copy, original = load_peft(target), load_peft(finished / "adapters" / source)
        assert copy.config == original.config and copy.labels == ("bad", "good")
        for layer, term in original.adapter.items():
            assert torch.equal(copy.adapter[layer].B, term.B) and copy.adapter[layer].scale == term.scale


def test_a_merged_model_gives_the_logits_of_base_and_adapter(
    coterie: Callable[..., Any], finished: Path, tiny_base: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert coterie("export", finished, tmp_path / "m", "--merged", "--client", "01").code == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "m").eval()
    inputs = AutoTokenizer.from_pretrained(tmp_path / "m")(["a fine film", "dull and weak"], return_tensors="pt")
    base = AutoModelForSequenceClassification.from_pretrained(tiny_base, num_labels=2)
    adapted = PeftModel.from_pretrained(base, finished / "adapters" / "client-01").eval()
    with torch.no_grad():
        assert torch.allclose(merged(**inputs).logits, adapted(**inputs).logits, atol=1e-5)
    assert merged.config.id2label == {0: "bad", 1: "good"}


def test_list_shows_every_method(coterie: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.algorithms import METHODS

    monkeypatch.setenv("COLUMNS", "200")
    told = coterie("list")
    assert told.code == 0 and all(name in told.out for name in METHODS)


def test_list_and_help_are_whole_in_80_columns(coterie: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Papers' numbers and all words of a method's row; a paragraph of help is broken where the terminal ends."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = coterie("list").out
    assert "…" not in shown and "2608.15381" in shown and max(map(len, shown.splitlines())) <= 80
    shown = " ".join(coterie("run", "--help").out.split())
    assert "metrics.jsonl (a line a round), ledger.jsonl" in shown
    lines = [line.rstrip() for line in coterie("run", "--help").out.splitlines()]
    assert any(line.endswith("metrics.jsonl (a line a round), ledger.jsonl") for line in lines)


def test_assets_lists_fetches_and_removes(
    coterie: Callable[..., Any], toy_assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(toy_assets))
    assert "minilm" in coterie("assets").out == coterie("assets", "list").out
    assert coterie("assets", "fetch", "minilm").out.strip().startswith(str(toy_assets))
    monkeypatch.setenv("COTERIE_CACHE", str(toy_assets / "empty"))
    assert "was not there" in coterie("assets", "remove", "minilm").out


def test_an_asset_serves_as_base_and_as_task(
    coterie: Callable[..., Any], small: Path, toy_assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(toy_assets))
    told = coterie("run", small, "rounds=1", "model.base=minilm", "task={name: movie, path: null}", "-f", "m")
    assert told.code == 0, told


def test_python_dash_m_is_the_command_line(small: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "coterie", "run", str(small), "train.lrate=1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "coterie: error: there is no setting 'train.lrate'; did you mean 'train.lr'?\n"
    assert not list(tmp_path.iterdir())
