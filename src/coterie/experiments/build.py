"""From a configuration to what an engine plays: sites with their cards and data, a base model, an executor."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.assets import ASSETS, fetch
from coterie.data.partition import make_partition, manifest, partition_options, split
from coterie.data.tasks import Examples, Task, find_loader, load_task
from coterie.data.text import TextSet, tokenise
from coterie.engines.setting import Fault, Measuring, Setting, Site
from coterie.errors import ConfigError, nearest
from coterie.experiments.config import Config
from coterie.experiments.methods import algorithm
from coterie.maths.keys import Key, root_key
from coterie.models.loading import Base, load_base
from coterie.models.targets import check_rank
from coterie.protocol import Card
from coterie.training.asks import Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.training.probe import choose_plan

SPEC = "base"
"""The name of the one base model that all clients of a configuration share."""


@dataclass(frozen=True)
class Built:
    """A run made ready. `partition` is the content of partition.json; `majority` what always answering the most
    frequent class would score: `pooled` on the pooled test, `own` on clients' test shares with each client's own
    most frequent training class, on average."""

    setting: Setting
    executor: Executor
    base: Base
    plan: Plan
    task: Task
    partition: dict[str, Any]
    majority: dict[str, float | None]


def build(config: Config, plan: Plan | None = None) -> Built:
    """All that a run needs, on the given plan or one that is chosen by a probe.

    What is cheap to check is checked first. The partition, the data of every client and the initial heads follow from
    the seed alone, whatever the method.

    Raises:
        CoterieError: a setting that does not fit the data, the model or the method.
    """
    method = algorithm(config.method, config.options)
    root = root_key(config.seed)
    ids = client_ids(config)
    for fault in config.faults:
        if fault.client not in ids:
            raise ConfigError(f"faults: there is no client {fault.client!r}{nearest(fault.client, ids)}")
    sampled = sample_size(config)
    if config.federation.min_replies > (sampled or config.clients.count):
        raise ConfigError(
            f"federation.min_replies is {config.federation.min_replies}, but only {sampled or config.clients.count} "
            "clients take part in a round; lower it"
        )
    task = load_task(
        config.task.name,
        seed_key=root.fold("task"),
        limit_train=config.task.train_limit,
        limit_test=config.task.test_limit,
        **_task_options(config),
    )
    shares, record = _shares(config, task, ids)
    base = load_base(
        model_place(config.model.base),
        targets=config.model.targets,
        num_labels=task.num_classes,
        head_key=root.fold("head"),
    )
    ranks = dealt(config.clients.ranks, len(ids))
    reference_ranks = (
        [None] * len(ids) if config.clients.reference_ranks is None else dealt(config.clients.reference_ranks, len(ids))
    )
    for name, rank, reference in zip(ids, ranks, reference_ranks, strict=True):
        check_rank(base.layers, rank, f"client {name}")
        if reference is not None:
            check_rank(base.layers, reference, f"client {name}, reference rank")
    # Limits take the first examples of a set, whose order in the source may follow the classes.
    pooled = _shuffled(_tokens(config, base, task.test, task.num_classes), root_key(0).fold("pooled"))
    train = _tokens(config, base, task.train, task.num_classes)
    sites = {}
    for name, rank, reference, share in zip(ids, ranks, reference_ranks, shares, strict=True):
        card = Card(name, rank, len(share["train"]), scale_of(config, rank), base.layers, reference, spec=SPEC)
        order = root.fold("order", name)
        sites[name] = Site(card, {p: _shuffled(train.select(indices), order) for p, indices in share.items()})
    settings = train_settings(config)
    chosen = _plan(config, base, train, settings, max(ranks)) if plan is None else plan
    setting = Setting(
        algorithm=method,
        sites=sites,
        rounds=config.rounds,
        seed=config.seed,
        sample=sampled,
        min_replies=config.federation.min_replies,
        weights=config.federation.weights,
        head=config.federation.head,
        heads={SPEC: base.head},
        pooled_test=pooled,
        measuring=Measuring(**config.evaluate.model_dump()),
        faults=tuple(Fault(fault.client, fault.round, fault.kind) for fault in config.faults),
        strict=config.execution.strict,
    )
    majority = {"pooled": _majority(task.test.labels), "own": _own_majority(task.train.labels, shares)}
    return Built(setting, Executor({SPEC: base}, settings, chosen), base, chosen, task, record, majority)


def client_ids(config: Config) -> list[str]:
    """The clients' names: given ones, or numbers with leading zeros, so that id order is number order."""
    if config.clients.ids is not None:
        return list(config.clients.ids)
    width = max(2, len(str(config.clients.count - 1)))
    return [f"{number:0{width}d}" for number in range(config.clients.count)]


def sample_size(config: Config) -> int | None:
    """How many clients take part in a round; None for all. A fraction is rounded, at least one client.

    Raises:
        ConfigError: more than there are.
    """
    sample, count = config.federation.sample, config.clients.count
    if sample is None:
        return None
    if isinstance(sample, float):
        return max(1, round(sample * count))
    if sample > count:
        raise ConfigError(f"federation.sample is {sample}, but there are {count} clients; lower it or leave it out")
    return sample


def dealt(values: int | list[int], count: int) -> list[int]:
    """One value for each client, a list dealt out in turn."""
    listed = [values] if isinstance(values, int) else values
    return [listed[number % len(listed)] for number in range(count)]


def scale_of(config: Config, rank: int) -> float:
    """The scale s of a client of this rank (see `LoraSection`)."""
    lora = config.lora
    if lora.scale is not None:
        return lora.scale
    if lora.scaling == "standard":
        return lora.alpha / rank
    if lora.scaling == "rslora":
        return lora.alpha / math.sqrt(rank)
    return lora.alpha / max(dealt(config.clients.ranks, config.clients.count))


def train_settings(config: Config) -> TrainSettings:
    """Local training as the trainer takes it."""
    return TrainSettings(**config.train.model_dump())


def model_place(name: str) -> str:
    """A folder or hub name; an asset's name stands for its folder, which is fetched the first time."""
    return str(fetch(name)) if name in ASSETS else name


def _plan(config: Config, base: Base, train: TextSet, settings: TrainSettings, rank: int) -> Plan:
    execution = config.execution
    return choose_plan(
        base,
        train,
        settings,
        dtype=execution.dtype,
        attention=execution.attention,
        threads=execution.threads,
        clients_per_step=execution.clients_per_step,
        device=execution.device,
        rank=rank,
    )


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
    }
    options = {name: value for name, value in given.items() if value is not None}
    if task.columns is not None:
        options |= task.columns.model_dump()
    if task.name == "file" and task.path is None:
        raise ConfigError("task file needs the setting task.path, such as task.path=reviews.csv")
    if task.test_path is not None and not Path(task.test_path).expanduser().is_file():
        raise ConfigError(f"task.test_path: there is no file {task.test_path}")
    return options


def _shares(config: Config, task: Task, ids: list[str]) -> tuple[list[dict[str, np.ndarray]], dict[str, Any]]:
    """Every client's indices into the task's training examples, by data set, and the record of them."""
    key = root_key(config.seed).fold("partition")
    section = config.partition
    labels = task.train.labels
    options: dict[str, Any] = {option: getattr(section, option) for option in partition_options(section.kind)}
    groups = task.train.groups
    parts = make_partition(section.kind, labels, len(ids), key=key, minimum=section.minimum, groups=groups, **options)
    if section.test_fraction > 0:
        fractions = {"train": 1 - section.test_fraction, "test": section.test_fraction}
        shares = [
            split(part, labels, fractions, key.fold("split", name)) for name, part in zip(ids, parts, strict=True)
        ]
    else:
        shares = [{"train": part} for part in parts]
    how = {
        "kind": section.kind,
        **options,
        "minimum": section.minimum,
        "test_fraction": section.test_fraction,
        "seed": config.seed,
    }
    record = manifest(parts, labels, how=how, splits=shares, groups=groups if section.kind == "natural" else None)
    record["classes"] = list(task.label_names)
    record["data"] = _digest(task)
    record["clients"] = [{**held, "id": name} for name, held in zip(ids, record["clients"], strict=True)]
    return shares, record


def _tokens(config: Config, base: Base, examples: Examples, classes: int) -> TextSet:
    return tokenise(
        examples.texts,
        examples.pairs,
        examples.labels,
        base.tokenizer,
        config.model.max_length,
        num_classes=classes,
    )


def _digest(task: Task) -> str:
    """A hash of all examples and their labels, so that a resumed run notices when its data have changed."""
    hashed = hashlib.blake2b(digest_size=16)
    for examples in (task.train, task.test):
        for first, second in examples.contents():
            hashed.update(f"{len(first)}:{len(second)}:{first}{second}".encode())
        hashed.update(examples.labels.tobytes())
    return hashed.hexdigest()


def _shuffled(data: TextSet, key: Key) -> TextSet:
    return data.select(key.permutation(len(data)))


def _majority(labels: np.ndarray) -> float:
    return float(np.bincount(labels).max() / len(labels))


def _own_majority(labels: np.ndarray, shares: list[dict[str, np.ndarray]]) -> float | None:
    scores = [
        float(np.mean(labels[share["test"]] == np.bincount(labels[share["train"]]).argmax()))
        for share in shares
        if len(share.get("test", ())) > 0
    ]
    return sum(scores) / len(scores) if scores else None
