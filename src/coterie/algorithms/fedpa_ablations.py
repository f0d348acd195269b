"""FedPA-LoRA with one of its parts taken away: the rows of its Table 4.

FedPA-LoRA, arXiv 2608.15381, section 5.4.4 and Appendix C.2 (Eq. 17). The server is FedPA-LoRA's throughout.
Up: B_i, A_i, r_i (m + n) scalars a layer. Down: the reference, R_i (m + n).
Deviations: factors are compared with factors, and taken over, only where R_i = r_i, as in the paper's table. Taken
over, a reference of lower rank has its missing rows of A completed orthonormally: left at zero, these directions
could never learn again.

The rows of Table 4, from above, with method, federation.head and options (N = 3, r = 4, Dirichlet 0.5, MNLI):

    FedIT, no local head             fedit               averaged
    FedIT, local head                fedit               local
    FlexLoRA, no local head          flexlora            averaged
    FlexLoRA, local head             flexlora            local
    not preserved, no local head     fedpa-overwritten   averaged
    not preserved, local head        fedpa-overwritten   local
    preserved, no local head         fedpa-lora          averaged
    both, B regularised              fedpa-factors       local      regularised=B
    both, A regularised              fedpa-factors       local      regularised=A
    both, B and A regularised        fedpa-factors       local      regularised=BA
    both, the product                fedpa-lora          local
    the same with R = 2              fedpa-lora          local      (clients.reference_ranks=2)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from coterie.algorithms.base import Program
from coterie.algorithms.factors import completed, cut_for
from coterie.algorithms.fedpa_lora import Download, FedPALoRA, State
from coterie.algorithms.joint_objective import truncation_delta
from coterie.errors import ConfigError
from coterie.protocol import Adapter, Client, FactorDistance, Federation, Fit, Model, Penalty, Seen, Server, Upload


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

    def measures(self, state: State, federation: Federation, seen: Mapping[str, Seen]) -> dict[str, float]:
        apart = 0.0  # Eq. 20 with the addend of Eq. 17
        for card in federation.cards:
            model = seen[card.id].model if card.id in seen else None
            if model is not None:
                penalty = self.alignment(cut_for(state.reference, card))
                value = type(penalty).stack([penalty], 0).value(Model.stack([model]))
                apart += seen[card.id].weight * float(value)
        return {"truncation_delta": truncation_delta(state.reference, federation), "regulariser": apart}


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

    def further_models(self, client: Client, download: Download) -> Mapping[str, Model]:
        return {}


def require_own_reference_ranks(federation: Federation, method: str) -> None:
    """Raises ConfigError naming a client whose reference rank is not its own rank."""
    for card in federation.cards:
        if card.down_rank != card.rank:
            raise ConfigError(
                f"{method} needs references of the client's own rank, but client {card.id} trains rank {card.rank} and "
                f"downloads rank {card.down_rank}; leave clients.reference_ranks out"
            )
