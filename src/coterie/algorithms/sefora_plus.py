"""SeFoRA-Plus: from the same linear sketches, a product that does not break where clients differ.

Ours, on SeFoRA (arXiv 2608.10144), Algorithm 2, whose clients and messages it keeps; the server reads more out of them.
Up: sketches with s = r + oversample columns and k rows, m s + k n scalars a layer. Down: B and A of rank r, r (m + n);
once, the seed of all rounds' Omega (n, s) and Psi (k, m). With oversample = 0 both are SeFoRA's, to the byte.
Where clients differ, Algorithm 1 at k = r + 2 amplifies what lies outside the range that Omega sampled, often beyond
the product itself. Here A is exact on what Omega saw, is shrunk elsewhere by as much noise as the residual shows
(`maths.sketch.unsketch_shrunk`), and the best rank-r part is kept. Exact where SeFoRA is; still only sums of uploads.
At equal bytes it errs far less for clients that differ and about as much for clients that agree (benchmarks/sketch.py).
Deviations: as SeFoRA, whose lines 30-31 these are in place of. k is s + 2 unless given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from coterie.algorithms.sefora import SeFoRA
from coterie.maths.sketch import SketchMatrices, unsketch_shrunk


@dataclass(frozen=True)
class SeFoRAPlus(SeFoRA):
    """SeFoRA with `oversample` columns beyond r in Omega, shrunk least squares, and truncation to r at the end."""

    oversample: int = 2

    traits = replace(
        SeFoRA.traits, title="SeFoRA-Plus", paper="ours, on arXiv 2608.10144", up="sketches: m (r + p) + k n"
    )

    def __post_init__(self) -> None:
        if self.oversample < 0:
            raise ValueError(f"oversample must not be negative, not {self.oversample}")
        super().__post_init__()

    def columns(self, r: int) -> int:
        return r + self.oversample

    def unsketched(self, Y: Tensor, Z: Tensor, matrices: SketchMatrices, rank: int) -> tuple[Tensor, Tensor]:
        return unsketch_shrunk(Y, Z, matrices.Omega, matrices.Psi, rank)
