"""FedPA-LoRA with one of its parts taken away: the rows of its Table 4.

FedPA-LoRA, arXiv 2608.15381, section 5.4.4 and Appendix C.2 (Eq. 17). The server is FedPA-LoRA's throughout.
Up: B_i, A_i, r_i (m + n) scalars a layer. Down: the reference, R_i (m + n).
Deviations: factors are compared with factors, and taken over, only where R_i = r_i, as in the paper's table. Taken
over, a reference of lower rank has its missing rows of A completed orthonormally: left at zero, these directions
could never learn again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from coterie.algorithms.base import Program
from coterie.algorithms.factors import completed
from coterie.algorithms.fedpa_lora import Download, FedPALoRA, State
from coterie.errors import ConfigError
from coterie.protocol import Adapter, Client, FactorDistance, Federation, Fit, Model, Penalty, Server, Upload


@dataclass(frozen=True)
class FedPAFactors(FedPALoRA):
    """Preserved factors drawn towards the reference's factors: B, A, or both, instead of their product (Eq. 17)."""

    regularised: Literal["B", "A", "BA"] = "BA"

    traits = replace(FedPALoRA.traits, title="FedPA-LoRA, factors regularised")

    def start(self, federation: Federation, server: Server) -> State:
        require_own_reference_ranks(federation, self.traits.title)
        return super().start(federation, server)

    def alignment(self, reference: Adapter) -> Penalty:
        return FactorDistance(reference, self.lam / 2, tuple(self.regularised))


@dataclass(frozen=True)
class FedPAOverwritten(FedPALoRA):
    """Without local preservation: every round starts from the reference, and is still drawn towards its product."""

    traits = replace(FedPALoRA.traits, title="FedPA-LoRA, not preserved", keeps_memory=False)

    def start(self, federation: Federation, server: Server) -> State:
        require_own_reference_ranks(federation, self.traits.title)
        return super().start(federation, server)

    def local(self, client: Client, download: Download) -> Program:
        start = completed(download.reference, client.key("completion"))
        fitted = yield Fit(Model(lora=start), penalties=[self.alignment(download.reference)])
        return Upload(fitted.model["lora"])


def require_own_reference_ranks(federation: Federation, method: str) -> None:
    """Raises ConfigError naming a client whose reference rank is not its own rank."""
    for card in federation.cards:
        if card.down_rank != card.rank:
            raise ConfigError(
                f"{method} needs references of the client's own rank, but client {card.id} trains rank {card.rank} and "
                f"downloads rank {card.down_rank}; leave clients.reference_ranks out"
            )
