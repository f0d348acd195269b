"""From a configuration to what an engine plays: sites with their cards and data, a base model, an executor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from coterie.data.metrics import METRICS
from coterie.data.sequences import DataSet, SequenceSet
from coterie.data.tasks import ExampleSet, Task
from coterie.data.text import TextSet
from coterie.engines.setting import Fault, Measuring, Setting, Site
from coterie.errors import ConfigError, nearest
from coterie.experiments.bases import base_for, check_method, to_train_on, tokens
from coterie.experiments.config import Config, ServerDataSection
from coterie.experiments.methods import configured
from coterie.experiments.shares import UNLABELLED, Shares, chosen_task, client_ids, dealt, share_out
from coterie.maths.keys import Key, root_key
from coterie.models.loading import Base
from coterie.models.targets import check_rank
from coterie.protocol import Card, Traits
from coterie.training.asks import Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.training.probe import choose_plan

SPEC = "base"
"""The name of the one base model that all clients of a configuration share."""


@dataclass(frozen=True)
class Built:
    """A run made ready. `partition` is the content of partition.json; `majority` what always answering the most
    frequent class (of choices, the most frequent place) would score by the task's first metric: `pooled` on the pooled
    test, `own` on clients' test shares with each client's own most frequent training class, on average; None where
    nothing is classified."""

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
    method = configured(config)
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
    if method.traits.server_data and config.server_data == ServerDataSection():
        raise ConfigError(
            f"{method.traits.title} needs data at the server; set training examples aside for it, with "
            "server_data.public=200 or server_data.unlabeled=200"
        )
    task = chosen_task(config)
    shares = share_out(config, task)
    base = base_for(task, config.model, root.fold("head"))
    check_method(method.traits, base)
    ranks = dealt(config.clients.ranks, len(ids))
    reference_ranks = (
        [None] * len(ids) if config.clients.reference_ranks is None else dealt(config.clients.reference_ranks, len(ids))
    )
    for name, rank, reference in zip(ids, ranks, reference_ranks, strict=True):
        check_rank(base.layers, rank, f"client {name}")
        if reference is not None:
            check_rank(base.layers, reference, f"client {name}, reference rank")
    # Limits take the first examples of a set, whose order in the source may follow the classes.
    tests = tokens(task, task.test, base, config.model.max_length)
    pooled = _shuffled(tests, root_key(0).fold("pooled"))
    more = {
        name: _shuffled(tokens(task, examples, base, config.model.max_length), root_key(0).fold("pooled", name))
        for name, examples in task.more_tests.items()
    }
    train = tokens(task, task.train, base, config.model.max_length)
    sites = {}
    for name, rank, reference in zip(ids, ranks, reference_ranks, strict=True):
        share, scale = shares.clients[name], scale_of(config, rank)
        group = shares.groups[name]
        card = Card(name, rank, len(share["train"]), scale, base.layers, reference, group=group, spec=SPEC)
        order = root.fold("order", name)
        data = {p: _shuffled(own, order) for p, own in _with_parts(task, task.train, train, share).items()}
        if name in shares.tests:
            held_out = _with_parts(task, task.test, tests, {"test": shares.tests[name]})
            data |= {p: _shuffled(own, order) for p, own in held_out.items()}
        sites[name] = Site(card, data | {"train": to_train_on(data["train"])})
    settings = train_settings(config)
    chosen = _plan(config, base, to_train_on(train), settings, max(ranks)) if plan is None else plan
    setting = Setting(
        algorithm=method,
        sites=sites,
        rounds=config.rounds,
        seed=config.seed,
        sample=sampled,
        min_replies=config.federation.min_replies,
        weights=config.federation.weights,
        head="frozen" if base.is_language else config.federation.head,
        heads={SPEC: base.head or None},
        server_data=_server_data(config, method.traits, task, train, shares),
        pooled_test=pooled,
        more_tests=more,
        metrics=task.metrics,
        measuring=Measuring(**config.evaluate.model_dump()),
        faults=tuple(Fault(fault.client, fault.round, fault.kind) for fault in config.faults),
        strict=config.execution.strict,
    )
    majority: dict[str, float | None] = {"pooled": None, "own": None}
    if task.kind != "instructions":
        majority = {"pooled": _majority(task, task.test.labels, task.test.labels), "own": _own_majority(task, shares)}
    return Built(setting, Executor({SPEC: base}, settings, chosen), base, chosen, task, shares.record, majority)


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


def _plan(config: Config, base: Base, train: DataSet, settings: TrainSettings, rank: int) -> Plan:
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


def _shuffled(data: DataSet, key: Key) -> DataSet:
    return data.select(key.permutation(len(data)))


def _with_parts(task: Task, examples: ExampleSet, data: DataSet, sets: Mapping[str, np.ndarray]) -> dict[str, DataSet]:
    """A client's sets out of `data` by name; of a mixture, test and validation also part by part, as test/<part>."""
    places = dict(sets)
    for name in ("validation", "test") if task.parts else ():
        if name in sets:
            belongs = np.asarray(examples.groups)[sets[name]]
            places |= {f"{name}/{part}": own for part in task.parts if len(own := sets[name][belongs == part])}
    return {name: data.select(indices) for name, indices in places.items()}


def _server_data(config: Config, traits: Traits, task: Task, train: DataSet, shares: Shares) -> dict[str, DataSet]:
    """What the server holds: the examples set aside for it, and for a reference method what the clients train on.

    The latter is `pooled`, and `pooled/<group>` of the clients of each group; of a mixture, `pooled/<part>` in its
    place: what all clients together train on of a part.
    """
    held = dict(shares.server)
    if traits.pools_data:
        by_name: dict[str, list[np.ndarray]] = {}
        for name, share in shares.clients.items():
            trained = share["train"]
            if not task.parts:
                by_name.setdefault(shares.groups[name], []).append(trained)
            for part in task.parts:
                by_name.setdefault(part, []).append(trained[np.asarray(task.train.groups)[trained] == part])
        pools = {f"pooled/{name}": np.concatenate(own) for name, own in by_name.items()}
        held |= {"pooled": np.concatenate(list(pools.values()))}
        held |= {name: own for name, own in pools.items() if len(own)}
    order = root_key(config.seed).fold("order", "server")
    data = {name: to_train_on(_shuffled(train.select(held[name]), order.fold(name))) for name in sorted(held)}
    return {name: _without_labels(part) if name == UNLABELLED else part for name, part in data.items()}


def _without_labels(data: TextSet | SequenceSet) -> DataSet:
    """Texts whose class nobody can read, -1 everywhere; sequences have no classes, their tokens are all there is."""
    if not isinstance(data, TextSet):
        return data
    # A view of its own, lest a batch of several sets take its classes from the other's store.
    return replace(data, ids=data.ids[:], stored_labels=torch.full_like(data.stored_labels, -1))


def _majority(task: Task, train: np.ndarray, test: np.ndarray) -> float:
    """The score on `test` (n,) of always answering the most frequent class of `train` (m,)."""
    constant = np.full(len(test), np.bincount(train).argmax())
    return METRICS[task.metrics[0]](constant, test)


def _own_majority(task: Task, shares: Shares) -> float | None:
    labels = task.train.labels
    tested = {name: labels[share["test"]] for name, share in shares.clients.items() if "test" in share}
    tested |= {name: task.test.labels[indices] for name, indices in shares.tests.items()}
    found = [
        _majority(task, labels[shares.clients[name]["train"]], own) for name, own in tested.items() if len(own) > 0
    ]
    return sum(found) / len(found) if found else None
