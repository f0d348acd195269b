"""FedSEE's extraction as the paper writes it: entry by entry, client by client."""

from __future__ import annotations

import torch
from torch import Tensor


def nearest_by_bisection(values: Tensor) -> Tensor:
    """Each row (P,) projected onto the simplex: the threshold at which positive parts sum to one, by bisection."""
    rows = []
    for row in values:
        low, high = float(row.min()) - 1, float(row.max())
        for _ in range(200):
            middle = (low + high) / 2
            if float((row - middle).clamp(min=0).sum()) > 1:
                low = middle
            else:
                high = middle
        rows.append((row - (low + high) / 2).clamp(min=0))
    return torch.stack(rows)


def scaled_one_by_one(omega: Tensor, owners: list[int], sweeps: int) -> Tensor:
    """Sinkhorn sweeps on the weights themselves: blocks of a client to M / N, then rows to one."""
    now = [[max(float(entry), 1e-12) for entry in row] for row in omega]
    M, N = len(now), len(set(owners))
    for _ in range(sweeps):
        for client in range(N):
            held = sum(now[m][p] for m in range(M) for p, owner in enumerate(owners) if owner == client)
            for m in range(M):
                for p, owner in enumerate(owners):
                    if owner == client:
                        now[m][p] *= M / N / held
        for m in range(M):
            total = sum(now[m])
            now[m] = [entry / total for entry in now[m]]
    return torch.tensor(now, dtype=torch.float64)


def routing_divergence(target: list[float], weights: Tensor, counts: list[bool]) -> float:
    """KL(target || mean of `weights` (N, M) over the positions that count), the mean clamped at 1e-8."""
    held = [row for row, there in zip(weights, counts, strict=True) if there]
    total = 0.0
    for expert, share in enumerate(target):
        if share > 0:
            mean = sum(float(row[expert]) for row in held) / len(held)
            total += share * float(torch.log(torch.tensor(share / max(mean, 1e-8), dtype=torch.float64)))
    return total
