"""Data sets of the Hugging Face hub for language models: multiple choice, and prompts with answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from coterie.data.tasks.base import Judged, Pool
from coterie.data.tasks.choices import Asked, check_questions, gathered, is_known, pool_of, question_of
from coterie.data.tasks.columns import cells, holder
from coterie.data.tasks.hub import TEST_SPLITS, address, check_splits, load_splits, origin
from coterie.data.tasks.images import files
from coterie.data.tasks.instructions import columns_of, instructed
from coterie.data.tasks.language import ChoiceScore, Instructions, Questions
from coterie.data.tasks.own import check_fraction
from coterie.data.tasks.seeing import commonest
from coterie.errors import DataError, nearest


def hub_choices(
    name: str,
    config: str | None = None,
    question: str = "question",
    choices: str | list[str] = "choices",
    answer: str = "answer",
    context: str | None = None,
    group: str | None = None,
    image: str | None = None,
    template: str | None = None,
    score: ChoiceScore = "sum",
    answers_from: int | None = None,
    train_split: str = "train",
    test_split: str | None = None,
    test_fraction: float = 0.2,
) -> Pool:
    """Questions of a data set of the hub, named as `hub` names it; columns and answers_from as of `choices_file`.

    test_split: by default the first of test, validation and dev whose questions have answers; where there is none,
    `test_fraction` of the training split is split off. Questions whose answer is kept back are left out. image: the
    column of images that questions are about, for a model that sees; questions without one are left out.

    Raises:
        ConfigError: a name that cannot be meant, a template without the question, or another score.
        DataError: as `hub`.
    """
    columns = {"question": question, "choices": choices, "answer": answer, "context": context, "group": group}
    check_questions(columns, template, score)
    wanted = [question, *([choices] if isinstance(choices, str) else choices), answer, context, group]
    place, chosen = address(name, config)
    splits = load_splits(name, place, chosen)
    task = f"hub-choices:{name}"
    check_splits(task, splits, train_split, test_split)

    def asked(split: str) -> tuple[list[Asked], list[bytes] | None]:
        rows = _rows(task, split, splits[split], [column for column in wanted if column is not None])
        shown = None if image is None else files(splits[split], image, task)
        kept = [
            (question_of(f"task {task!r}, split {split!r}, row {number}", row, columns, template, answers_from), number)
            for number, row in enumerate(rows)
            if is_known(row[answer]) and (shown is None or shown[number] is not None)
        ]
        return [one for one, _ in kept], None if shown is None else [shown[number] or b"" for _, number in kept]

    train, seen = asked(train_split)
    if not train or (test_split is not None and not asked(test_split)[0]):
        empty = test_split if train else train_split
        raise DataError(f"task {task!r}: the split {empty!r} has no questions with answers; choose another")
    usual = (split for split in TEST_SPLITS if split in splits and split != train_split)
    used = test_split or next((split for split in usual if asked(split)[0]), None)
    if used is None:
        check_fraction(test_fraction, "or name a test_split")
    test = None if used is None else _about(*asked(used), score)
    notes = () if used is None else (f"the test set is the split {used!r}",)
    return pool_of(_about(train, seen, score), test, origin(place, chosen), notes, test_fraction=test_fraction)


def _about(asked: list[Asked], pictures: list[bytes] | None, score: ChoiceScore) -> Questions:
    return replace(gathered(asked, score), pictures=pictures)


def hub_instructions(
    name: str,
    config: str | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    text: str | None = None,
    group: str | None = None,
    image: str | None = None,
    template: str | None = None,
    train_split: str = "train",
    test_split: str | None = None,
    test_fraction: float = 0.2,
) -> Pool:
    """Prompts and answers of a data set of the hub, named as `hub` names it; columns as of `instructions_file`.

    test_split: by default the first of test, validation and dev; where there is none, `test_fraction` of the training
    split is split off. Examples of an empty answer are left out. A column of lists of answers stands for the commonest
    of each; image: as of `hub_choices`.

    Raises:
        ConfigError: a name that cannot be meant, a template without the prompt, or text beside prompt or answer.
        DataError: as `hub`.
    """
    asks, says = columns_of(prompt, answer, text, template)
    place, chosen = address(name, config)
    splits = load_splits(name, place, chosen)
    task = f"hub-instructions:{name}"
    check_splits(task, splits, train_split, test_split)

    def read(split: str, names: tuple[str, ...] | None) -> tuple[Instructions, tuple[str, ...]]:
        where = f"task {task!r}, split {split!r}"
        rows = _rows(task, split, splits[split], [column for column in (asks, says, group) if column is not None])
        given = [row[says] if isinstance(row[says], list) else [row[says]] for row in rows]
        rows = [{**row, says: commonest([own])[0]} if own else row for row, own in zip(rows, given, strict=True)]
        for number, row in enumerate(rows):
            if not isinstance(row[says], str) or not (asks is None or isinstance(row[asks], str)):
                raise DataError(f"{where}, row {number}: no text in a text column")
        shown = None if image is None else files(splits[split], image, task)
        places = [n for n, row in enumerate(rows) if row[says].strip() and (shown is None or shown[n] is not None)]
        kept = [rows[n] for n in places]
        prompts = ["" if asks is None else row[asks] for row in kept]
        groups = None if group is None else [str(row[group]) for row in kept]
        made, known = instructed(where, prompts, [row[says] for row in kept], groups, template, names)
        pictures = None if shown is None else [shown[n] or b"" for n in places]
        several = any(len(own) > 1 for own in given)
        references = tuple(tuple(given[n]) for n in places) if several else None
        return replace(made, references=references, pictures=pictures), known

    train, labels = read(train_split, None)
    usual = (split for split in TEST_SPLITS if split in splits and split != train_split)
    used = test_split or next(usual, None)
    if used is None:
        check_fraction(test_fraction, "or name a test_split")
    test = None if used is None else read(used, labels)[0]
    notes = () if used is None else (f"the test set is the split {used!r}",)
    judged: Judged = "exact" if train.references is None else "agreement"
    return Pool(train, test, labels, origin(place, chosen), notes, test_fraction=test_fraction, judged=judged)


def _rows(task: str, split: str, table: Any, wanted: list[str]) -> list[Mapping[str, Any]]:
    """The wanted columns of a split, row by row."""
    for column in wanted:
        if holder(column, table.column_names) is None:
            hint = nearest(column, table.column_names)
            raise DataError(f"task {task!r}, split {split!r}: no column {column!r}{hint}")
    columns = {name: cells(table, name) for name in wanted}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
