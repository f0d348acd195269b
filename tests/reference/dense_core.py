"""Cores the slow way: one dense matrix a head."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.protocol import Core


def dense_core(term: Core) -> Tensor:
    """sum_j s_j U_j H_j V_j of one client, head by head."""
    r = term.core.shape[-1]
    total = torch.zeros(term.U.shape[0], term.V.shape[1], dtype=term.core.dtype)
    for j in range(term.core.shape[0]):
        H = term.core[j] if term.gain is None else term.gain[j] * term.core[j]
        total = total + term.U[:, j * r : (j + 1) * r] @ H @ term.V[j * r : (j + 1) * r]
    return total
