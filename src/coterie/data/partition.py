"""Who holds which example: partitioners, and how each client's own examples are split (for the record see `holdings`).

A partitioner is a function `(labels, clients, key, minimum, **its own options)` that returns sorted index arrays;
`PARTITIONERS` names it for configs, `partition_options` says what it takes. One that takes `groups` gets the task's.
"""

from __future__ import annotations

import heapq
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from coterie.data.mixtures import mixture
from coterie.errors import ConfigError, DataError, nearest
from coterie.maths.apportion import dirichlet_shares, largest_remainder
from coterie.maths.keys import Key

Partition = list[np.ndarray]
"""One sorted int64 array of example indices per client; client i of the federation holds part i."""


def make_partition(
    name: str,
    labels: ArrayLike,
    clients: int,
    *,
    key: Key,
    minimum: int = 1,
    groups: Sequence[str] | None = None,
    **options: Any,
) -> Partition:
    """The named partitioner's work. groups: (n,) what each example belongs to, for a partitioner that asks for it.

    Raises:
        ConfigError: unknown partitioner or option, or an option that is missing.
        DataError: what the partitioner refuses, or no groups where it needs them.
    """
    known = partition_options(name)
    for option in options.keys() - set(known):
        raise ConfigError(f"partitioner {name!r} has no option {option!r}{nearest(option, known)}")
    for option in known:
        if option not in options:
            raise ConfigError(f"partitioner {name!r} needs the option {option!r}")
    function = PARTITIONERS[name]
    if "groups" not in inspect.signature(function).parameters:
        return function(labels, clients, key=key, minimum=minimum, **options)
    if groups is None:
        raise DataError(
            f"partitioner {name!r} needs to know what each example belongs to, and this task does not tell; name a "
            "group column of an own file, or take another partitioner"
        )
    return function(labels, clients, groups=groups, key=key, minimum=minimum, **options)


def partition_options(name: str) -> tuple[str, ...]:
    """The options that the named partitioner takes (and needs) beside the number of clients and their minimum.

    Raises:
        ConfigError: unknown partitioner.
    """
    if name not in PARTITIONERS:
        raise ConfigError(f"there is no partitioner {name!r}{nearest(name, PARTITIONERS)}")
    common = {"labels", "clients", "groups", "key", "minimum"}
    return tuple(option for option in inspect.signature(PARTITIONERS[name]).parameters if option not in common)


def iid(labels: ArrayLike, clients: int, key: Key, minimum: int = 1) -> Partition:
    """A random deal; sizes differ by one at most.

    labels: (n,) integers. Returns `clients` disjoint sorted int64 arrays that cover range(n).

    Raises:
        DataError: fewer than clients * minimum examples.
    """
    count = len(_labels(labels, clients, minimum))
    order = key.fold("iid").permutation(count)
    parts: Partition = [np.sort(part) for part in np.array_split(order, clients)]
    return parts


def dirichlet(labels: ArrayLike, clients: int, beta: float, key: Key, minimum: int = 1) -> Partition:
    """Label skew: each class is dealt in proportions from a symmetric Dirichlet(beta) over the clients.

    The allocation of Yurochkin et al., arXiv 1905.12022, section 4, made feasible by construction:
    proportions become whole numbers by largest remainder, and clients below `minimum` are filled from the
    richest. labels: (n,) integers. beta > 0: small is skewed, large is even. Returns as `iid`.

    Raises:
        DataError: fewer than clients * minimum examples, or a beta that is not a positive number.
    """
    classes = _labels(labels, clients, minimum)
    _positive(beta)
    kinds, totals = np.unique(classes, return_counts=True)
    shares = [dirichlet_shares(clients, beta, key.fold("shares", int(kind))) for kind in kinds]
    counts = np.stack([largest_remainder(share * n, int(n)) for share, n in zip(shares, totals, strict=True)])
    return _deal(_fill(counts, minimum), classes, key.fold("deal"))


def quantity(labels: ArrayLike, clients: int, beta: float, key: Key, minimum: int = 1) -> Partition:
    """Quantity skew: sizes in proportions from a symmetric Dirichlet(beta), classes dealt at random.

    As in Li et al. 2022, arXiv 2102.02079, section 4.3, made feasible as in `dirichlet`. labels: (n,) integers.
    beta > 0: small is skewed, large is even. Returns as `iid`.

    Raises:
        DataError: fewer than clients * minimum examples, or a beta that is not a positive number.
    """
    count = len(_labels(labels, clients, minimum))
    shares = dirichlet_shares(clients, _positive(beta), key.fold("sizes"))
    sizes = _fill(largest_remainder(shares * count, count)[None], minimum)[0]
    order = key.fold("deal").permutation(count)
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def shards(labels: ArrayLike, clients: int, shards: int, key: Key, minimum: int = 1) -> Partition:
    """Few classes each: examples sorted by label are cut into clients * shards pieces, `shards` for every client.

    As in McMahan et al. 2017, arXiv 1602.05629, section 3, where a client holds two; pieces are cut so that the
    sizes of clients differ by one at most, whoever gets which. labels: (n,) integers. Returns as `iid`.

    Raises:
        DataError: fewer than clients * minimum examples, or than pieces.
    """
    classes = _labels(labels, clients, minimum)
    if shards < 1 or clients * shards > len(classes):
        most = max(len(classes) // clients, 1)
        raise DataError(
            f"{len(classes)} examples are not enough for {clients} clients with {shards} shards each; take at least 1 "
            f"and at most {most} shards, fewer clients, or more data"
        )
    owners = np.repeat(np.arange(clients), shards)[key.fold("shards").permutation(clients * shards)]
    # One row for each client: the places of its pieces in the sorted order, and how long they are.
    sizes = _even(len(classes), clients)
    lengths = np.empty(clients * shards, dtype=np.int64)
    lengths[np.argsort(owners, kind="stable")] = np.concatenate([_even(int(size), shards) for size in sizes])
    shuffled = key.fold("examples").permutation(len(classes))
    order = shuffled[np.argsort(classes[shuffled], kind="stable")]
    return _held(order, np.repeat(owners, lengths), clients)


def natural(
    labels: ArrayLike, clients: int, groups: Sequence[str] | np.ndarray, key: Key, minimum: int = 1
) -> Partition:
    """By what examples belong to (a hospital, a language): every client holds whole groups, or a part of one.

    With as many clients as groups, client i holds the i-th group in sorted order. With fewer clients, groups are
    dealt whole, the largest first to whoever holds least. With more, each client holds a random part of one group,
    and every group has as many clients as make the smallest part largest. labels: (n,) integers; groups: (n,).
    Returns as `iid`.

    Raises:
        DataError: not one group for each example, or a client that would hold fewer than `minimum`. (Whether whole
            groups can be dealt at all so that everybody has enough is a hard problem; this says what it found.)
    """
    count = len(_labels(labels, clients, minimum))
    names, group = np.unique(np.asarray(groups), return_inverse=True)
    if len(group) != count:
        raise DataError(f"{len(group)} groups for {count} examples: there must be one for each")
    sizes = np.bincount(group, minlength=len(names))
    if clients <= len(names):
        owner = np.arange(clients) if clients == len(names) else _whole_groups(sizes, clients)
        parts = _held(np.arange(count), owner[group], clients)
    else:
        many = _clients_of_groups(sizes, clients)
        parts = []
        for kind in range(len(names)):
            places = np.flatnonzero(group == kind)
            shuffled = places[key.fold("group", kind).permutation(len(places))]
            parts += [np.sort(part).astype(np.int64) for part in np.array_split(shuffled, many[kind])]
    fewest = min(parts, key=len)
    if len(fewest) < minimum:
        held = ", ".join(repr(str(name)) for name in np.unique(names[group[fewest]])[:3]) or "nothing"
        raise DataError(
            f"{len(names)} natural groups do not give {clients} clients {minimum} examples each: one would hold "
            f"{len(fewest)} ({held}); lower the minimum, change the number of clients, or leave small groups out"
        )
    return parts


PARTITIONERS: Mapping[str, Callable[..., Partition]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "quantity": quantity,
    "shards": shards,
    "natural": natural,
    "mixture": mixture,
}


def split(indices: ArrayLike, labels: ArrayLike, fractions: Mapping[str, float], key: Key) -> dict[str, np.ndarray]:
    """Share out one client's examples, for example {"train": 0.8, "test": 0.2}, each class in proportion.

    indices: (m,) into labels (n,). A part has m * fraction examples, rounded up or down, and of every class
    its fraction to within two. Returns sorted int64 arrays of the given indices. A part named "train" is
    never empty.

    Raises:
        DataError: no examples, or fractions that are negative or do not sum to one.
    """
    held, shares = np.asarray(indices, dtype=np.int64).reshape(-1), np.array(list(fractions.values()))
    if not len(held):
        raise DataError("a client without examples cannot be split; raise the partition's minimum")
    if not len(shares) or (shares < 0).any() or not abs(shares.sum() - 1) <= 1e-9:
        given = ", ".join(f"{name} {share:g}" for name, share in fractions.items())
        raise DataError(f"the fractions {given or '(none)'} must be at least 0 and sum to 1")
    owner = np.empty(len(held), dtype=np.int64)
    owner[_by_class(np.asarray(labels)[held], key)] = _even_sequence(shares, len(held))
    names = list(fractions)
    if "train" in fractions and not (owner == names.index("train")).any():
        owner[np.flatnonzero(owner == np.bincount(owner).argmax())[0]] = names.index("train")
    return {name: np.sort(held[owner == part]) for part, name in enumerate(names)}


def _labels(labels: ArrayLike, clients: int, minimum: int) -> np.ndarray:
    values = np.asarray(labels, dtype=np.int64).reshape(-1)
    if clients < 1 or minimum < 0:
        raise DataError(f"{clients} clients of at least {minimum} examples: there must be a client, and no debts")
    if clients * minimum > len(values):
        most, few = len(values) // max(minimum, 1), len(values) // clients
        lower = f" a minimum of at most {few}," if few else ""
        raise DataError(
            f"{len(values)} examples do not give {clients} clients {minimum} each; take at most {most} "
            f"clients,{lower} or more data"
        )
    return values


def _positive(beta: float) -> float:
    if not (math.isfinite(beta) and beta > 0):
        raise DataError(f"the Dirichlet parameter beta is {beta}; it must be a positive number, such as 0.5")
    return beta


def _even(total: int, parts: int) -> np.ndarray:
    """Whole numbers of sum `total`, (parts,) int64, that differ by one at most."""
    return np.diff(np.arange(parts + 1, dtype=np.int64) * total // parts)


def _whole_groups(sizes: np.ndarray, clients: int) -> np.ndarray:
    """The client of each group: the largest group first, to the client that holds least (the first among equals)."""
    owner = np.empty(len(sizes), dtype=np.int64)
    held = [(0, client) for client in range(clients)]
    for group in np.argsort(-sizes, kind="stable"):
        size, client = heapq.heappop(held)
        owner[group] = client
        heapq.heappush(held, (size + int(sizes[group]), client))
    return owner


def _clients_of_groups(sizes: np.ndarray, clients: int) -> np.ndarray:
    """How many clients share each group, at least one: the next goes where parts would still be largest (D'Hondt).

    So the quotients size / number that are used are the largest of all, and no other numbers make the smallest part
    larger.
    """
    many = np.ones(len(sizes), dtype=np.int64)
    heap = [(-size / 2, group) for group, size in enumerate(sizes.tolist())]
    heapq.heapify(heap)
    for _ in range(clients - len(sizes)):
        _, group = heapq.heappop(heap)
        many[group] += 1
        heapq.heappush(heap, (-sizes[group] / (many[group] + 1), group))
    return many


def _fill(counts: np.ndarray, minimum: int) -> np.ndarray:
    """Move examples, one at a time, from the richest client's largest class to the clients below `minimum`.

    counts: (classes, clients). While a client lacks something the richest has more than `minimum`, as the
    whole is enough for all; so this ends, and no donor falls below.
    """
    counts = counts.copy()
    sizes = counts.sum(axis=0)
    heap = [(-int(size), client) for client, size in enumerate(sizes) if size > minimum]
    heapq.heapify(heap)
    for poor in np.flatnonzero(sizes < minimum):
        for _ in range(minimum - int(sizes[poor])):
            held, rich = heapq.heappop(heap)
            kind = counts[:, rich].argmax()
            counts[kind, rich] -= 1
            counts[kind, poor] += 1
            if -held - 1 > minimum:
                heapq.heappush(heap, (held + 1, rich))
    return counts


def _deal(counts: np.ndarray, classes: np.ndarray, key: Key) -> Partition:
    """Give each client its `counts` (classes, clients) of examples, drawn at random within a class."""
    kinds = np.unique(classes)
    owner = np.empty(len(classes), dtype=np.int64)
    for kind, row in zip(kinds, counts, strict=True):
        places = np.flatnonzero(classes == kind)
        owner[places[key.fold("class", int(kind)).permutation(len(places))]] = np.repeat(np.arange(len(row)), row)
    return _held(np.arange(len(classes)), owner, counts.shape[1])


def _held(examples: np.ndarray, owner: np.ndarray, clients: int) -> Partition:
    """The sorted examples (n,) of each client, by the owner (n,) of each."""
    ordered = examples[np.lexsort((examples, owner))].astype(np.int64)
    return np.split(ordered, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _by_class(labels: np.ndarray, key: Key) -> np.ndarray:
    """Positions in random order, except that a class stands together; classes in random order too."""
    kinds, kind = np.unique(labels, return_inverse=True)
    rank = key.fold("classes").permutation(len(kinds))
    shuffled = key.fold("examples").permutation(len(labels))
    return shuffled[np.argsort(rank[kind[shuffled]], kind="stable")]


def _even_sequence(shares: np.ndarray, count: int) -> np.ndarray:
    """Part numbers, (count,) int64, whose first t, for every t, hold each part share * t times, off by < 1.

    Tijdeman's rule for the chairman assignment problem (Discrete Mathematics 32, 1980): of the parts that
    are behind by enough, the one that would soonest be too far behind. So the whole has sizes rounded up or
    down, and every stretch is less than two off.
    """
    enough = 1 / max(2 * len(shares) - 2, 2) - 1e-9  # less the rounding of sums that meet it exactly
    weights, given = shares.tolist(), [0] * len(shares)
    sequence = np.empty(count, dtype=np.int64)
    for place in range(count):
        behind = [share * (place + 1) - had for share, had in zip(weights, given, strict=True)]
        waiting = [part for part, debt in enumerate(behind) if debt >= enough]
        part = min(waiting, key=lambda part: (1 - enough - behind[part]) / weights[part])
        given[part] += 1
        sequence[place] = part
    return sequence
