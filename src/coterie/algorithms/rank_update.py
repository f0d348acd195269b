"""SeFoRA's rank update as a part for other methods too: every T_u rounds clients find anew how much rank they need.

SeFoRA, arXiv 2608.10144, Algorithm 2 (lines 10-12, 20-24) and Algorithms 3 and 4. In an update round a client trains
at its full rank (its card's, the upper bound), keeps the directions that hold more than a share tau of the energy of
what it trained, and stays at that rank until the next update, at which it may grow again.
Client half: `starting_ranks`, `truncated`, `kept`. Server half, for a method whose server sends each client its own
rank: `learnt_ranks` from the shapes of what was uploaded, `ranks_to_send`. All are pure; the method keeps the ranks.
Open points: round t = 0 is no update (F5); one rank for all layers, the largest that any of them needs, unless
`per_layer` (F6); no energy at all gives rank 1 (F11); the energy must exceed tau (F12).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.maths import lowrank
from coterie.protocol import Adapter, Card, Client, LowRank, Uploads

Ranks = dict[str, int]
"""A client's rank in each of its layers."""

ORTHONORMAL = 1e-4
"""How far B^T B may be from the identity, entry by entry, for B to pass as orthonormal; fp32 factors come to 1e-6."""


@dataclass(frozen=True)
class RankUpdate:
    """The options that a method with rank updates has, and both halves of the update.

    update_every: T_u in rounds, None for never. tau: the share of squared singular energy that a client keeps more
    than. per_layer: every layer a rank of its own.
    """

    update_every: int | None = 100
    tau: float = 0.9
    per_layer: bool = False

    def __post_init__(self) -> None:
        if self.update_every is not None and self.update_every < 1:
            raise ValueError(f"update_every must be a number of rounds or null, not {self.update_every}")
        if not 0 < self.tau < 1:
            raise ValueError(f"tau must lie between 0 and 1, not {self.tau:g}")

    def updates(self, round: int) -> bool:
        """Whether round 1, 2, ... is an update round: t > 0 and t mod T_u = 0 for t = round - 1 (F5)."""
        return self.update_every is not None and round > 1 and (round - 1) % self.update_every == 0

    def starting_ranks(self, client: Client) -> Ranks:
        """The ranks at which a client that remembers its `ranks` trains now (Algorithm 2, lines 10-12)."""
        kept: Ranks = {} if self.updates(client.round) else client.memory.get("ranks", {})
        return {name: min(kept.get(name, client.card.rank), client.card.rank) for name in client.card.layers}

    def shrunk(self, adapter: Adapter) -> Adapter:
        """UpdateLocalRank (Algorithm 4): cut to the energy share tau, sqrt(S) on both sides."""
        parts = {name: lowrank.core_svd(term.left, term.A) for name, term in adapter.items()}  # lines 4-5
        ranks = {name: int(lowrank.energy_rank(S, self.tau)) for name, (_, S, _) in parts.items()}  # line 6
        if not self.per_layer:
            ranks = dict.fromkeys(ranks, max(ranks.values()))
        return {name: _balanced(term, *parts[name], ranks[name]) for name, term in adapter.items()}  # line 7

    def kept(self, adapter: Adapter, round: int) -> Adapter:
        """What a client keeps and sends of what it trained in that round (Algorithm 2, lines 20-24)."""
        return self.shrunk(adapter) if self.updates(round) else adapter

    def ranks_to_send(self, card: Card, ranks: Mapping[str, Ranks], round: int) -> Ranks:
        """The ranks at which the server sends for that round: the last ones learnt; all of them in an update round."""
        known = {} if self.updates(round) else ranks.get(card.id, {})
        return {name: min(known.get(name, card.rank), card.rank) for name in card.layers}


def learnt_ranks(ranks: Mapping[str, Ranks], uploads: Uploads) -> dict[str, Ranks]:
    """The ranks of all clients heard of so far, those of who answered read off the factors that it sent."""
    return dict(ranks) | {card.id: ranks_of(adapter) for card, adapter, _ in uploads.items()}


def ranks_of(adapter: Adapter) -> Ranks:
    """The rank of every layer's factors."""
    return {name: term.rank for name, term in adapter.items()}


def average_rank(ranks: Mapping[str, Ranks]) -> float:
    """The mean over clients of their mean over layers (SeFoRA, Figure 2); 0 of nobody."""
    means = [sum(one.values()) / len(one) for one in ranks.values() if one]
    return sum(means) / len(means) if means else 0.0


def truncated(adapter: Adapter, ranks: Ranks) -> Adapter:
    """Truncate (Algorithm 3), layer by layer to the rank named; a layer that is no wider stays as it is.

    The SVD of A is that of B A only where B is orthonormal, as after every unsketching; where it is not, the product's
    core takes its place (F3). B = 0, as at the start, is sliced (F4). A direction without energy keeps its row of V^T,
    beside a zero column of B: the product is the paper's, and the direction can still learn.
    """
    return {
        name: _truncated(adapter[name], rank) if rank < adapter[name].rank else adapter[name]
        for name, rank in ranks.items()
    }


def _truncated(term: LowRank, rank: int) -> LowRank:
    B = term.left.double()
    if not B.any():  # line 4
        return term.truncated(rank)
    gram = B.mT @ B
    if float((gram - torch.eye(term.rank, dtype=gram.dtype, device=gram.device)).abs().max()) <= ORTHONORMAL:
        U, S, Vh = torch.linalg.svd(term.A.double(), full_matrices=False)  # line 5
        left, right = lowrank.canonical_signs(B @ U, Vh)
        return _balanced(term, left, S, right, rank)  # lines 6-7
    return _balanced(term, *lowrank.core_svd(B, term.A.double()), rank)


def _balanced(term: LowRank, U: Tensor, S: Tensor, Vh: Tensor, rank: int) -> LowRank:
    """U sqrt(S) and sqrt(S) V^T, cut to `rank`, in the dtype and scale of `term`."""
    U, S, Vh = U[:, :rank], S[:rank], Vh[:rank]
    root = torch.where(S > 0, S, 0).sqrt()
    dead = S.le(torch.finfo(term.A.dtype).eps * S.amax())
    B, A = U * root.where(~dead, 0), torch.where(dead, 1, root)[:, None] * Vh
    return replace(term, B=B.to(term.B.dtype), A=A.to(term.A.dtype), diagonal=None)
