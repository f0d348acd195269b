"""What the randomised best rank loses on spectra of known shape (`python benchmarks/server.py --randomised`).

One layer of 1024 x 1024 whose ten clients' stacked rank is 380, just above a third of it, and R = 16. The sum of their
products has exactly these singular values, with vectors drawn at random:

    flat       1, 1, 1, ...                 nothing to find: any sixteen directions are as good as others
    slow       1 / sqrt(j)
    decaying   0.9^j
    step       sixteen of 1, the rest 0.3   a gap at R, and much of the energy below it
    sharp      sixteen of 1, the rest 0.01

`excess` is the error ||BA - D||_F over that of the best product of rank R, less 1, over ten test matrices; `energy` is
||BA||_F^2 over the best one's. Seconds are those of the thread, beside the exact form's on the same sum.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from coterie.maths.keys import Key
from coterie.maths.lowrank import BestRank, Factors, best_rank

SIZE, CLIENTS, STACKED, R, DRAWS = 1024, 10, 380, 16, 10
SPECTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": torch.ones_like,
    "slow": lambda j: j**-0.5,
    "decaying": lambda j: 0.9 ** (j - 1),
    "step": lambda j: torch.where(j <= R, 1.0, 0.3).double(),
    "sharp": lambda j: torch.where(j <= R, 1.0, 0.01).double(),
}
WAYS = {"p = 2": (2, 0), "p = 16": (16, 0), "p = 2, one power step": (2, 1)}
"""Columns drawn beyond R, and power steps; the first is what methods use unless told otherwise."""


@dataclass(frozen=True)
class Row:
    """One spectrum, one way. seconds: best of the draws; exact_seconds: best of three."""

    spectrum: str
    oversample: int
    power: int
    best_error: float
    mean_excess: float
    largest_excess: float
    mean_energy: float
    seconds: float
    exact_seconds: float


def with_spectrum(values: Tensor, key: Key) -> list[Factors]:
    """Ten clients' pairs, of which the mean product has these singular values."""
    U, V = (torch.linalg.qr(key.fold(side).normal((SIZE, len(values))).double()).Q for side in "UV")
    B, A = CLIENTS * U * values, V.mT
    order = key.permutation(len(values))
    return [(B[:, own].contiguous(), A[own].contiguous()) for own in torch.from_numpy(order).chunk(CLIENTS)]


def timed(run: Callable[[], BestRank]) -> tuple[BestRank, float]:
    """The result, and the thread's seconds."""
    start = time.thread_time()
    return run(), time.thread_time() - start


def measure(spectrum: str) -> list[Row]:
    """All ways on one spectrum."""
    values = SPECTRA[spectrum](torch.arange(1, STACKED + 1, dtype=torch.float64))
    factors = with_spectrum(values, Key(5).fold("randomised", spectrum))
    weights = [1 / CLIENTS] * CLIENTS
    best, energy = float(values[R:].norm()), float(values[:R].square().sum())
    exact = [timed(lambda: best_rank(factors, weights, R, method="exact")) for _ in range(3)]
    if abs(float(exact[0][0].tail) / best - 1) > 1e-9:
        raise SystemExit(f"{spectrum}: the exact form's error is {float(exact[0][0].tail)}, not {best}")

    def sampled(draw: int, oversample: int, power: int) -> BestRank:
        key = Key(6).fold(draw)
        return best_rank(factors, weights, R, method="auto", oversample=oversample, power=power, key=key)

    rows = []
    for oversample, power in WAYS.values():
        made = [timed(partial(sampled, draw, oversample, power)) for draw in range(DRAWS)]
        excess = [float(found.tail) / best - 1 for found, _ in made]
        rows.append(
            Row(
                spectrum=spectrum,
                oversample=oversample,
                power=power,
                best_error=best / float(values.norm()),
                mean_excess=statistics.fmean(excess),
                largest_excess=max(excess),
                mean_energy=statistics.fmean(float(f.singular_values.square().sum()) / energy for f, _ in made),
                seconds=min(seconds for _, seconds in made),
                exact_seconds=min(seconds for _, seconds in exact),
            )
        )
    return rows


def run() -> list[Row]:
    """Prints a row for each spectrum and way."""
    print(f"{SIZE} x {SIZE}, stacked rank {STACKED}, R = {R}, {DRAWS} test matrices; one thread")
    rows = []
    for spectrum in SPECTRA:
        for way, row in zip(WAYS, measure(spectrum), strict=True):
            rows.append(row)
            print(
                f"{spectrum:9} {way:22} best error {row.best_error:.3f}  excess {row.mean_excess:8.2%} (largest "
                f"{row.largest_excess:.2%})  energy {row.mean_energy:.3f}  {row.exact_seconds / row.seconds:.1f} times "
                f"as fast as exact ({row.exact_seconds:.3f} s)",
                flush=True,
            )
    return rows
