"""LoRA-FAIR: average the factors, then correct B towards the mean of the products.

LoRA-FAIR, arXiv 2411.14961. With D = sum p_i s_i B_i A_i, Bbar and Abar as in FedIT, the server looks for the dB that
makes 1 - cos(D, (Bbar + dB) Abar) + lam ||dB||^2 least and hands out (Bbar + dB, Abar); the base stays.
Up: B_i, A_i, r_i (m + n) scalars a layer. Down: the corrected B and the mean A, r_i (m + n).
Deviations: the penalty is squared, where the paper prints the norm itself; dB starts from 0. A descent without a step
size (`cosine_correction`) brings the objective to rest, since the gradient steps of the re-implementations (rate 0.01,
some 1000) are, for a small B, as long as B itself. Only B is corrected, the paper's best. Unequal ranks are
zero-padded, as in the paper's extension, and cut again for each client.
lora-fair-closed is not the paper's: it makes ||D - (Bbar + dB) Abar||^2 + lam ||dB||^2 least, in closed form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import Terms, alike, cut_for, each_layer, initial_pair, mean_factors, rank_of
from coterie.algorithms.pairs import PairExchange
from coterie.maths.correction import cosine_correction, ridge_correction
from coterie.maths.gram import cosine
from coterie.maths.stacking import Factors, stack_factors
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    LowRank,
    Model,
    Seen,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)


@message
class State:
    """The corrected mean of B and the mean of A, at the federation's largest rank."""

    lora: Adapter


@dataclass(frozen=True)
class LoRAFAIR(PairExchange, Algorithm):
    """Averaged factors, B corrected by cosine similarity (arXiv 2411.14961).

    lam: the weight of ||dB||^2; the larger, the nearer to FedIT.
    """

    lam: float = 0.01

    traits = Traits(
        title="LoRA-FAIR",
        paper="arXiv 2411.14961",
        up="B, A: r_i (m + n)",
        down="corrected mean B, mean A: r_i (m + n)",
        ranks="unequal",
        one_client=True,
        equal_clients=True,
        zero_weight=True,
    )

    def __post_init__(self) -> None:
        if not self.lam >= 0:
            raise ValueError(f"lam must be at least 0, not {self.lam:g}")

    def start(self, federation: Federation, server: Server) -> State:
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
        mean = mean_factors(terms)  # Bbar, Abar
        factors, weights = [(term.left, term.A) for _, term in terms], [weight for weight, _ in terms]
        return replace(mean, B=self.corrected(mean, factors, weights))  # Bbar + dB

    def corrected(self, mean: LowRank, factors: Sequence[Factors], weights: Sequence[float]) -> Tensor:
        """Bbar + dB for one layer, with D in the scale of `mean`."""
        return cosine_correction(mean.B, mean.A, factors, weights, self.lam)

    def measures(self, state: State, federation: Federation, seen: Mapping[str, Seen]) -> dict[str, float]:
        """cosine: cos(D, B Abar) of what is handed out, the mean over layers."""
        trained = [(one.weight, one.model["lora"]) for _, one in sorted(seen.items()) if one.model is not None]
        found = []
        for name, term in state.lora.items():
            own = [(weight * float(lora[name].scale), lora[name]) for weight, lora in trained if name in lora]
            if own:
                D = stack_factors([(one.left, one.A) for _, one in own], [weight for weight, _ in own])
                found.append(float(cosine(term.B, term.A, *D)))
        return {"cosine": sum(found) / len(found)} if found else {}


@dataclass(frozen=True)
class LoRAFAIRClosed(LoRAFAIR):
    """A variant of ours: B corrected by ridge least squares on the product, dB = (D - Bbar Abar) Abar^T (S + lam I)^-1.

    lam: the weight of ||dB||^2 beside ||D - (Bbar + dB) Abar||^2.
    """

    traits = replace(LoRAFAIR.traits, title="LoRA-FAIR, closed form")

    def corrected(self, mean: LowRank, factors: Sequence[Factors], weights: Sequence[float]) -> Tensor:
        return ridge_correction(mean.B, mean.A, factors, weights, self.lam)
