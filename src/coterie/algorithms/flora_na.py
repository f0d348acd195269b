"""FLoRA-NA: combine the factors with coefficients that make their product nearly the mean of the products.

FLoRA-NA, arXiv 2509.26399. Layer by layer the server looks for P and Q with which Bhat = sum Q_u B_u and
Ahat = sum P_u A_u make ||Bhat Ahat - sum p_u s_u B_u A_u|| small, and hands out (Bhat, Ahat): the traffic of FedIT.
Up: B_i, A_i, r (m + n) scalars a layer. Down: the combined factors, r (m + n).
Deviations: the paper prints the sum of the products without 1/N, its mean is meant. Its solver is not known here: ours
is alternating least squares from P = Q = p (which is FedIT), `sweeps` times, so that the error is never above
FedIT's; no sign or sum is imposed. The paper's second figure, of clients tuned on after the last round, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import (
    Terms,
    alike,
    cut_for,
    each_layer,
    initial_pair,
    rank_of,
    require_equal_ranks,
)
from coterie.algorithms.pairs import PairExchange
from coterie.maths.coefficients import product_coefficients
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
    weighted_sum,
)


@message
class State:
    """The combined factors."""

    lora: Adapter


@dataclass(frozen=True)
class FLoRANA(PairExchange, Algorithm):
    """Factors combined by coefficients fitted to the product (arXiv 2509.26399).

    sweeps: of the alternating least squares; with none it is FedIT.
    """

    sweeps: int = 20

    traits = Traits(
        title="FLoRA-NA",
        paper="arXiv 2509.26399",
        up="B, A: r (m + n)",
        down="combined B, combined A: r (m + n)",
        ranks="equal",
        weights="uniform",
        one_client=True,
        equal_clients=True,
        zero_weight=True,
    )

    def __post_init__(self) -> None:
        if self.sweeps < 0:
            raise ValueError(f"sweeps must not be negative, but is {self.sweeps}")

    def start(self, federation: Federation, server: Server) -> State:
        require_equal_ranks(federation, "FLoRA-NA")
        return State(initial_pair(federation, server.key("init")))

    def send(self, state: State, card: Card) -> Adapter:
        return cut_for(state.lora, card)

    def local(self, client: Client, download: Adapter) -> Program:
        fitted = yield Fit(Model(lora=download))
        return Upload(fitted.model["lora"])

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        rank = rank_of(state.lora)
        made = each_layer(uploads, lambda name, terms: self.averaged(alike(terms, rank)))
        return replace(state, lora=state.lora | made)

    def averaged(self, terms: Terms) -> LowRank:
        """One layer's new factors."""
        factors, p = [(term.left, term.A) for _, term in terms], [weight for weight, _ in terms]
        P, Q = product_coefficients(factors, p, self.sweeps)
        return LowRank(
            weighted_sum([(float(q), B) for q, (B, _) in zip(Q, factors, strict=True)]),  # Bhat = sum Q_u B_u
            weighted_sum([(float(q), A) for q, (_, A) in zip(P, factors, strict=True)]),  # Ahat = sum P_u A_u
            terms[0][1].scale,
        )
