"""SeFoRA (arXiv 2608.10144), Lemma 2: what sketches of a product lose, and what sizes of them buy.

A tuple of layers obeys the same inequality with sums over layers; what stands here is of one product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.maths.keys import Key
from coterie.maths.sketch import error_bound, sketch, sketch_matrices, tail_energies, unsketch

BYTES = 4
"""Bytes of a scalar on the wire, fp32."""


class Lemma2(NamedTuple):
    """Both sides of Lemma 2, squared Frobenius norms: the bound and the mean over draws of ||What - W||_F^2."""

    bound: float
    measured: float


def lemma_2(B: Tensor, A: Tensor, r: int, k: int, key: Key, draws: int = 20) -> Lemma2:
    """Both sides of Lemma 2 for W = B A, the expectation as a mean over `draws` of Omega and Psi.

    The mean of few draws may lie above the bound where k is r + 2: the error's variance is infinite there.

    Args:
        B, A: factors (m, q) and (q, n). r: columns, 2 ... m. k: rows, > r + 1.

    Raises:
        ValueError: sizes outside these ranges.
    """
    m, n = B.shape[-2], A.shape[-1]
    B, A = B.double(), A.double()
    W = B @ A
    bound = float(error_bound(torch.linalg.svdvals(W), r, k))
    errors = []
    for draw in range(draws):
        Omega, Psi = sketch_matrices(key.fold(draw), m, n, r, k)
        left, right = unsketch(*sketch(B, A, Omega, Psi), Psi)
        errors.append(float((left @ right - W).square().sum()))
    return Lemma2(bound, math.fsum(errors) / draws)


@dataclass(frozen=True)
class SketchSize:
    """What r columns and k rows buy of a spectrum; errors are relative to ||W||_F.

    bytes_up: one upload of the layer. bound: the root of Lemma 2's bound. floor: the same with k without limit.
    least: what the best approximation of rank r loses. k_needed: the fewest rows whose bound meets the tolerance, None
    where no k is enough.
    """

    r: int
    k: int
    bytes_up: int
    bound: float
    floor: float
    least: float
    k_needed: int | None


def sketch_sizes(spectrum: Tensor, budget: int, d_out: int, d_in: int, tolerance: float = 0.1) -> list[SketchSize]:
    """For every r that the budget admits, the most rows it leaves and what they buy, the best bound first.

    Lemma 2 is a bound on an expectation and mostly a loose one: it ranks sizes and says for which r no k can be shown
    to be enough, not what a draw will lose.

    Args:
        spectrum: singular values of the mean product W (q,), descending, not all zero.
        budget: bytes of one layer's upload, d_out r + k d_in scalars of fp32.
        tolerance: the relative error that is to be met.

    Raises:
        ValueError: a spectrum without energy, a tolerance that is not positive, or a budget below r = 2, k = 4.
    """
    tails = tail_energies(spectrum)
    energy = float(tails[0])
    if energy <= 0 or not tolerance > 0:
        raise ValueError(
            f"a spectrum with energy and a positive tolerance are needed, not {energy:g} and {tolerance:g}"
        )
    found = []
    for r in range(2, min(d_out, d_in) + 1):
        k = (budget // BYTES - d_out * r) // d_in
        if k <= r + 1:
            break
        floor = float(error_bound(spectrum, r, math.inf)) / energy
        found.append(
            SketchSize(
                r=r,
                k=k,
                bytes_up=(d_out * r + k * d_in) * BYTES,
                bound=math.sqrt(float(error_bound(spectrum, r, k)) / energy),
                floor=math.sqrt(floor),
                least=math.sqrt(float(tails[min(r, len(tails) - 1)]) / energy),
                k_needed=_rows(floor, r, tolerance**2),
            )
        )
    if not found:
        least = (2 * d_out + 4 * d_in) * BYTES
        raise ValueError(f"{budget} bytes are below the smallest sketch with a bound, {least} (r = 2, k = 4)")
    return sorted(found, key=lambda size: (size.bound, size.bytes_up))


def _rows(floor: float, r: int, target: float) -> int | None:
    """The smallest k > r + 1 with (1 + r / (k - r - 1)) floor <= target; None where the floor is not below it."""
    if floor == 0:
        return r + 2
    if floor >= target:
        return None
    return r + 1 + max(1, math.ceil(r / (target / floor - 1)))
