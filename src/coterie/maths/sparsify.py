"""Keeping the few entries of a matrix that matter most, or a few at random.

Source of importance and adaptive ratio: FedSRD (arXiv 2510.04601), client side; random masks: its server side.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from coterie.maths.keys import Key


def importance_of_A(delta: Tensor, B: Tensor) -> Tensor:
    """|dA_kj| ||column k of B||, for dA (r, n) and B (m, r): how far entry (k, j) moves B A. fp64."""
    weights: Tensor = torch.linalg.vector_norm(B.double(), dim=-2)
    return delta.double().abs() * weights.unsqueeze(-1)


def importance_of_B(delta: Tensor, A: Tensor) -> Tensor:
    """|dB_ik| ||row k of A||, for dB (m, r) and A (r, n). fp64."""
    weights: Tensor = torch.linalg.vector_norm(A.double(), dim=-1)
    return delta.double().abs() * weights


def kurtosis(values: Tensor) -> float:
    """Pearson's, m_4 / m_2^2, of all entries: 3 for a Gaussian, 1 at least; 1 where all entries are equal."""
    apart = values.double().flatten()
    apart = apart - apart.mean()
    second = float(apart.square().mean())
    return float(apart.pow(4).mean()) / second**2 if second > 0 else 1.0


def pruning_ratio(importance: Tensor, base: float, growth: float, most: float) -> float:
    """base + min(most, growth log(max(kurtosis, 1))): the more a few entries stand out, the fewer are kept."""
    return base + min(most, growth * math.log(max(kurtosis(importance), 1.0)))


def kept_count(entries: int, ratio: float) -> int:
    """How many of so many different values lie at or above their `ratio` quantile (linear interpolation)."""
    return entries - math.ceil(ratio * (entries - 1) - 1e-9)


def at_least_quantile(values: Tensor, ratio: float) -> Tensor:
    """bool, the shape of `values`: which lie at or above their `ratio` quantile; ties with it are kept."""
    flat = values.flatten()
    threshold = flat.kthvalue(flat.numel() - kept_count(flat.numel(), ratio) + 1).values
    return values >= threshold


def same_mass(delta: Tensor, kept: Tensor) -> Tensor:
    """`delta` with the entries outside `kept` 0, the others scaled so that ||delta||_1 stays; in delta's dtype."""
    rest = torch.where(kept, delta.double(), 0.0)
    mass = float(rest.abs().sum())
    factor = float(delta.double().abs().sum()) / mass if mass > 0 else 1.0
    return (factor * rest).to(delta.dtype)


def random_mask(shape: tuple[int, ...], ratio: float, key: Key) -> Tensor:
    """bool: all but a share `ratio` of the entries, at least one, drawn without replacement."""
    entries = math.prod(shape)
    mask = torch.zeros(entries, dtype=torch.bool)
    taken = random_count(entries, ratio)
    least = np.argpartition(key.bits(entries), taken - 1)[:taken]  # the first of `key.permutation`, without their order
    mask[torch.from_numpy(least)] = True
    return mask.view(shape)


def random_count(entries: int, ratio: float) -> int:
    """How many entries `random_mask` takes."""
    return max(1, round((1 - ratio) * entries))
