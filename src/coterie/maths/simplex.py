"""Weights on simplices: Euclidean projection, and Sinkhorn scaling by blocks of columns."""

from __future__ import annotations

import torch
from torch import Tensor

SWEEPS, FLOOR = 20, 1e-12


@torch.no_grad()
def project_rows(values: Tensor) -> Tensor:
    """The point of the simplex that is nearest to each row (..., P), in the dtype given (Held, Wolfe, Crowder 1974).

    A row's entries all fall by one threshold, and what would be negative is zero.

    Raises:
        ValueError: rows of no entries.
    """
    if values.shape[-1] == 0:
        raise ValueError("a row of no entries cannot sum to one")
    falling = values.sort(dim=-1, descending=True).values
    excess = falling.cumsum(dim=-1) - 1
    places = torch.arange(1, values.shape[-1] + 1, device=values.device, dtype=values.dtype)
    kept = (falling * places > excess).sum(dim=-1, keepdim=True).clamp(min=1)
    threshold = excess.gather(-1, kept - 1) / kept
    return (values - threshold).clamp(min=0)


@torch.no_grad()
def block_sums(omega: Tensor, owners: Tensor, clients: int) -> Tensor:
    """C (M, N), c_mi = sum of omega_mp over the columns p of client i; omega (M, P), owners (P,) int64 below N."""
    return omega.new_zeros(len(omega), clients).index_add_(1, owners, omega)


@torch.no_grad()
def balanced(omega: Tensor, owners: Tensor, clients: int, sweeps: int = SWEEPS, floor: float = FLOOR) -> Tensor:
    """Sinkhorn scaling of omega (M, P) to rows that sum to one and clients' blocks that sum to M / N (FedSEE, C.2).

    Columns of one client, by `owners` (P,), are scaled together: omega_mp <- u_m omega_mp v_owner(p), the projection
    in Kullback-Leibler divergence, so that proportions within a block stay. Entries are at least `floor` before.
    After so many sweeps rows hold exactly, since it ends with them, and blocks to what the sweeps leave.

    Raises:
        ValueError: a client without a column, whose block could sum to nothing.
    """
    held = int((torch.bincount(owners, minlength=clients) > 0).sum())
    if held < clients:
        raise ValueError(f"of {clients} clients only {held} have a column; leave the others out")
    kept = omega.clamp(min=floor)
    C = block_sums(kept, owners, clients)
    u, v = C.new_ones(len(C)), C.new_ones(clients)
    for _ in range(sweeps):
        v = (len(C) / clients) / (u @ C)
        u = 1 / (C @ v)
    return u[:, None] * kept * v[owners]
