"""Runs scored by what they generate: texts, questions about images, and programs only when allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from experiments.decoders import raw_config, write_answers, write_decoder
from reference.vision import file_of, picture, write_seeing_model

import coterie
from coterie.data.tasks import load_task
from coterie.errors import ConfigError
from coterie.maths.keys import root_key
from coterie.serve.scoring import score


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("answers")
    base = write_decoder(place / "base", "llama")
    task = {"name": "instructions-file", "path": str(write_answers(place / "answers.jsonl"))}
    sections: dict[str, Any] = {"train": {"batch_size": 8, "steps": 60, "lr": 2e-2}}
    coterie.run(raw_config(base, "llama", task, **sections), folder=place / "run")
    return place / "run"


def test_a_run_is_scored_by_the_answers_that_it_generates(run: Path) -> None:
    found = score(run, max_new_tokens=4, batch_size=7)
    assert found.judged == "exact" and len(found.rows) == 24 and found.value > 0.9
    assert found.value == sum(row["score"] for row in found.rows) / 24
    assert all(row["score"] == float(row["generated"].strip() == row["reference"]) for row in found.rows)


def test_a_limit_takes_the_same_prompts_and_batches_change_nothing(run: Path) -> None:
    few, one_by_one = score(run, limit=5, max_new_tokens=4), score(run, limit=5, max_new_tokens=4, batch_size=1)
    assert few.rows == one_by_one.rows == score(run, max_new_tokens=4).rows[:5]


def test_programs_are_not_run_unless_that_is_allowed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> float:
        raise AssertionError("a program was run")

    monkeypatch.setattr("coterie.serve.judging.run_program", never)
    with pytest.raises(ConfigError, match="--run-code"):
        score(run, task="humaneval", limit=1)


def test_a_base_alone_needs_a_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give one with --task"):
        score(write_decoder(tmp_path / "base", "llama"))


def test_tasks_that_are_not_answered_freely_are_refused_in_one_line(run: Path, data_dir: Path) -> None:
    if not (data_dir / "superglue_copa").is_dir():
        pytest.skip("COTERIE_DATA holds no 'superglue_copa'")
    with pytest.raises(ConfigError, match="not answered freely") as caught:
        score(run, task="copa")
    assert "\n" not in str(caught.value)


def test_a_model_that_sees_answers_about_images(tmp_path: Path) -> None:
    folder = tmp_path / "asked"
    for split, count in (("train", 40), ("val", 9)):
        (folder / split).mkdir(parents=True)
        records = []
        for number in range(count):
            label, name = number % 2, f"{split}{number}.png"
            (folder / split / name).write_bytes(file_of(picture(label, number + 100 * (split == "val"))))
            answers = [{"answer": ("no", "yes")[label]}] * 3 + [{"answer": "film"}]
            records.append({"image": name, "question": "is the film good", "answers": answers})
        (folder / f"{split}.json").write_text(json.dumps(records))
    config = {
        "method": "fedit",
        "rounds": 2,
        "model": {"base": str(write_seeing_model(tmp_path / "llava")), "max_length": 128},
        "task": {"name": "vizwiz", "path": str(folder)},
        "clients": {"count": 2, "ranks": 4},
        "partition": {"kind": "iid", "minimum": 4},
        "train": {"batch_size": 8, "steps": 40, "lr": 1e-2},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 2},
    }
    coterie.run(config, folder=tmp_path / "run")
    found = score(tmp_path / "run", max_new_tokens=3)
    assert found.judged == "agreement" and found.value > 0.9
    task = load_task("vizwiz", seed_key=root_key(0), path=str(folder))
    assert {row["generated"].strip() for row in found.rows} == {"no", "yes"} and len(found.rows) == len(task.test)
