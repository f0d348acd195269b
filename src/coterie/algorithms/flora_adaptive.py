"""FLoRA with SeFoRA's rank update, as in SeFoRA's comparison.

FLoRA, arXiv 2409.05976, with Algorithm 4 of SeFoRA, arXiv 2608.10144 (section 5, Baselines).
Up: B_i, A_i, r_i (m + n) scalars a layer at the rank of the round; the formula gives r_i as long as nothing shrank.
Down: no message, but the stack of who took part as a patch of the base, (sum r_i) (m + n).
Deviations: FLoRA's, and SeFoRA's open points of the rank update (F5, F6, F11, F12; see `rank_update`). Clients start
afresh every round, so there is no global pair that could be truncated, of which SeFoRA does not speak: in an update
round a client trains fresh factors of its card's rank, shrinks what it trained, uploads the shrunk pair, and starts
later rounds at that rank, which it keeps at the site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from coterie.algorithms.base import Program
from coterie.algorithms.factors import initial_factors
from coterie.algorithms.flora import FLoRA
from coterie.algorithms.flora import State as FLoRAState
from coterie.algorithms.rank_update import RankUpdate, average_rank, ranks_of, truncated
from coterie.algorithms.sketch_measures import trained_by
from coterie.protocol import Client, Federation, Fit, Model, Seen, Server, Upload, Uploads, message


@message
class State(FLoRAState):
    """FLoRA's, and the last round's number."""

    round: int = 0


@dataclass(frozen=True)
class FLoRAAdaptive(RankUpdate, FLoRA):
    """FLoRA whose clients find their ranks anew after every `update_every` rounds."""

    traits = replace(
        FLoRA.traits,
        title="FLoRA, adaptive ranks",
        paper="arXiv 2409.05976 + 2608.10144",
        keeps_memory=True,
        adaptive_size=True,
    )

    def start(self, federation: Federation, server: Server) -> State:
        return State()

    def local(self, client: Client, download: None) -> Program:
        fresh = truncated(initial_factors(client.card, client.key("init")), self.starting_ranks(client))
        fitted = yield Fit(Model(lora=fresh))
        kept = self.kept(fitted.model["lora"], client.round)
        client.memory["ranks"] = ranks_of(kept)
        return Upload(kept)

    def aggregate(self, state: Any, uploads: Uploads, server: Server) -> State:
        return State(super().aggregate(state, uploads, server).base, server.round)

    def measures(self, state: Any, federation: Federation, seen: Mapping[str, Seen]) -> dict[str, float]:
        kept = {name: self.kept(adapter, state.round) for name, (_, adapter) in trained_by(seen).items()}
        return {"average_rank": average_rank({name: ranks_of(adapter) for name, adapter in kept.items()})}
