"""What the uploads alone tell: vertices by successive projection, centres by clustering, and how far both are off."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.maths.clusters import average_linkage
from coterie.theory.fedsee.geometry import distances


def successive_projection(pool: Tensor, M: int) -> list[int]:
    """Indices of M uploads that span the pool (N, l, r) best: the farthest from the mean, then always the farthest from
    the affine hull of those chosen.

    The successive projection algorithm (Araujo et al. 2001) for points of a simplex: a convex function is largest at a
    vertex, so in exact pools with pure clients it finds the vertices, where h > 0. The lowest index wins among equals.

    Raises:
        ValueError: fewer uploads than vertices.
    """
    if len(pool) < M:
        raise ValueError(f"{len(pool)} uploads do not have {M} vertices")
    left = pool.flatten(1) - pool.flatten(1).mean(dim=0)
    chosen = [int(left.square().sum(dim=1).argmax())]
    left = left - left[chosen[0]]
    for _ in range(M - 1):
        energies = left.square().sum(dim=1)
        energies[chosen] = -1.0
        chosen.append(int(energies.argmax()))
        direction = left[chosen[-1]].clone()
        energy = direction @ direction
        if float(energy) > 0:
            left = left - torch.outer(left @ direction / energy, direction)
    return chosen


def cluster_centres(pool: Tensor, M: int) -> Tensor:
    """The means (M, l, r) of M clusters of the pool by average linkage of Frobenius distances: hard clustering."""
    if len(pool) < M:
        raise ValueError(f"{len(pool)} uploads do not make {M} clusters")
    labels = torch.tensor(average_linkage(distances(pool, pool))[M - 1])
    return torch.stack([pool[labels == k].mean(dim=0) for k in range(M)])


def identity_error(found: Tensor, Theta: Tensor) -> float:
    """max_m ||found_m - theta_m*||_F: the estimate is read in its own order."""
    return float((found - Theta).flatten(1).norm(dim=1).max())


def vertex_set_error(found: Tensor, Theta: Tensor) -> float:
    """min over matchings of max_m ||found_pi(m) - theta_m*||_F: the most favourable relabelling.

    The least bound under which distances have a perfect matching, by bisection over their values; M^4 log M at worst.
    """
    apart = distances(found, Theta)
    values = apart.flatten().sort().values
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if _has_matching((apart <= values[middle]).tolist()):
            high = middle
        else:
            low = middle + 1
    return float(values[low])


def _has_matching(allowed: list[list[bool]]) -> bool:
    """Whether every row has a column of its own, by augmenting paths."""
    owner = [-1] * len(allowed)

    def place(row: int, seen: set[int]) -> bool:
        for column, may in enumerate(allowed[row]):
            if may and column not in seen:
                seen.add(column)
                if owner[column] < 0 or place(owner[column], seen):
                    owner[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(allowed)))
