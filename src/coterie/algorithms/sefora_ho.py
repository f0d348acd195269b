"""SeFoRA-Ho: SeFoRA where all clients have one rank that stays.

SeFoRA, arXiv 2608.10144, implements Algorithm 5: no truncation of what is downloaded, no rank update.
Up: sketches, m r + k n scalars a layer. Down: B and A of rank r, r (m + n); once, the seed of the sketches' matrices.
Deviations: as SeFoRA's, but for ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from coterie.algorithms.base import Program
from coterie.algorithms.factors import require_equal_ranks
from coterie.algorithms.sefora import Download, SeFoRA, State
from coterie.protocol import Client, Federation, Fit, Model, Server, Upload


@dataclass(frozen=True)
class SeFoRAHo(SeFoRA):
    """SeFoRA where all clients have one rank that stays: no truncation, no rank update (Algorithm 5)."""

    update_every: int | None = field(default=None, init=False, repr=False)
    tau: float = field(default=0.9, init=False, repr=False)
    per_layer: bool = field(default=False, init=False, repr=False)

    traits = replace(SeFoRA.traits, title="SeFoRA-Ho", ranks="equal", keeps_memory=False)

    def start(self, federation: Federation, server: Server) -> State:
        require_equal_ranks(federation, self.traits.title)
        return super().start(federation, server)

    def local(self, client: Client, download: Download) -> Program:
        fitted = yield Fit(Model(lora=download.lora))
        return Upload(self.sketched(client, download, fitted.model["lora"]))
