"""What each client contributes to each expert, and what follows for the client: FedSEE's assignments and targets.

A client's contributions are a column (M,) fp64 of the matrix C (M, N), known by the client's id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.protocol import UsageDivergence, message


@message
class Assignment:
    """Of M experts: those that a client routes to, those of them that it trains, and its mixture target (M,).

    The target is zero outside `inference` and sums to one.
    """

    inference: tuple[int, ...]
    active: tuple[int, ...]
    target: tuple[float, ...]


def assigned(column: Tensor, inference: int, training: int, floor: float) -> Assignment:
    """Assign of FedSEE's Algorithm 1 (lines 33-39) on a client's column c (M,); U_i is `inference`, L_i `training`.

    Among equal contributions the lower expert counts. Where none reaches the floor tau, the first alone is trained. A
    client that contributes nothing to any has them all for a target alike.
    """
    ranked = column.sort(descending=True, stable=True).indices[:inference]  # line 34
    kept = torch.zeros_like(column).index_put((ranked,), column[ranked])
    if not float(kept.sum()) > 0:
        kept = torch.zeros_like(column).index_fill(0, ranked, 1.0)
    target = kept / kept.sum()  # line 35
    reaching = [m for m in ranked.tolist() if float(target[m]) >= floor]
    active = reaching[:training] or ranked[:1].tolist()  # line 36
    return Assignment(tuple(sorted(ranked.tolist())), tuple(sorted(active)), tuple(target.tolist()))


def smoothed(before: Mapping[str, Tensor], found: Mapping[str, Tensor], rate: float, clients: int) -> dict[str, Tensor]:
    """C <- (1 - rate) C + rate C* (Eq. 15), for the clients of the pool; who is not in it keeps its column.

    Columns of C* sum to M / N_pool, those of C to M / N: what was found is brought to that. A client without a column
    takes over what was found.
    """
    share = len(found) / clients
    moved = {
        name: share * column if name not in before else (1 - rate) * before[name] + rate * share * column
        for name, column in found.items()
    }
    return {**before, **moved}


def warm_start(contributions: Mapping[str, Tensor], owners: Sequence[str], experts: int, clients: int) -> Tensor:
    """The weights (M, P) fp64 that contributions speak for: c_mi spread evenly over the columns of client i.

    owners: the client of each column. A client without contributions counts as one of N equals.
    """
    equal, columns = torch.full((experts,), 1 / clients, dtype=torch.float64), Counter(owners)
    return torch.stack([contributions.get(name, equal) / columns[name] for name in owners], dim=1)


def calibrating(
    kind: Literal["mixture", "uniform", "none"], beta: float, assignment: Assignment
) -> list[UsageDivergence]:
    """The KL term of Eq. 14: towards the client's target, or equally towards all that it routes to, or none."""
    target = torch.tensor(assignment.target)
    if kind == "uniform":
        target = torch.zeros_like(target)
        target[list(assignment.inference)] = 1 / len(assignment.inference)
    return [] if kind == "none" or beta == 0 else [UsageDivergence(target, beta)]


def concentration(contributions: Mapping[str, Tensor], tasks: Sequence[str]) -> dict[str, Any]:
    """Each client's contributions by task, as shares that sum to one, and the mean of clients' largest shares."""
    columns = {name: column / column.sum().clamp(min=1e-12) for name, column in contributions.items()}
    told = {name: dict(zip(tasks, column.tolist(), strict=True)) for name, column in columns.items()}
    largest = [max(shares.values()) for shares in told.values()]
    return {"concentration": sum(largest) / len(largest), "contributions": told} if largest else {}
