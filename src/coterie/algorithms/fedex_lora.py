"""FedEx-LoRA: average the factors, and add to the base what that loses.

FedEx-LoRA, arXiv 2410.09432. Bbar = sum p_i B_i, Abar = sum p_i A_i; the residual sum p_i B_i A_i - Bbar Abar goes into
the base of all, W <- W + s residual, so that the deployed model is the mean of the clients' exactly.
Up: B_i, A_i, r (m + n) scalars a layer. Down: the averaged factors, r (m + n); as a patch of the base, the residual.
Deviations: the residual travels as the factors [p_1 B_1, ...] and [A_1 - Abar; ...], N r (m + n) scalars for N clients
that answered, in place of the dense m n: the same matrix. A client that missed rounds is sent their residuals too.
Weights may differ (p_i in all three sums); where scales do, B_i is written in the first client's. The released code
adds the residual transposed to square layers; here it is added as the paper has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import (
    Terms,
    alike,
    cut_for,
    each_layer,
    initial_pair,
    mean_factors,
    rank_of,
    require_equal_ranks,
)
from coterie.algorithms.pairs import PairExchange
from coterie.maths.lowrank import truncate
from coterie.protocol import (
    Adapter,
    BaseLog,
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


@message
class State:
    """The averaged factors, and the residuals of all rounds as patches of the base."""

    lora: Adapter
    base: BaseLog = BaseLog()


@dataclass(frozen=True)
class FedExLoRA(PairExchange, Algorithm):
    """Averaged factors with their residual in the base (arXiv 2410.09432)."""

    traits = Traits(
        title="FedEx-LoRA",
        paper="arXiv 2410.09432",
        up="B, A: r (m + n)",
        down="mean B, mean A: r (m + n); residual: N r (m + n)",
        ranks="equal",
        weights="uniform",
        exact=True,
        gauge_invariant=True,
        one_client=True,
        equal_clients=True,
        zero_weight=True,
        changes_base=True,
    )

    def start(self, federation: Federation, server: Server) -> State:
        require_equal_ranks(federation, self.traits.title)
        return State(initial_pair(federation, server.key("init")))

    def send(self, state: State, card: Card) -> Adapter:
        return cut_for(state.lora, card)  # the engine brings the base up to date

    def local(self, client: Client, download: Adapter) -> Program:
        fitted = yield Fit(Model(lora=download))
        return Upload(fitted.model["lora"])

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        rank = rank_of(state.lora)

        def of_layer(name: str, terms: Terms) -> tuple[LowRank, LowRank]:
            held = alike(terms, rank)
            mean = mean_factors(held)  # Bbar, Abar
            return mean, self.sent(residual(held, mean), rank)

        made = each_layer(uploads, of_layer)
        lora = state.lora | {name: mean for name, (mean, _) in made.items()}
        lost = {name: residual for name, (_, residual) in made.items()}
        return State(lora, state.base.add(lost))  # W <- W + s (sum p_i B_i A_i - Bbar Abar)

    def sent(self, residual: LowRank, rank: int) -> LowRank:
        """What travels of a layer's residual, where clients have this rank."""
        return residual


@dataclass(frozen=True)
class FedExTruncated(FedExLoRA):
    """The same with the best approximation of the residual at a low rank, R' (m + n) scalars whatever N is.

    residual_rank: R'; the clients' own rank where None.
    """

    residual_rank: int | None = None

    traits = replace(
        FedExLoRA.traits,
        title="FedEx-LoRA, truncated",
        down="mean B, mean A: r (m + n); residual: R' (m + n)",
        exact=False,
        gauge_invariant=False,
    )

    def __post_init__(self) -> None:
        if self.residual_rank is not None and self.residual_rank < 1:
            raise ValueError(f"residual_rank must be at least 1, not {self.residual_rank}; fedit sends no residual")

    def sent(self, residual: LowRank, rank: int) -> LowRank:
        best = truncate(residual.B, residual.A, rank if self.residual_rank is None else self.residual_rank)
        return replace(residual, B=best.B, A=best.A)


def residual(terms: Sequence[tuple[float, LowRank]], mean: LowRank) -> LowRank:
    """sum p_i B_i A_i - Bbar Abar = sum p_i B_i (A_i - Abar) of one layer, of rank N r."""
    B, A = mean.B, mean.A
    weights = torch.tensor([weight for weight, _ in terms], dtype=B.dtype, device=B.device)
    left = torch.cat([term.left for _, term in terms], dim=-1).mul_(weights.repeat_interleave(mean.rank))
    right = torch.stack([term.A for _, term in terms]).sub_(A)
    return replace(mean, B=left.to(B.dtype), A=right.flatten(0, 1).to(A.dtype))
