"""Frozen random bases that both sides draw from a seed."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from coterie.maths.keys import Key


@lru_cache(maxsize=256)
def orthonormal_columns(key: Key, length: int, count: int) -> Tensor:
    """`count` orthonormal columns: Gram-Schmidt of Gaussian ones.

    Drawn column by column in float32 and made orthogonal by QR in float64 with a positive diagonal of R, which makes
    them the same everywhere up to rounding; fewer columns are the first ones. Kept in memory, since every client of
    every round wants the same: do not write into them.

    Returns:
        (length, count) in float32.

    Raises:
        ValueError: more columns than a space of that dimension has.
    """
    if count > length:
        raise ValueError(f"there are no {count} orthogonal columns of length {length}")
    Q, R = torch.linalg.qr(key.normal((count, length)).mT.double())
    signed: Tensor = Q * torch.where(R.diagonal() < 0, -1.0, 1.0)
    return signed.float().contiguous()


@lru_cache(maxsize=256)
def gaussian_columns(key: Key, length: int, count: int) -> Tensor:
    """`count` Gaussian columns of expected norm 1, entries N(0, 1 / length); (length, count), as above otherwise."""
    return key.normal((count, length), std=length**-0.5).mT.contiguous()
