"""FedRot-LoRA: turn every client's factors onto the common ones, then average the factors.

FedRot-LoRA, arXiv 2602.23638, with the rotation of its released code. (B R, R^T A) has the product of (B, A) for every
orthogonal R; a client uploads the pair that lies nearest to the factors which it downloaded, on one side.
Up: B_i R_i, R_i^T A_i, r (m + n) scalars a layer. Down: the averaged factors, r (m + n).
Round 1 turns nothing, since B is 0 then; from round 2 on A and B are aligned by turns, A first unless `first` says
otherwise (the released code's parity). Alignment may be hard (the Procrustes solution, which may reflect) or soft (a
proper rotation, part of the way): two methods, where the released code takes a strength above 1 for hard.
Deviations: none in the equations. Scales may differ, since a rotation does not see them; they are averaged as by FedIT.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import average_factors, cut_for, initial_pair, rank_of, require_equal_ranks
from coterie.algorithms.pairs import PairExchange
from coterie.maths.rotation import partial, procrustes
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    LowRank,
    Model,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)

Side = Literal["A", "B"]


@message
class State:
    """The averaged factors."""

    lora: Adapter


@dataclass(frozen=True)
class FedRotLoRA(PairExchange, Algorithm):
    """Average of factors that are aligned by orthogonal matrices (arXiv 2602.23638), hard.

    first: the side that is aligned in round 2, the other one in round 3, and so on.
    """

    first: Side = "A"

    traits = Traits(
        title="FedRot-LoRA",
        paper="arXiv 2602.23638",
        up="B R, R^T A: r (m + n)",
        down="mean B, mean A: r (m + n)",
        ranks="equal",
        weights="processed",
        one_client=True,
        equal_clients=True,
        zero_weight=True,
        linear_upload=True,
    )

    def start(self, federation: Federation, server: Server) -> State:
        require_equal_ranks(federation, self.traits.title)
        return State(initial_pair(federation, server.key("init")))

    def send(self, state: State, card: Card) -> Adapter:
        return cut_for(state.lora, card)

    def local(self, client: Client, download: Adapter) -> Program:
        fitted = yield Fit(Model(lora=download))
        side = self.side(client.round)
        own: Adapter = fitted.model["lora"]
        if side is None:
            return Upload(own)
        return Upload({name: self.aligned(term, download[name], side) for name, term in own.items()})

    def side(self, number: int) -> Side | None:
        """The side that is aligned in this round; None in the first one, whose B_ref is 0."""
        other: Side = "B" if self.first == "A" else "A"
        return None if number == 1 else self.first if number % 2 == 0 else other

    def aligned(self, term: LowRank, reference: LowRank, side: Side) -> LowRank:
        """(B R, R^T A): R meets R^T A with A_ref (M = A A_ref^T), or B R with B_ref (M = B^T B_ref)."""
        R = self.rotation(term.A.mT, reference.A.mT) if side == "A" else self.rotation(term.B, reference.B)
        B, A = term.B.to(R.dtype) @ R, R.mT @ term.A.to(R.dtype)
        return replace(term, B=B.to(term.B.dtype), A=A.to(term.A.dtype))

    def rotation(self, own: Tensor, reference: Tensor) -> Tensor:
        """R = U V^T of M = U S V^T."""
        return procrustes(own, reference)

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        rank = rank_of(state.lora)
        return replace(state, lora=state.lora | average_factors(uploads, rank))


@dataclass(frozen=True)
class FedRotSoft(FedRotLoRA):
    """The same with proper rotations, part of the way: the nearest rotation to (1 - lam) I + lam R.

    lam: from 0, which is FedIT, to 1. At rank 1 there is nothing to rotate.
    """

    lam: float = 0.4

    traits = replace(FedRotLoRA.traits, title="FedRot-LoRA, soft")

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise ValueError(f"lam must lie between 0 and 1, not {self.lam:g}; for more, use fedrot-lora")

    def rotation(self, own: Tensor, reference: Tensor) -> Tensor:
        return partial(procrustes(own, reference, proper=True), self.lam)
