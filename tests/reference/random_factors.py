"""Random factors, and hypothesis strategies for them, for tests of factored routines."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.maths.keys import Key

Pairs = list[tuple[Tensor, Tensor]]

bounded = settings(max_examples=60, deadline=None, derandomize=True)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return Key(seed).fold("test", *shape).normal(shape, dtype=dtype)


def pair(seed: int, m: int, r: int, n: int, *batch: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return normal(2 * seed, *batch, m, r, dtype=dtype), normal(2 * seed + 1, *batch, r, n, dtype=dtype)


def with_spectrum(seed: int, m: int, n: int, spectrum: Tensor) -> tuple[Tensor, Tensor]:
    """Factors whose product has exactly these singular values, in a gauge that hides them."""
    q = len(spectrum)
    U = torch.linalg.qr(normal(seed, m, q)).Q
    V = torch.linalg.qr(normal(seed + 1, n, q)).Q
    G = normal(seed + 2, q, q) + 3 * torch.eye(q, dtype=torch.float64)
    return U * spectrum @ G, torch.linalg.solve(G, V.mT)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[Pairs, list[float]]:
    """A few clients of unequal ranks with weights; ranks may exceed m and n, weights and ranks may be 0."""
    m, n = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    ranks = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    seed = draw(st.integers(0, 10_000))
    weights = [draw(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 2.0])) for _ in ranks]
    pairs = [pair(seed + i, m, r, n) for i, r in enumerate(ranks)]
    kind = draw(st.sampled_from(["generic", "dependent", "one zero", "all zero"]))
    if kind == "dependent":
        pairs = [(B[:, :1].expand_as(B), A) for B, A in pairs]
    if kind == "one zero":
        pairs[0] = (torch.zeros_like(pairs[0][0]), pairs[0][1])
    if kind == "all zero":
        pairs = [(torch.zeros_like(B), A) for B, A in pairs]
    return pairs, weights
