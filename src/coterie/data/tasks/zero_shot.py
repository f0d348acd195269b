"""Tests of other tasks beside a task's own: scored on, never trained on (FedSLM, section V: PubMedQA and MedMCQA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coterie.data.tasks.base import ExampleSet, Task
from coterie.data.tasks.mixture import Part
from coterie.data.tasks.registry import limited, load_pool, without
from coterie.errors import ConfigError, DataError
from coterie.maths.keys import root_key

_OF_LANGUAGE = ("choices", "instructions")


def with_zero_shot(task: Task, parts: Sequence[Part]) -> Task:
    """The task with a further test for each part, under the part's name in `Task.more_tests`.

    It is the part's test set, or all its examples where it has none, since none of them is trained on; cut at its
    `limit_test` alike for every seed. Training examples that stand in one are dropped, and the notes say how many.

    Raises:
        ConfigError: a name that the task's own tests have, a task without choices or instructions on one side, or a
            part with classes.
        DataError: missing or malformed data, or no training example left.
    """
    tests: dict[str, ExampleSet] = {}
    notes: list[str] = []
    for part in parts:
        if part.name in tests or part.name in task.more_tests:
            raise ConfigError(f"task.zero_shot: there are two tests called {part.name!r}; give this one another name")
        if part.classes is not None:
            raise ConfigError(f"task.zero_shot: {part.name!r} is scored as it is, without a choice of classes")
        pool = load_pool(part.task, **part.options)
        if task.kind not in _OF_LANGUAGE or pool.train.kind not in _OF_LANGUAGE:
            raise ConfigError(
                f"task.zero_shot: {part.name!r} ({pool.train.kind}) beside {task.kind}: only language models are "
                "tested with other tasks than they learn"
            )
        whole = pool.test if pool.test is not None else pool.train
        key = root_key(0).fold("task", part.task).fold("limit_test")
        tests[part.name], said = limited(whole, part.limit_test, key, "test_limit")
        notes += [f"{part.name}, for scores only: {note}" for note in (pool.source, *said)]
    train, dropped = without(task.train, list(tests.values()))
    if not len(train):
        raise DataError(f"task {task.name!r}: every training example stands in a zero-shot test; take another task")
    if dropped:
        notes.append(f"{dropped} training examples were dropped because their text stands in a zero-shot test")
    return replace(task, train=train, notes=(*task.notes, *notes), more_tests={**task.more_tests, **tests})
