"""From a configuration to what an engine plays: sites with their cards and data, a base model, an executor."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from coterie.data.metrics import METRICS
from coterie.data.sequences import ChoiceSet, Classified, DataSet, SequenceSet
from coterie.data.tasks import Examples, ExampleSet, Task
from coterie.data.text import TextSet
from coterie.engines.setting import Fault, Measuring, OwnTests, Setting, Site
from coterie.errors import ConfigError, nearest
from coterie.experiments.bases import check_method, to_train_on, tokens
from coterie.experiments.client_bases import (
    EMULATOR,
    SERVER,
    check_bases,
    check_factored,
    emulated,
    open_bases,
    set_up_bytes,
    specs_of,
    taking_part,
)
from coterie.experiments.config import Config
from coterie.experiments.methods import configured
from coterie.experiments.public_pool import given_bytes, held_as, pool_size, pools_of
from coterie.experiments.shares import UNLABELLED, Shares, chosen_task, client_ids, dealt, share_out
from coterie.maths.keys import Key, root_key
from coterie.models.loading import Base
from coterie.models.targets import check_rank
from coterie.protocol import Card, Traits
from coterie.training.asks import Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.training.lower_choice import Reading, token_count, with_stored_lower
from coterie.training.pool import executor_for, spread
from coterie.training.probe import choose_plan


@dataclass(frozen=True)
class Built:
    """A run made ready. `partition` is the content of partition.json; `majority` what always answering the most
    frequent class (of choices, the most frequent place) would score by the task's first metric: `pooled` on the pooled
    test, `own` on clients' test shares with each client's own most frequent training class, on average; None where
    nothing is classified. `base` is the server's; `places` has the folder or hub name of each base model, by spec."""

    setting: Setting
    executor: Executor
    base: Base
    plan: Plan
    task: Task
    partition: dict[str, Any]
    majority: dict[str, float | None]
    places: dict[str, str]


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
    all_specs = specs_of(config)
    specs = {name: all_specs[name] for name in taking_part(config, all_specs)}
    check_bases(method.traits, specs)
    sampled = sample_size(config, len(specs))
    if config.federation.min_replies > (sampled or len(specs)):
        raise ConfigError(
            f"federation.min_replies is {config.federation.min_replies}, but only {sampled or len(specs)} "
            "clients take part in a round; lower it"
        )
    needed = method.traits.server_data
    if needed is not None and getattr(config.server_data, needed) is None:
        raise ConfigError(
            f"{method.traits.title} needs {needed} data at the server; set training examples aside for it, with "
            f"server_data.{needed}=200"
        )
    if method.traits.shares_data and config.server_data.pool is None:
        raise ConfigError(
            f"{method.traits.title} needs a pool of examples that clients give away; set server_data.pool=0.2"
        )
    task = chosen_task(config)
    shares = share_out(config, task)
    if set(specs.values()) != {SERVER}:
        shares.record["bases"] = specs
    opened = open_bases(config, task, set(specs.values()), root.fold("head"))
    emulation = method.emulation()
    if emulation is not None:
        opened, specs = emulated(opened, emulation, config, specs, root.fold("head"))
    bases, base = opened.bases, opened.bases[SERVER]
    for one in bases.values():
        check_method(method.traits, one)
    check_factored(method.traits, bases)
    ranks = dealt(config.clients.ranks, len(ids))
    told = config.clients
    reference_ranks, routed, trained = (
        [None] * len(ids) if given is None else dealt(given, len(ids))
        for given in (told.reference_ranks, told.routed_experts, told.trained_experts)
    )
    texts = {SERVER: _texts(config, task, base)}
    for spec, one in bases.items():
        # Compressed and emulated models have their original's tokens.
        same = config.clients.ratios is not None or spec == EMULATOR or one is base
        texts.setdefault(spec, texts[SERVER] if same else _texts(config, task, one))
    pools: dict[str, DataSet] = {}
    given: dict[str, int] = {}
    if config.server_data.pool is not None:
        giving = {name: shares.clients[name] for name in specs}
        trains = {spec: read.train for spec, read in texts.items()}
        pools = pools_of(trains, list(giving.values()), root.fold("order", "pool"))
        given = given_bytes(task, giving) if method.traits.shares_data else {}
    sites = {}
    for name, rank, reference, U, L in zip(ids, ranks, reference_ranks, routed, trained, strict=True):
        if name not in specs:
            continue
        own, read = bases[specs[name]], texts[specs[name]]
        check_rank(own.layers, rank, f"client {name}")
        if reference is not None:
            check_rank(own.layers, reference, f"client {name}, reference rank")
        share, scale = shares.clients[name], scale_of(config, rank)
        group = shares.groups[name]
        card = Card(
            name,
            rank,
            len(share["train"]),
            scale,
            own.layers,
            reference,
            U,
            L,
            group=group,
            spec=specs[name],
            width=own.width,
            classes=_classes(read.train),
            pool=pool_size(pools[specs[name]]) if pools else None,
        )
        order = root.fold("order", name)
        data = {p: _shuffled(part, order) for p, part in _with_parts(task, task.train, read.train, share).items()}
        if name in shares.tests:
            held_out = _with_parts(task, task.test, read.test, {"test": shares.tests[name]})
            data |= {p: _shuffled(part, order) for p, part in held_out.items()}
        data |= {"train": to_train_on(data["train"])} | (held_as(specs[name], pools) if pools else {})
        sites[name] = Site(card, data)
    train = texts[SERVER].train
    rank = max(site.card.rank for site in sites.values())
    server_card = Card(
        "server",
        rank,
        0,
        scale_of(config, rank),
        base.layers,
        spec=SERVER,
        width=base.width,
        classes=_classes(train),
        pool=pool_size(pools[SERVER]) if pools else None,
    )
    settings = train_settings(config)
    cohort = sampled or len(specs)
    if plan is None:
        often = cohort / len(specs) * _passes_of_a_round(settings, [site.card.examples for site in sites.values()])
        probed = _plan(config, base, to_train_on(train), settings, max(ranks), cohort)
        plan = _with_lower(config, probed, bases, texts, often)
    setting = Setting(
        algorithm=method,
        sites=sites,
        rounds=config.rounds,
        seed=config.seed,
        sample=sampled,
        min_replies=config.federation.min_replies,
        weights=config.federation.weights,
        head="frozen" if base.is_language else config.federation.head,
        heads={spec: one.head or None for spec, one in bases.items()},
        server_data=_server_data(config, method.traits, task, train, shares)
        | (held_as(SERVER, pools) if pools else {}),
        pooled_test=texts[SERVER].tests.pooled,
        more_tests=texts[SERVER].tests.more,
        pooled_of=_pooled_of(task),
        metrics=task.metrics,
        measuring=Measuring(**config.evaluate.model_dump()),
        faults=tuple(Fault(fault.client, fault.round, fault.kind) for fault in config.faults),
        strict=config.execution.strict,
        server_base=SERVER,
        server_card=server_card,
        given=given,
        own_tests={spec: read.tests for spec, read in texts.items() if read is not texts[SERVER]},
        set_up={spec: size for spec, one in bases.items() if spec != SERVER and (size := set_up_bytes(one))},
    )
    majority: dict[str, float | None] = {"pooled": None, "own": None}
    if task.kind != "instructions":
        majority = {
            "pooled": _majority(task, task.test.labels, task.test.labels),
            "own": _own_majority(task, shares, specs),
        }
    return Built(setting, executor_for(bases, settings, plan), base, plan, task, shares.record, majority, opened.places)


def _classes(data: DataSet) -> int | None:
    """How many classes the examples have, or how many options at most; None of open answers."""
    if isinstance(data, ChoiceSet):
        return int(data.counts.max())
    return data.num_classes if isinstance(data, Classified) else None


@dataclass(frozen=True)
class _Texts:
    """The task's examples as one base model's tokens."""

    train: DataSet
    test: DataSet
    tests: OwnTests


def _texts(config: Config, task: Task, base: Base) -> _Texts:
    """All of the task for one base model."""
    longest = config.model.max_length
    # Limits take the first examples of a set, whose order in the source may follow the classes.
    test = tokens(task, task.test, base, longest)
    more = {
        name: _shuffled(tokens(task, examples, base, longest), root_key(0).fold("pooled", name))
        for name, examples in task.more_tests.items()
    }
    pooled = None if _asks_several(task) else _shuffled(test, root_key(0).fold("pooled"))
    return _Texts(tokens(task, task.train, base, longest), test, OwnTests(pooled, more))


def _pooled_of(task: Task) -> tuple[str, ...]:
    """The further tests that hold the pooled test's examples, each as it is there, so that none need be scored twice.

    Where some parts are of pairs and others are not, the pooled test has all as pairs.
    """
    paired = {one.pairs is not None for one in task.more_tests.values() if isinstance(one, Examples)}
    return tuple(task.parts) if len(paired) < 2 and task.metrics == ("accuracy",) else ()


def _asks_several(task: Task) -> bool:
    """Whether it has questions of several benchmarks, whose tests together are the pooled one."""
    return task.kind == "choices" and bool(task.parts)


def sample_size(config: Config, count: int) -> int | None:
    """How many of `count` clients take part in a round; None for all. A fraction is rounded, at least one client.

    Raises:
        ConfigError: more than there are.
    """
    sample = config.federation.sample
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


def _plan(config: Config, base: Base, train: DataSet, settings: TrainSettings, rank: int, cohort: int) -> Plan:
    execution = config.execution
    chosen = choose_plan(
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
    if execution.clients_per_step != "auto":
        return replace(chosen, workers=execution.workers)
    return spread(chosen, execution.workers, cohort)


def _passes_of_a_round(settings: TrainSettings, examples: Sequence[int]) -> float:
    """How often a client that takes part trains on an example of its own, on average over these clients."""
    if settings.epochs is not None:
        return float(settings.epochs)
    return (settings.steps or 0) * settings.batch_size / max(1.0, sum(examples) / len(examples))


def _with_lower(
    config: Config, plan: Plan, bases: Mapping[str, Base], texts: Mapping[str, _Texts], often: float
) -> Plan:
    """The plan with stored activations where they are wanted; often: passes over an example in a round, on average."""
    execution = config.execution
    if execution.lower == "off":
        return plan
    readings = []
    for spec, base in bases.items():
        read = texts[spec]
        sets = [read.train, read.test, *read.tests.more.values()]
        readings.append(Reading(base, to_train_on(read.train), sum(token_count(one) for one in sets)))
    return with_stored_lower(
        plan, readings, execution.lower, execution.lower_memory, execution.lower_disk, config.rounds * often
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
    data = {name: _shuffled(train.select(held[name]), order.fold(name)) for name in sorted(held)}
    return {name: _without_labels(part) if name == UNLABELLED else to_train_on(part) for name, part in data.items()}


def _without_labels(data: DataSet) -> DataSet:
    """Texts or images whose class, or questions whose right option, nobody can read: -1 everywhere.

    Sequences have no classes, their tokens are all there is.
    """
    if isinstance(data, SequenceSet):
        return data
    if not isinstance(data, TextSet):
        return replace(data, stored_labels=torch.full_like(data.stored_labels, -1))
    # A view of its own, lest a batch of several sets take its classes from the other's store.
    return replace(data, ids=data.ids[:], stored_labels=torch.full_like(data.stored_labels, -1))


def _majority(task: Task, train: np.ndarray, test: np.ndarray) -> float:
    """The score on `test` (n,) of always answering the most frequent class of `train` (m,)."""
    constant = np.full(len(test), np.bincount(train).argmax())
    return METRICS[task.metrics[0]](constant, test)


def _own_majority(task: Task, shares: Shares, names: Collection[str]) -> float | None:
    labels = task.train.labels
    tested = {name: labels[share["test"]] for name, share in shares.clients.items() if "test" in share}
    tested |= {name: task.test.labels[indices] for name, indices in shares.tests.items()}
    found = [
        _majority(task, labels[shares.clients[name]["train"]], own)
        for name, own in tested.items()
        if name in names and len(own) > 0
    ]
    return sum(found) / len(found) if found else None
