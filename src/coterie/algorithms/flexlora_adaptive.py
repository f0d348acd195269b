"""FlexLoRA with SeFoRA's rank update, as in SeFoRA's comparison.

FlexLoRA, arXiv 2402.11505, with Algorithms 3 and 4 of SeFoRA, arXiv 2608.10144 (section 5, Baselines).
Up: B_i, A_i, r_i (m + n) scalars a layer at the rank of the round; the formula gives r_i as long as nothing shrank.
Down: the first r_i singular directions, r_i (m + n). In an update round both sides start from the card's rank; the
server learns each client's new rank from the shapes of what it uploads, and keeps it.
Deviations: FlexLoRA's, and SeFoRA's open points of the rank update (F5, F6, F11, F12; see `rank_update`). The server's
truncation hands out the rank, so that SeFoRA's Algorithm 3 at the client has nothing left to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from coterie.algorithms.base import Program
from coterie.algorithms.flexlora import FlexLoRA
from coterie.algorithms.flexlora import State as FlexState
from coterie.algorithms.rank_update import Ranks, RankUpdate, average_rank, learnt_ranks
from coterie.protocol import Adapter, Card, Client, Federation, Fit, Model, Seen, Server, Upload, Uploads, message


@message
class State(FlexState):
    """FlexLoRA's, the ranks of the clients heard of, and the last round's number."""

    ranks: dict[str, Ranks]
    round: int


@dataclass(frozen=True)
class FlexLoRAAdaptive(RankUpdate, FlexLoRA):
    """FlexLoRA whose clients find their ranks anew after every `update_every` rounds."""

    traits = replace(
        FlexLoRA.traits, title="FlexLoRA, adaptive ranks", paper="arXiv 2402.11505 + 2608.10144", adaptive_size=True
    )

    def start(self, federation: Federation, server: Server) -> State:
        return State(super().start(federation, server).lora, {}, 0)

    def send(self, state: Any, card: Card) -> Adapter:
        ranks = self.ranks_to_send(card, state.ranks, state.round + 1)
        return {name: term.truncated(ranks[name]) for name, term in super().send(state, card).items()}

    def local(self, client: Client, download: Adapter) -> Program:
        fitted = yield Fit(Model(lora=download))
        return Upload(self.kept(fitted.model["lora"], client.round))

    def aggregate(self, state: Any, uploads: Uploads, server: Server) -> State:
        made: Any = super().aggregate(state, uploads, server)
        return State(made.lora, learnt_ranks(state.ranks, uploads), server.round)

    def measures(self, state: Any, federation: Federation, seen: Mapping[str, Seen]) -> dict[str, float]:
        return {"average_rank": average_rank({name: state.ranks[name] for name in seen if name in state.ranks})}
