"""`coterie score`: a configuration is played and scored in one command, and programs are run only when allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from experiments.decoders import raw_config, write_answers, write_decoder

Coterie = Callable[..., Any]


def test_a_configuration_is_played_then_scored_and_its_run_is_taken_again(coterie: Coterie, tmp_path: Path) -> None:
    base = write_decoder(tmp_path / "base", "llama")
    task = {"name": "instructions-file", "path": str(write_answers(tmp_path / "answers.jsonl", 60))}
    content = raw_config(base, "llama", task, rounds=1, train={"batch_size": 8, "steps": 3}, name="sums")
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    first = coterie("score", "sums.yaml", "--limit", 5, "--max-new-tokens", 3, "--out", "rows.jsonl")
    assert first.code == 0 and (tmp_path / "runs" / "sums-fedpa-lora-seed0" / "summary.json").is_file()
    assert re.fullmatch(r"instructions-file: the same answer [\d.]+ % of 5 prompts\n", first.out)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 5 and set(rows[0]) == {"prompt", "generated", "reference", "score"}
    again = coterie("score", "runs/sums-fedpa-lora-seed0", "--limit", 5, "--max-new-tokens", 3)
    assert again.out == first.out
    assert "is there already" in coterie("score", "sums.yaml", "--out", "rows.jsonl").complaint


def test_generated_programs_are_not_run_without_being_asked_for(coterie: Coterie, finished: Path) -> None:
    told = coterie("score", finished, "--task", "humaneval")
    assert "--run-code" in told.complaint and "docs/generation.md" in told.complaint


def test_a_classifiers_run_is_not_scored_by_what_it_writes(coterie: Coterie, finished: Path) -> None:
    assert "not answered freely" in coterie("score", finished).complaint
