"""Who holds which example of a task: what is set aside for the server, and every client's shares of the rest.

All of it follows from the task, the partition's settings and the seed, never from the method. No model is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from coterie.data.holdings import check_disjoint, manifest
from coterie.data.partition import Partition, make_partition, partition_options, split
from coterie.data.tasks import Part, Task, find_loader, load_mixture, load_task, with_zero_shot
from coterie.errors import ConfigError, DataError
from coterie.experiments.config import Config, PartSection, TaskSection
from coterie.experiments.mixed import add_mixtures, add_tests, kinds_of, own_shares, own_tests
from coterie.experiments.public_pool import giving
from coterie.maths.keys import Key, root_key

_OWN_FILES = {
    "file": "reviews.csv",
    "choices-file": "questions.jsonl",
    "instructions-file": "answers.jsonl",
    "image-folder": "photos",
}
"""The tasks that read a user's own file or folder, and what such a one may be called."""

Value = TypeVar("Value", int, str)

UNLABELLED = "unlabeled"
"""The server's data set that it does not know the classes of."""


@dataclass(frozen=True, eq=False)
class Shares:
    """Indices into a task's training examples, each a sorted (n,) int64 array; none is in two of them.

    clients: by id, in the configuration's order, the data sets `train`, and `validation` and `test` where the
    configuration has them. server: `public/<task>` (of a mixture, `public/<part>`) and `unlabeled`, where examples are
    set aside. groups: of each client. record: the content of partition.json. tests: by id, clients' tests where these
    come out of the task's test set, as indices into that; two clients' may overlap.
    """

    clients: dict[str, dict[str, np.ndarray]]
    server: dict[str, np.ndarray]
    groups: dict[str, str]
    record: dict[str, Any]
    tests: dict[str, np.ndarray] = field(default_factory=dict)


def chosen_task(config: Config) -> Task:
    """The task of a configuration; its training examples are limited by the seed.

    Raises:
        ConfigError, DataError, AssetError: as `load_task` and `load_mixture`.
    """
    task, key = config.task, root_key(config.seed).fold("task")
    if task.parts is not None:
        parts = _parts(task.parts, "task.parts")
        learnt = load_mixture(parts, seed_key=key, extra=config.server_data.public or 0)
    else:
        options = _loader_options(task, task.name, "task")
        limits = {"limit_train": task.train_limit, "limit_test": task.test_limit}
        learnt = load_task(task.name, seed_key=key, **limits, **options)
    return learnt if task.zero_shot is None else with_zero_shot(learnt, _parts(task.zero_shot, "task.zero_shot"))


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
        section.kind, skewed_by(task)[rest], len(ids), key=key, minimum=section.minimum, groups=among, **options
    )
    parts = [rest[part] for part in dealt_out]
    kinds = kinds_of(task, section)
    shares = [
        own_shares(section, part, kinds, task, key.fold("split", name), name)
        for name, part in zip(ids, parts, strict=True)
    ]
    pool = config.server_data.pool
    if pool is not None:
        named = zip(ids, shares, strict=True)
        shares = [giving(share, pool, key.fold("pool", name), name) for name, share in named]
    tests = own_tests(section, task, parts, key)
    how = {
        "kind": section.kind,
        **options,
        "minimum": section.minimum,
        "validation_fraction": section.validation_fraction,
        "test_fraction": section.test_fraction,
        "seed": config.seed,
    }
    sizes = {"validation_size": section.validation_size, "test_size": section.test_size}
    how |= {name: size for name, size in sizes.items() if size is not None}
    natural = belongs if section.kind in ("natural", "mixture") else None
    told = belongs if task.kind == "choices" and task.parts else natural
    record = manifest(parts, labels, how=how, splits=shares, groups=told)
    record["classes"] = list(task.label_names)
    record["data"] = _digest(task)
    record["clients"] = [{**held, "id": name} for name, held in zip(ids, record["clients"], strict=True)]
    record["server"] = {
        name: {"examples": len(indices), "indices": indices.tolist()} for name, indices in server.items()
    }
    if task.parts:
        record["parts"] = {part: list(names) for part, names in task.parts.items()}
    if section.kind == "mixture" and belongs is not None:
        add_mixtures(record, section, belongs, rest, parts, key)
    if tests is not None:
        add_tests(record, tests)
    check_disjoint({**server, **{f"client {name}": part for name, part in zip(ids, parts, strict=True)}})
    groups = _groups(config, parts, natural)
    return Shares(
        dict(zip(ids, shares, strict=True)),
        server,
        dict(zip(ids, groups, strict=True)),
        record,
        {} if tests is None else dict(zip(ids, tests, strict=True)),
    )


def skewed_by(task: Task) -> np.ndarray:
    """What partitioners share out by, (n,) int64: classes, or the places of right answers.

    Of several benchmarks' questions, the benchmark (the specification's decision L19): places have no meaning there.
    """
    if task.kind != "choices" or not task.parts or task.train.groups is None:
        return task.train.labels
    return np.unique(np.asarray(task.train.groups), return_inverse=True)[1].astype(np.int64)


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
    if task.parts and task.train.groups is not None:
        return _set_aside_of_parts(config, task, np.asarray(task.train.groups), key)
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


def _set_aside_of_parts(
    config: Config, task: Task, groups: np.ndarray, key: Key
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """As `_set_aside`, of a mixture: the last examples of each part are public, whose order is drawn as it is loaded.

    So other sizes of the public sets leave the clients of a large part what they have. Of a part that is not for
    clients at all, everything is public.
    """
    wanted, unlabelled = config.server_data.public, config.server_data.unlabeled
    places = {part: np.flatnonzero(groups == part) for part in sorted(task.parts)}
    held: dict[str, np.ndarray] = {}
    server_only = {part.name for part in config.task.parts or () if part.train_limit == 0}
    if server_only and wanted is None:
        raise DataError(
            f"the part {min(server_only)!r} has train_limit 0, which leaves it to the server; give server_data.public"
        )
    if wanted is not None:
        for part, own in places.items():
            if wanted >= len(own) and part not in server_only:
                raise DataError(
                    f"server_data.public takes {wanted} of {len(own)} training examples of {part!r}, which leaves none "
                    "for the clients; take fewer, or leave the part out"
                )
            held[f"public/{part}"] = own[-wanted:]
        places = {part: own[:-wanted] for part, own in places.items()}
    rest = np.sort(np.concatenate(list(places.values())))
    if unlabelled is None:
        return held, rest
    if unlabelled >= len(rest):
        raise DataError(
            f"server_data.unlabeled takes {unlabelled} of {len(rest)} training examples, which leaves none for the "
            "clients; take fewer"
        )
    group = np.unique(groups, return_inverse=True)[1]
    share = unlabelled / len(rest)
    kinds = group * task.num_classes + task.train.labels
    parts = split(rest, kinds, {UNLABELLED: share, "": 1 - share}, key)
    return held | {UNLABELLED: parts[UNLABELLED]}, parts[""]


def _groups(config: Config, parts: Partition, natural: tuple[str, ...] | None) -> list[str]:
    """The group of each client: the given one, or the natural group that all its examples are of, or "all"."""
    if config.clients.groups is not None:
        return dealt(config.clients.groups, len(parts))
    held = [set() if natural is None else {natural[index] for index in part} for part in parts]
    return [next(iter(names)) if len(names) == 1 else "all" for names in held]


def _parts(sections: Sequence[PartSection], where: str) -> list[Part]:
    return [_part(section, f"{where}[{place}]") for place, section in enumerate(sections)]


def _part(section: PartSection, where: str) -> Part:
    return Part(
        section.name,
        section.task,
        None if section.classes is None else tuple(section.classes),
        section.train_limit,
        section.test_limit,
        _loader_options(section, section.task, where),
    )


def _loader_options(section: TaskSection | PartSection, name: str, where: str) -> dict[str, Any]:
    """The options of the named task's loader, by the names that it has for them; where: the section's own name."""
    try:
        find_loader(name)
    except ConfigError as error:
        raise ConfigError(f"{where}.name: {error}") from None
    given: dict[str, Any] = {
        "path": section.path,
        "test_path": section.test_path,
        "answers_from": section.answers_from,
        "test_fraction": section.test_fraction,
    }
    if isinstance(section, TaskSection):
        given |= {"template": section.template, "score": section.score}
    options = {name: value for name, value in given.items() if value is not None}
    if section.columns is not None:
        options |= section.columns.model_dump(exclude_none=True)
    own = _OWN_FILES.get(name.removeprefix("choices:"))
    if own is not None and section.path is None:
        raise ConfigError(f"task {name} needs the setting {where}.path, such as {where}.path={own}")
    if section.test_path is not None and not Path(section.test_path).expanduser().exists():
        raise ConfigError(f"{where}.test_path: there is no {section.test_path}")
    return options


def _digest(task: Task) -> str:
    """A hash of all examples and their labels, so that a resumed run notices when its data have changed."""
    hashed = hashlib.blake2b(digest_size=16)
    for examples in (task.train, task.test, *(task.more_tests[name] for name in sorted(task.more_tests))):
        for first, second in examples.contents():
            hashed.update(f"{len(first)}:{len(second)}:{first}{second}".encode())
        hashed.update(examples.labels.tobytes())
    return hashed.hexdigest()
