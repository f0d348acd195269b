"""Compound heterogeneity: clients that hold mixtures of groups (of the tasks of a mixture), and sets that match them.

FedSEE, Appendix B.3. A group is what an example belongs to; of M groups, m = 0 … M - 1 is a place in the sorted order
of their names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from coterie.errors import DataError, nearest
from coterie.maths.apportion import dirichlet_shares, largest_remainder
from coterie.maths.keys import Key

Point = Sequence[float] | Mapping[str, float]
"""A mixture as it is prescribed: a number for each group in sorted order, or by name (0 where a name is missing)."""


def mixture(
    labels: ArrayLike,
    clients: int,
    groups: Sequence[str] | np.ndarray,
    alpha: float | None,
    weights: Sequence[Point] | None,
    floor: float,
    key: Key,
    minimum: int = 1,
) -> list[np.ndarray]:
    """Every client has a mixture of the groups, and examples of each in proportion, as far as the groups last (B.3.2).

    The mixtures are those of `wanted_mixtures`, the numbers of examples those of `allocation`, or for alpha = 0 of
    `pure_allocation`. Which examples of a group these are is drawn; what nobody asked for is left out. Nothing is drawn
    again where a client has too little. labels: (n,) integers; groups: (n,). Returns `clients` disjoint sorted int64
    arrays.

    Raises:
        DataError: what `wanted_mixtures` or `pure_allocation` refuses, not one group for each example, or a client
            that would hold fewer than `minimum`.
    """
    names, group = np.unique(np.asarray(groups), return_inverse=True)
    if len(group) != np.size(labels):
        raise DataError(f"{len(group)} groups for {np.size(labels)} examples: there must be one for each")
    supply = np.bincount(group, minlength=len(names))
    wanted = wanted_mixtures(names, clients, alpha, weights, floor, key)
    counts = pure_allocation(supply, clients) if alpha == 0 else allocation(wanted, supply)
    poorest = int(counts.sum(axis=1).argmin())
    if counts[poorest].sum() < minimum:
        asked = ", ".join(f"{name} {w:.2f}" for name, w in zip(names, wanted[poorest], strict=True) if w > 0)
        raise DataError(
            f"a mixture of {len(group)} examples gives client {poorest} of {clients} only {counts[poorest].sum()} "
            f"({asked}), and the minimum is {minimum}; lower the minimum, take fewer clients, another seed or more data"
        )
    owner = np.full(len(group), -1, dtype=np.int64)
    for kind, taken in enumerate(counts.T):
        places = np.flatnonzero(group == kind)
        shuffled = places[key.fold("group", kind).permutation(len(places))]
        owner[shuffled[: taken.sum()]] = np.repeat(np.arange(clients), taken)
    return [np.flatnonzero(owner == client) for client in range(clients)]


def wanted_mixtures(
    names: Sequence[str] | np.ndarray,
    clients: int,
    alpha: float | None,
    weights: Sequence[Point] | None,
    floor: float,
    key: Key,
) -> np.ndarray:
    """The mixture of groups that each client is to have, (clients, M) float64, rows on the simplex.

    names: the M groups, sorted. One of alpha and weights is given. alpha = 0: one group for each client, dealt in
    turn, nothing is drawn. alpha > 0: one draw for each client from the symmetric Dirichlet(alpha), of which weights
    below `floor` become 0 and the rest sums to 1 again. weights: the mixtures themselves, to which no floor applies.

    Raises:
        DataError: neither or both are given, an alpha or floor without sense, a floor above all weights of a client, or
            weights that are no points of the simplex.
    """
    count = len(names)
    if (alpha is None) == (weights is None):
        raise DataError("a mixture partition needs alpha or weights, one of them; alpha: 0.5 draws every client's own")
    if weights is not None:
        if len(weights) != clients:
            raise DataError(f"weights has {len(weights)} mixtures for {clients} clients; give one for each")
        return np.stack([_point(point, [*map(str, names)], client) for client, point in enumerate(weights)])
    assert alpha is not None
    if not (math.isfinite(alpha) and alpha >= 0 and 0 <= floor < 1):
        raise DataError(f"alpha is {alpha} and floor {floor}; alpha must be at least 0, floor in 0 … 1, such as 0.05")
    if alpha == 0:
        return np.eye(count)[np.arange(clients) % count]
    drawn = np.stack([dirichlet_shares(count, alpha, key.fold("mixture", client)) for client in range(clients)])
    kept = np.where(drawn < floor, 0.0, drawn)
    if not kept.any(axis=1).all():
        raise DataError(f"a floor of {floor} leaves a client without any of {count} groups; take one below 1 / {count}")
    return np.asarray(kept / kept.sum(axis=1, keepdims=True))


def allocation(mixtures: np.ndarray, supply: np.ndarray) -> np.ndarray:
    """How many examples of each group every client gets, (clients, M) int64.

    mixtures: (clients, M), rows on the simplex; supply: (M,) int64. All clients have one budget, the whole supply
    divided by their number, rounded down, and ask for it in the proportions of their mixture. Of a group of which more
    is asked for than there is, all requests are reduced in proportion, until their sum is the supply. What is left of
    the others stays unallocated. Both roundings to whole numbers are by largest remainder, which the paper leaves open.
    """
    budget = int(supply.sum()) // len(mixtures)
    asked = np.stack([largest_remainder(row * budget, budget) for row in mixtures])
    total = asked.sum(axis=0)
    columns = [
        largest_remainder(asked[:, m] * (supply[m] / total[m]), int(supply[m])) if total[m] > supply[m] else asked[:, m]
        for m in range(len(supply))
    ]
    return np.stack(columns, axis=1)


def pure_allocation(supply: np.ndarray, clients: int) -> np.ndarray:
    """As `allocation`, for clients of one group each, client i of group i mod M: all of supply (M,) is dealt out.

    A group is divided evenly between its clients; the last of them gets the remainder too.

    Raises:
        DataError: fewer clients than groups.
    """
    count = len(supply)
    if clients < count:
        raise DataError(
            f"alpha = 0 gives each client one group, and {clients} clients cannot hold {count} groups; take at least "
            f"{count} clients, or prescribe weights, which may leave a group out"
        )
    counts = np.zeros((clients, count), dtype=np.int64)
    for m, size in enumerate(supply.tolist()):
        mine = np.arange(m, clients, count)
        counts[mine, m] = size // len(mine)
        counts[mine[-1], m] += size % len(mine)
    return counts


def matched_tests(
    mixtures: np.ndarray, names: Sequence[str] | np.ndarray, groups: Sequence[str] | np.ndarray, size: int, key: Key
) -> list[np.ndarray]:
    """For each client, `size` examples of a common pool, its groups in the proportions of the client's mixture.

    mixtures: (clients, M); names: the M groups; groups: (n,) of the pool. Numbers are by largest remainder. No example
    is twice in a client's set; clients take a group's examples in turn, so two sets overlap only where all clients
    together ask for more of a group than there is. Returns sorted int64 indices into the pool.

    Raises:
        DataError: a client that asks for more of a group than the pool has.
    """
    asked = np.stack([largest_remainder(row * size, size) for row in mixtures])
    belongs = np.asarray(groups)
    found: list[list[np.ndarray]] = [[] for _ in asked]
    for m, name in enumerate(names):
        places = np.flatnonzero(belongs == name)
        client = int(asked[:, m].argmax())
        if asked[client, m] > len(places):
            raise DataError(
                f"client {client} is to be tested on {asked[client, m]} examples of {str(name)!r}, and the test pool "
                f"has {len(places)}; lower test_size to at most {size * len(places) // asked[client, m]}"
            )
        shuffled = places[key.fold("test", str(name)).permutation(len(places))]
        start = 0
        for own, number in zip(found, asked[:, m].tolist(), strict=True):
            own.append(shuffled[(start + np.arange(number)) % max(len(places), 1)])
            start += number
    return [np.sort(np.concatenate(own)) for own in found]


def composition(indices: np.ndarray, names: Sequence[str] | np.ndarray, groups: Sequence[str]) -> np.ndarray:
    """How many of the examples at `indices` are of each of the M groups called `names`, (M,) int64."""
    held = Counter(groups[index] for index in indices)
    return np.array([held[str(name)] for name in names], dtype=np.int64)


def _point(point: Point, names: list[str], client: int) -> np.ndarray:
    """A prescribed mixture as (M,) float64."""
    if isinstance(point, Mapping):
        for name in point:
            if name not in names:
                raise DataError(f"weights of client {client}: there is no group {name!r}{nearest(name, names)}")
        values = np.array([float(point.get(name, 0.0)) for name in names])
    else:
        values = np.array([float(value) for value in point])
    if len(values) != len(names):
        raise DataError(f"weights of client {client}: {len(values)} numbers for the groups {', '.join(names)}")
    if not (values >= 0).all() or not abs(values.sum() - 1) <= 1e-6:
        raise DataError(f"weights of client {client} sum to {values.sum():.7g}; they must be at least 0 and sum to 1")
    return np.asarray(values / values.sum())
