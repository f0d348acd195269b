"""A change of some entries of a matrix: which entries, drawn at random, and the low-rank part of what they became."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from coterie.maths.keys import Key
from coterie.maths.lowrank import canonical_signs
from coterie.maths.stacking import Factors


@lru_cache(maxsize=512)
def random_places(key: Key, entries: int, count: int) -> Tensor:
    """int32 (count,), ascending: which of so many entries are meant, all subsets alike likely.

    Kept, since every client of a round asks for the same; not to be written into.
    """
    chosen = torch.from_numpy(key.permutation(entries)[:count]).sort().values
    return chosen.to(torch.int32)


@torch.no_grad()
def low_rank_part(D: Tensor, rank: int) -> Factors:
    """B = U_r S_r (m, rank) and A = V_r^T (rank, n): the best approximation of D (m, n), by one SVD in fp64.

    For a dense D; of a product, `lowrank.truncate` costs far less. Columns and rows beyond the rank of D, as far as
    rounding lets it be known, are 0. Signs are canonical. Source: SLoRA (arXiv 2308.06522), the switch of stages.

    Returns:
        Both in D's dtype.
    """
    U, S, Vh = torch.linalg.svd(D.double(), full_matrices=False)
    U, Vh = canonical_signs(U[:, :rank], Vh[:rank])
    rounding = 10 * torch.finfo(S.dtype).eps * torch.linalg.vector_norm(D.double(), dim=0).sum()
    S = S[:rank].masked_fill(S[:rank] <= rounding, 0)
    extra = rank - len(S)
    B, A = U * S, Vh.where(S[:, None] > 0, 0)
    pad = torch.nn.functional.pad
    return pad(B, (0, extra)).to(D.dtype), pad(A, (0, 0, 0, extra)).to(D.dtype)
