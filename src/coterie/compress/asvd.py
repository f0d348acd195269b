"""ASVD: the SVD of W S, where S is diagonal and larger for channels with larger inputs.

ASVD, arXiv 2312.05821. S = diag((mean_t |x_tj|)^alpha + 1e-6), the mean first, then the power; W = (W S) S^-1.
Deviations: one ratio for all layers in place of the search by each layer's sensitivity; the singular values are split
evenly between the factors (the paper's code lets one choose); the exact SVD in place of a randomised one; means over
tokens, where the code sums over batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.compress.base import Compressor, Group
from coterie.compress.inputs import Inputs
from coterie.compress.ranked import Ranked, ranked_svd
from coterie.errors import ConfigError

FLOOR = 1e-6
"""Added to S, so that a channel that is always 0 can be divided by."""

MOST_ALPHA = 4.0
"""The largest power, twice the largest that the paper tries; far above it S overflows."""


def channel_scaled(W: Tensor, magnitude: Tensor, alpha: float) -> Ranked:
    """The terms of W (d_out, d_in) by their size in W S; magnitude (d_in,): mean_t |x_tj|."""
    S = magnitude.double() ** alpha + FLOOR
    return ranked_svd(W.double() * S, lambda V: V / S)


@dataclass(frozen=True)
class ASVD(Compressor):
    """SVD with channels weighted by the size of their inputs (arXiv 2312.05821).

    alpha: the power; 0 is nearly plain SVD.
    """

    title = "ASVD"
    paper = "arXiv 2312.05821"

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= MOST_ALPHA:
            raise ConfigError(f"asvd: alpha {self.alpha:g} must lie between 0 and {MOST_ALPHA:g}")

    def terms(self, group: Group, W: Tensor, inputs: Inputs) -> Ranked:
        return channel_scaled(W, inputs.magnitude, self.alpha)
