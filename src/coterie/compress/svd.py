"""Plain SVD: W = U Sigma V^T, the largest singular values are kept.

The best approximation of the weight itself; inputs are not looked at. Source: FedSLM (arXiv 2607.29071), Eq. 13.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.compress.base import Compressor, Group
from coterie.compress.inputs import Inputs
from coterie.compress.ranked import Ranked, ranked_svd


@dataclass(frozen=True)
class SVD(Compressor):
    """The best approximation of W in the Frobenius norm."""

    title = "SVD"
    paper = "baseline"

    def terms(self, group: Group, W: Tensor, inputs: Inputs) -> Ranked:
        return ranked_svd(W)
