"""FedSRD-e: FedSRD without its SVDs.

FedSRD-e, arXiv 2510.04601: the server takes the mean of the products as it is, without the cut to rank r. All else is
FedSRD's, to the byte. Up: parts of dB_i and dA_i. Down: a part of dB or dA by turns; once, the seed of A.
Deviations: FedSRD's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coterie.algorithms.fedsrd import FedSRD
from coterie.maths.stacking import Factors, stack_factors


@dataclass(frozen=True)
class FedSRDe(FedSRD):
    """Sparsify, reconstruct without a cut, decompose (arXiv 2510.04601)."""

    traits = replace(FedSRD.traits, title="FedSRD-e")

    def reconstructed(self, pairs: list[Factors], weights: list[float], rank: int) -> Factors:
        return stack_factors(pairs, weights)
