"""Rows become the very prompts and choices that the run's task made of its examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reference.tokenisers import write_tokenizer
from training.small import llama_lm

import coterie
from coterie.data.tasks import Instructions, Questions, find_loader
from coterie.errors import ConfigError
from coterie.experiments.config import parse
from coterie.serve.rows import Form, answer, form_of, prompts_of
from coterie.serve.tables import read_table

QUESTIONS = [
    {"asked": "is the film good", "options": ["yes", "no"], "right": 0, "about": "a film"},
    {"asked": "why", "options": ["one", "two", "very bad"], "right": "C", "about": "the two"},
    {"asked": "is it bad", "options": ["yes", "no"], "right": "no", "about": "one"},
] * 4
TEXTS = [{"text": " a good film ", "second": "is it", "label": "yes"}, {"text": "bad", "second": "why", "label": "no"}]


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    distinct = [{**record, "number": f"n{number}"} for number, record in enumerate(records)]
    path.write_text("".join(json.dumps(record) + "\n" for record in distinct), encoding="utf-8")
    return path


def made(task: dict[str, Any]) -> tuple[Any, Form]:
    """All examples of a task, and the form that a run of it has."""
    config = parse({"method": "fedit", "task": task})
    options = {"path": task["path"], **task.get("columns", {})}
    options |= {name: task[name] for name in ("template", "score") if name in task}
    loader, given = find_loader(task["name"])
    found = loader(**given, **options)
    return found.train, form_of(config.task, found.label_names)


@pytest.mark.parametrize("template", [None, "{text} ({pair})? "])
def test_classes_as_choices(tmp_path: Path, template: str | None) -> None:
    path = lines(tmp_path / "texts.jsonl", TEXTS)
    task: dict[str, Any] = {"name": "choices:file", "path": str(path), "columns": {"pair": "second"}}
    examples, form = made(task | ({} if template is None else {"template": template}))
    assert isinstance(examples, Questions)
    prompts, choices = prompts_of(read_table(path, form.text, form.pair), form)
    assert tuple(prompts) == examples.prompts and tuple(choices or ()) == examples.choices
    _, offered = prompts_of(read_table(path, form.text, form.pair), form, ["a", "b"])
    assert offered == [("a", "b")] * 2


@pytest.mark.parametrize("more", [{}, {"template": "{context}: {question}", "score": "mean"}])
def test_questions_with_choices_of_their_own(tmp_path: Path, more: dict[str, Any]) -> None:
    path = lines(tmp_path / "questions.jsonl", QUESTIONS)
    columns = {"question": "asked", "choices": "options", "answer": "right", "context": "about"}
    examples, form = made({"name": "choices-file", "path": str(path), "columns": columns, **more})
    table = read_table(path, form.text)
    prompts, choices = prompts_of(table, form)
    assert tuple(prompts) == examples.prompts and tuple(choices or ()) == examples.choices
    assert form.score == examples.score
    same, offered = prompts_of(table, form, ["x", "y"])
    assert same == prompts and offered == [("x", "y")] * len(prompts)


@pytest.mark.parametrize("template", [None, "Say: {prompt}\n"])
def test_prompts_with_answers(tmp_path: Path, template: str | None) -> None:
    path = lines(tmp_path / "answers.jsonl", [{"prompt": "the film", "answer": "is good"}] * 4)
    task: dict[str, Any] = {"name": "instructions-file", "path": str(path)}
    examples, form = made(task | ({} if template is None else {"template": template}))
    assert isinstance(examples, Instructions)
    prompts, choices = prompts_of(read_table(path, form.text), form)
    assert tuple(prompts) == examples.prompts and choices is None


def test_a_language_model_answers_rows_as_its_predictor_does(tmp_path: Path) -> None:
    llama_lm().save_pretrained(tmp_path)
    write_tokenizer(tmp_path, eos_token="<end>")
    predictor = coterie.load(tmp_path)
    table = read_table(lines(tmp_path / "in.jsonl", [{"text": "the film is"}, {"text": "why"}, {"text": "a"}]))
    told: list[int] = []
    found = answer(predictor, table, Form(), max_new_tokens=4, batch_size=1, advance=told.append)
    assert [row["prediction"] for row in found] == [text.strip() for text in predictor.generate(table.texts, 4)]
    assert all(set(row) == {"prediction"} for row in found) and told == [2, 1]
    chosen = answer(predictor, table, Form(), choices=["yes", "very bad"])
    likely = predictor.choice_scores(table.texts, ["yes", "very bad"]).softmax(dim=1)
    assert [row["prediction"] for row in chosen] == predictor.choose(table.texts, ["yes", "very bad"])
    assert [row["probability"] for row in chosen] == pytest.approx(likely.max(dim=1).values.tolist(), abs=1e-5)


def test_choices_are_not_for_a_classifier(finished: Path, tmp_path: Path) -> None:
    table = read_table(lines(tmp_path / "in.jsonl", TEXTS))
    with pytest.raises(ConfigError, match="--choices are for a language model"):
        answer(coterie.load(finished), table, Form(), choices=["a", "b"])
