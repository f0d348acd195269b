"""Who holds which example of a task: what is set aside for the server, and every client's shares of the rest.

All of it follows from the task, the partition's settings and the seed, never from the method. No model is needed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from coterie.data.holdings import manifest
from coterie.data.partition import Partition, make_partition, partition_options, split
from coterie.data.tasks import Task, find_loader, load_task
from coterie.errors import ConfigError, DataError
from coterie.experiments.config import Config, PartitionSection
from coterie.maths.keys import Key, root_key

_OWN_FILES = {"file": "reviews.csv", "choices-file": "questions.jsonl", "instructions-file": "answers.jsonl"}
"""The tasks that read a user's own file, and what such a file may be called."""

Value = TypeVar("Value", int, str)

UNLABELLED = "unlabeled"
"""The server's data set that it does not know the classes of."""


@dataclass(frozen=True, eq=False)
class Shares:
    """Indices into a task's training examples, each a sorted (n,) int64 array; none is in two of them.

    clients: by id, in the configuration's order, the data sets `train`, and `validation` and `test` where the
    configuration has them. server: `public/<task>` and `unlabeled`, where examples are set aside. groups: of each
    client. record: the content of partition.json.
    """

    clients: dict[str, dict[str, np.ndarray]]
    server: dict[str, np.ndarray]
    groups: dict[str, str]
    record: dict[str, Any]


def chosen_task(config: Config) -> Task:
    """The task of a configuration; its training examples are limited by the seed.

    Raises:
        ConfigError, DataError, AssetError: as `load_task`.
    """
    return load_task(
        config.task.name,
        seed_key=root_key(config.seed).fold("task"),
        limit_train=config.task.train_limit,
        limit_test=config.task.test_limit,
        **_task_options(config),
    )


def share_out(config: Config, task: Task) -> Shares:
    """Set the server's examples aside, share out the rest, and split what each client got.

    Raises:
        ConfigError: an unknown partitioner.
        DataError: what cannot be shared out so; the message says what to change.
    """
    ids, section = client_ids(config), config.partition
    root = root_key(config.seed)
    labels, belongs = task.train.labels, task.train.groups
    server, rest = _set_aside(config, task, root.fold("server data"))
    key = root.fold("partition")
    options: dict[str, Any] = {option: getattr(section, option) for option in partition_options(section.kind)}
    among = None if belongs is None else tuple(belongs[index] for index in rest)
    dealt_out = make_partition(
        section.kind, labels[rest], len(ids), key=key, minimum=section.minimum, groups=among, **options
    )
    parts = [rest[part] for part in dealt_out]
    fractions = _fractions(section)
    shares = [split(part, labels, fractions, key.fold("split", name)) for name, part in zip(ids, parts, strict=True)]
    how = {
        "kind": section.kind,
        **options,
        "minimum": section.minimum,
        "validation_fraction": section.validation_fraction,
        "test_fraction": section.test_fraction,
        "seed": config.seed,
    }
    natural = belongs if section.kind == "natural" else None
    record = manifest(parts, labels, how=how, splits=shares, groups=natural)
    record["classes"] = list(task.label_names)
    record["data"] = _digest(task)
    record["clients"] = [{**held, "id": name} for name, held in zip(ids, record["clients"], strict=True)]
    record["server"] = {
        name: {"examples": len(indices), "indices": indices.tolist()} for name, indices in server.items()
    }
    groups = _groups(config, parts, natural)
    return Shares(dict(zip(ids, shares, strict=True)), server, dict(zip(ids, groups, strict=True)), record)


def client_ids(config: Config) -> list[str]:
    """The clients' names: given ones, or numbers with leading zeros, so that id order is number order."""
    if config.clients.ids is not None:
        return list(config.clients.ids)
    width = max(2, len(str(config.clients.count - 1)))
    return [f"{number:0{width}d}" for number in range(config.clients.count)]


def dealt(values: Value | list[Value], count: int) -> list[Value]:
    """One value for each client, a list dealt out in turn."""
    listed = values if isinstance(values, list) else [values]
    return [listed[number % len(listed)] for number in range(count)]


def _set_aside(config: Config, task: Task, key: Key) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The server's examples by data set, each with the task's classes in proportion, and those that are left."""
    wanted = {f"public/{task.name}": config.server_data.public, UNLABELLED: config.server_data.unlabeled}
    counts = {name: count for name, count in wanted.items() if count is not None}
    total, everything = len(task.train), np.arange(len(task.train))
    taken = sum(counts.values())
    if not counts:
        return {}, everything
    if taken >= total:
        raise DataError(
            f"server_data takes {taken} of {total} training examples, which leaves none for the clients; take fewer, "
            "or raise task.train_limit"
        )
    fractions = {name: count / total for name, count in counts.items()}
    parts = split(everything, task.train.labels, {**fractions, "": (total - taken) / total}, key)
    rest = parts.pop("")
    return parts, rest


def _fractions(section: PartitionSection) -> dict[str, float]:
    """Of a client's examples, the share of each data set that it is to have."""
    held = {"validation": section.validation_fraction, "test": section.test_fraction}
    return {"train": 1 - sum(held.values())} | {name: share for name, share in held.items() if share > 0}


def _groups(config: Config, parts: Partition, natural: tuple[str, ...] | None) -> list[str]:
    """The group of each client: the given one, or the natural group that all its examples are of, or "all"."""
    if config.clients.groups is not None:
        return dealt(config.clients.groups, len(parts))
    held = [set() if natural is None else {natural[index] for index in part} for part in parts]
    return [next(iter(names)) if len(names) == 1 else "all" for names in held]


def _task_options(config: Config) -> dict[str, Any]:
    """The loader's own options, by the names that it has for them."""
    task = config.task
    try:
        find_loader(task.name)
    except ConfigError as error:
        raise ConfigError(f"task.name: {error}") from None
    given: dict[str, Any] = {
        "path": task.path,
        "test_path": task.test_path,
        "test_fraction": task.test_fraction,
        "template": task.template,
        "score": task.score,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if task.columns is not None:
        options |= task.columns.model_dump(exclude_none=True)
    own = _OWN_FILES.get(task.name.removeprefix("choices:"))
    if own is not None and task.path is None:
        raise ConfigError(f"task {task.name} needs the setting task.path, such as task.path={own}")
    if task.test_path is not None and not Path(task.test_path).expanduser().is_file():
        raise ConfigError(f"task.test_path: there is no file {task.test_path}")
    return options


def _digest(task: Task) -> str:
    """A hash of all examples and their labels, so that a resumed run notices when its data have changed."""
    hashed = hashlib.blake2b(digest_size=16)
    for examples in (task.train, task.test, *(task.more_tests[name] for name in sorted(task.more_tests))):
        for first, second in examples.contents():
            hashed.update(f"{len(first)}:{len(second)}:{first}{second}".encode())
        hashed.update(examples.labels.tobytes())
    return hashed.hexdigest()
