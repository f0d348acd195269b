"""Rows of a file as a run took its examples, and what a model says to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from torch import Tensor

from coterie.data.tasks import Examples
from coterie.data.tasks.base import Pool
from coterie.data.tasks.choices import answered, question_of
from coterie.data.tasks.language import ChoiceScore, Questions, filled
from coterie.errors import ConfigError
from coterie.experiments.config import TaskSection
from coterie.serve.predictor import Predictor
from coterie.serve.tables import ADDED, Table

_CHOICES, _ANSWER = "\0choices", "\0answer"
"""Keys that no file has, for what is not in the record."""


@dataclass(frozen=True)
class Form:
    """How a run made its examples out of records; by default texts, or prompts as they stand.

    kind: texts with classes or plain prompts; classes as choices of a language model; questions with choices; prompts
    with answers. text, pair: the columns of these texts. columns: the further ones by role. classes: their names.
    """

    kind: Literal["texts", "classes", "questions", "prompts"] = "texts"
    text: str = "text"
    pair: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    score: ChoiceScore = "sum"
    classes: tuple[str, ...] = ()


def form_of(task: TaskSection, classes: Sequence[str]) -> Form:
    """The form of a run's task, whose labels have the names `classes`."""
    given = {} if task.columns is None else task.columns.model_dump(exclude_none=True)
    kind, _, _ = task.name.partition(":")
    score: ChoiceScore = task.score or "sum"
    if kind in ("choices-file", "hub-choices"):
        columns = {"choices": "choices", **given}
        return Form("questions", given.get("question", "question"), None, columns, task.template, score)
    if kind in ("instructions-file", "hub-instructions"):
        return Form("prompts", given.get("prompt", given.get("text", "prompt")), template=task.template)
    text, pair = given.get("text", "text"), given.get("pair")
    if kind == "choices":
        return Form("classes", text, pair, {}, task.template, score, tuple(classes))
    return Form("texts", text, pair)


def answer(
    predictor: Predictor,
    table: Table,
    form: Form,
    *,
    choices: Sequence[str] | None = None,
    max_new_tokens: int = 64,
    batch_size: int = 32,
    advance: Callable[[int], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Of each row the prediction and its probability: of the class, or of the choice among those offered.

    A language model without choices goes on with the prompt, up to `max_new_tokens`, and gives no probability.
    choices: in place of the run's own. advance: called with the number of rows done since the last call.

    Raises:
        ConfigError: choices for a classifier.
        DataError, ModelError: as `Predictor` raises.
    """
    ask: Callable[[slice], list[dict[str, Any]]]
    if predictor.is_language:
        prompts, offered = prompts_of(table, form, choices)
        ask = (
            partial(_continued, predictor, prompts, max_new_tokens, batch_size)
            if offered is None
            else partial(_chosen, predictor, prompts, offered, form.score, batch_size)
        )
    elif choices is None:
        ask = partial(_classified, predictor, table, batch_size)
    else:
        raise ConfigError("--choices are for a language model; this is a classifier, which knows its classes")
    # Enough rows at a time for batches of equal length, few enough for a look at the progress.
    step = batch_size * (2 if predictor.is_language else 8)
    found: list[dict[str, Any]] = []
    for start in range(0, len(table), step):
        part = slice(start, min(start + step, len(table)))
        found += ask(part)
        advance(part.stop - part.start)
    return found


def _classified(predictor: Predictor, table: Table, batch_size: int, part: slice) -> list[dict[str, Any]]:
    pairs = None if table.pairs is None else table.pairs[part]
    likely = predictor.probabilities(table.texts[part], pairs, batch_size=batch_size)
    return _named([predictor.labels] * len(likely), likely)


def _chosen(
    predictor: Predictor,
    prompts: Sequence[str],
    choices: Sequence[Sequence[str]],
    score: ChoiceScore,
    batch_size: int,
    part: slice,
) -> list[dict[str, Any]]:
    scores = predictor.choice_scores(prompts[part], choices[part], score=score, batch_size=batch_size)
    return _named(choices[part], scores.softmax(dim=1))


def _continued(
    predictor: Predictor, prompts: Sequence[str], max_new_tokens: int, batch_size: int, part: slice
) -> list[dict[str, Any]]:
    said = predictor.generate(prompts[part], max_new_tokens, batch_size=batch_size)
    return [{ADDED[0]: text.strip()} for text in said]


def _named(names: Sequence[Sequence[str]], likely: Tensor) -> list[dict[str, Any]]:
    """The likeliest of each row's names, with its probability."""
    best, places = likely.max(dim=1)
    return [
        dict(zip(ADDED, (own[place], round(probability, 6)), strict=True))
        for own, place, probability in zip(names, places.tolist(), best.tolist(), strict=True)
    ]


def prompts_of(
    table: Table, form: Form, offered: Sequence[str] | None = None
) -> tuple[Sequence[str], Sequence[Sequence[str]] | None]:
    """The prompts of a table's rows, and the choices of each: `offered` ones, or the run's own, if any."""
    prompts: Sequence[str] = table.texts
    choices: Sequence[Sequence[str]] | None = None
    if form.kind == "classes":
        texts = tuple(text.strip() for text in table.texts)
        pairs = None if table.pairs is None else tuple(text.strip() for text in table.pairs)
        examples = Examples(texts, pairs, np.zeros(len(texts), dtype=np.int64))
        asked = answered(Pool(examples, None, form.classes, ""), form.template, form.score).train
        assert isinstance(asked, Questions)
        prompts, choices = asked.prompts, asked.choices
    elif form.kind == "questions":
        columns = {**form.columns, "question": form.text, "answer": _ANSWER}
        more: dict[str, Any] = {_ANSWER: 0}
        if offered is not None:
            columns["choices"], more[_CHOICES] = _CHOICES, list(offered)
        questions = [
            question_of(f"row {number}", {**record, **more}, columns, form.template)
            for number, record in enumerate(table.records, start=1)
        ]
        prompts, choices = [prompt for prompt, *_ in questions], [own for _, own, *_ in questions]
    elif form.kind == "prompts" and form.template is not None:
        prompts = [filled(form.template, {"prompt": text}) for text in table.texts]
    return prompts, choices if offered is None else [tuple(offered)] * len(prompts)
