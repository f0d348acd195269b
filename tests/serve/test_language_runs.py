"""A run of a language model answers rows of a file as it was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from experiments.decoders import raw_config, write_answers, write_decoder, write_questions

import coterie
from coterie.data import load_task
from coterie.data.tasks import Questions
from coterie.experiments.config import parse
from coterie.experiments.exports import export
from coterie.maths.keys import root_key
from coterie.serve.loading import find, open_found
from coterie.serve.rows import answer
from coterie.serve.tables import read_table


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("base") / "llama", "llama")


def answered(result: coterie.RunResult, file: Path) -> list[dict[str, Any]]:
    found = find(result.folder)
    return answer(open_found(found), read_table(file, found.form.text, found.form.pair), found.form, batch_size=5)


def test_questions_are_answered_as_they_were_scored(base: Path, tmp_path: Path) -> None:
    path = write_questions(tmp_path / "questions.jsonl")
    raw = raw_config(base, "llama", {"name": "choices-file", "path": str(path), "score": "mean"})
    result = coterie.run(raw, tmp_path / "run")
    config = parse(raw)
    test = load_task("choices-file", seed_key=root_key(config.seed).fold("task"), path=str(path), score="mean").test
    assert isinstance(test, Questions)
    records = {f"{row['question']}\nAnswer:": row for row in map(json.loads, path.read_text("utf-8").splitlines())}
    asked = [records[prompt] for prompt in test.prompts]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    found = answered(result, tmp_path / "test.jsonl")
    right = [row["prediction"] == own["choices"][own["answer"]] for row, own in zip(found, asked, strict=True)]
    assert sum(right) / len(right) == result.summary["global"]["pooled"]["accuracy"]


def test_prompts_are_gone_on_with_by_run_export_and_merged_model(base: Path, tmp_path: Path) -> None:
    path = write_answers(tmp_path / "answers.jsonl")
    template = "say {prompt} so"
    task = {"name": "instructions-file", "path": str(path), "template": template}
    result = coterie.run(
        raw_config(base, "llama", task, train={"batch_size": 8, "steps": 40, "lr": 2e-2}), tmp_path / "run"
    )
    prompts = [json.loads(line)["prompt"] for line in path.read_text("utf-8").splitlines()][:6]
    (tmp_path / "new.txt").write_text("\n".join(prompts), encoding="utf-8")
    said = [row["prediction"] for row in answered(result, tmp_path / "new.txt")]
    assert set(said) <= {"no", "yes very"}
    export(result.folder, tmp_path / "adapter")
    export(result.folder, tmp_path / "merged", merged=True)
    filled = [template.format(prompt=prompt) for prompt in prompts]
    for place in ("adapter", "merged"):
        assert coterie.load(tmp_path / place).generate(filled) == said


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    from coterie.cli.main import main

    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        assert not stop.value.code
        return capsys.readouterr().out

    return call


def test_classes_as_choices_on_the_command_line(
    base: Path, reviews_csv: Path, tmp_path: Path, cli: Callable[..., str]
) -> None:
    task = {"name": "choices:file", "path": str(reviews_csv), "template": "{text}\nit is"}
    coterie.run(raw_config(base, "llama", task, rounds=1), tmp_path / "run")
    (tmp_path / "new.jsonl").write_text('{"text": "the film is good"}\n{"text": "why"}\n', encoding="utf-8")
    rows = [json.loads(line) for line in cli("predict", "run", "new.jsonl").splitlines()]
    chosen = coterie.load("run").choose(["the film is good\nit is", "why\nit is"], ["bad", "good"])
    assert [row["prediction"] for row in rows] == chosen and all(0.5 <= row["probability"] <= 1 for row in rows)
    others = [json.loads(line) for line in cli("predict", "run", "new.jsonl", "--choices", "no, yes").splitlines()]
    assert {row["prediction"] for row in others} <= {"no", "yes"}
