"""What clients hold of the groups of a task: their validation and test in the same proportions, and the record of it.

FedSEE, Appendix B.3.1: each client's own sets match the mixture that it realised. Validation examples come out of the
client's share, test examples out of the task's test set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.data.holdings import mean_total_variation
from coterie.data.mixtures import composition, matched_tests, wanted_mixtures
from coterie.data.partition import Partition, split
from coterie.data.tasks import Task
from coterie.errors import DataError
from coterie.experiments.config import PartitionSection
from coterie.maths.apportion import largest_remainder
from coterie.maths.keys import Key


def kinds_of(task: Task, section: PartitionSection) -> np.ndarray:
    """What a client's share is split by, (n,) int64: classes, and of a mixture the classes of each group."""
    labels, groups = task.train.labels, task.train.groups
    if section.kind != "mixture" or groups is None:
        return labels
    group = np.unique(np.asarray(groups), return_inverse=True)[1]
    return np.asarray(group * task.num_classes + labels, dtype=np.int64)


def own_shares(
    section: PartitionSection, held: np.ndarray, kinds: np.ndarray, task: Task, key: Key, client: str
) -> dict[str, np.ndarray]:
    """A client's examples `held` (m,) as train, and validation and test where it is to have such out of its share.

    kinds: (n,), see `kinds_of`. A validation of a given size comes first, its groups by largest remainder in the
    proportions of the share; fractions are of the rest.

    Raises:
        DataError: a validation that leaves nothing to train on; it names the client.
    """
    size = section.validation_size
    if size is None:
        return split(held, kinds, _fractions(section), key)
    if size >= len(held):
        raise DataError(
            f"client {client} holds {len(held)} examples, and a validation_size of {size} leaves none to train on; "
            "lower partition.validation_size, take fewer clients, or add data"
        )
    groups = np.zeros(len(kinds), dtype=object) if task.train.groups is None else np.asarray(task.train.groups)
    names, group = np.unique(groups[held].astype(str), return_inverse=True)
    sizes = np.bincount(group, minlength=len(names))
    taken = []
    for m, count in enumerate(largest_remainder(sizes * (size / len(held)), size)):
        share = {"validation": count / sizes[m], "": 1 - count / sizes[m]}
        taken.append(split(held[group == m], kinds, share, key.fold("validation", m))["validation"])
    validation = np.sort(np.concatenate(taken))
    rest = split(np.setdiff1d(held, validation), kinds, _fractions(section), key)
    return {"train": rest.pop("train"), "validation": validation, **rest}


def own_tests(section: PartitionSection, task: Task, parts: Partition, key: Key) -> list[np.ndarray] | None:
    """Each client's test as indices into the task's test set; None where tests come out of the clients' shares.

    Raises:
        DataError: test examples that tell no group, or too few of one.
    """
    if section.test_size is None:
        return None
    trained, tested = task.train.groups, task.test.groups
    if trained is None or tested is None:
        raise DataError(
            f"partition.test_size draws clients' tests by what examples belong to, and task {task.name!r} does not "
            "tell; give partition.test_fraction in its place, or take the task mixture"
        )
    names = sorted(set(trained))
    held = np.stack([composition(part, names, trained) for part in parts])
    return matched_tests(held / held.sum(axis=1, keepdims=True), names, tested, section.test_size, key.fold("tests"))


def add_tests(record: dict[str, Any], tests: Sequence[np.ndarray]) -> None:
    """Puts clients' tests out of the task's test set into partition.json's content."""
    for held, test in zip(record["clients"], tests, strict=True):
        held["test"] = test.tolist()
    times = np.bincount(np.concatenate(tests))
    record["tests"] = {
        "indices_into": "the task's test set",
        "examples": int((times > 0).sum()),
        "of_several_clients": int((times > 1).sum()),
    }


def add_mixtures(
    record: dict[str, Any],
    section: PartitionSection,
    groups: Sequence[str],
    rest: np.ndarray,
    parts: Partition,
    key: Key,
) -> None:
    """Puts each client's mixture, asked for and realised, into partition.json's content, and what of groups is used.

    groups: (n,) of all training examples; rest: those that were to be shared out; key: of the partitioner.
    """
    names = sorted({groups[index] for index in rest})
    asked = wanted_mixtures(names, len(parts), section.alpha, section.weights, section.floor, key)
    held = np.stack([composition(part, names, groups) for part in parts])
    for client, wanted, counts in zip(record["clients"], asked, held, strict=True):
        client["mixture"] = {"requested": _named(names, wanted), "realised": _named(names, counts / counts.sum())}
    supply, used = composition(rest, names, groups).tolist(), held.sum(axis=0).tolist()
    record["mixture"] = {
        "groups": names,
        "supply": dict(zip(names, supply, strict=True)),
        "allocated": dict(zip(names, used, strict=True)),
        "mean_total_variation": mean_total_variation(held),
    }


def _named(names: Sequence[str], values: np.ndarray) -> Mapping[str, float]:
    return {name: float(value) for name, value in zip(names, values, strict=True) if value > 0}


def _fractions(section: PartitionSection) -> dict[str, float]:
    """Of a client's examples, the share of each data set that it is to have."""
    held = {"validation": section.validation_fraction, "test": section.test_fraction}
    return {"train": 1 - sum(held.values())} | {name: share for name, share in held.items() if share > 0}
