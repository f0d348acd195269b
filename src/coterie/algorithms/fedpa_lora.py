"""FedPA-LoRA: keep your own factors, be drawn towards the common product.

FedPA-LoRA, arXiv 2608.15381, implements Algorithm 1. Ranks r_i (trained, uploaded) and R_i (downloaded) may differ.
Up: B_i, A_i, r_i (m + n) scalars a layer. Down: the reference, R_i (m + n); once, the seed of the initial factors.
The product is regularised unscaled and layers are summed (P2, P3), so one common scale is required.
Deviations: weights are uniform as in the paper unless the experiment sets others (P1). The head follows the
experiment's policy, for all methods alike; on GLUE the paper's clients keep their own (federation.head=local).
Missing directions of the reference are zero (P6); a client that is not sampled keeps its factors and later receives
the then current reference (P7, Appendix E). A site is evaluated with its rank-R_i reference, and beside it with its
own preserved factors; the paper evaluates the global adapter of rank R_g, which is the global model here (P9).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import (
    best_rank,
    check_adapter,
    cut_for,
    initial_adapter,
    kept_factors,
    pair_bytes,
    require_common_scale,
)
from coterie.algorithms.joint_objective import joint_terms
from coterie.maths.keys import Key
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    Layer,
    Model,
    Once,
    Penalty,
    ProductDistance,
    Seen,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)


@message
class State:
    """The global reference (B_g, A_g), of rank max(r_g, R_g) at the start and R_g later; the initial pair's seed."""

    reference: Adapter
    init_key: Key
    rank: int


@message
class Download:
    """The rank-R_i reference, and the seed of the initial factors: a Once when sent, the Key itself on arrival."""

    reference: Adapter
    init_key: Any


@dataclass(frozen=True)
class FedPALoRA(Algorithm):
    """Local factor preservation and product alignment.

    lam: the regularisation weight lambda of Eq. 3. reconstruction: how lines 16-19 are computed; the randomised way
    (Remark 2) draws `oversample` columns more than R_g; its bound needs two at least.
    """

    lam: float = 1.0
    reconstruction: Literal["auto", "exact", "randomised"] = "exact"
    oversample: int = 2

    traits = Traits(
        title="FedPA-LoRA",
        paper="arXiv 2608.15381",
        up="B, A: r_i (m + n)",
        down="reference: R_i (m + n)",
        ranks="unequal",
        weights="uniform",
        common_scale=True,
        best_rank=True,
        gauge_invariant=True,
        one_client=True,
        equal_clients=True,
        zero_weight=True,
        keeps_memory=True,
    )

    def __post_init__(self) -> None:
        if self.lam < 0 or self.oversample < 0:
            raise ValueError(f"lam ({self.lam:g}) and oversample ({self.oversample}) must not be negative")

    def start(self, federation: Federation, server: Server) -> State:
        require_common_scale(federation, "FedPA-LoRA")
        r_g, R_g = federation.rank, max(card.down_rank for card in federation.cards)  # line 1
        key, scale = server.key("init"), federation.cards[0].scale
        reference = initial_adapter(federation.layers, max(r_g, R_g), scale, key)  # line 2
        return State(reference, key, R_g)

    def send(self, state: State, card: Card) -> Download:
        return Download(cut_for(state.reference, card, card.down_rank), Once(state.init_key))  # line 9

    def local(self, client: Client, download: Download) -> Program:
        own = kept_factors(client, download.init_key)  # lines 3-5, 8: kept, or the initial pair cut to r_i
        trained = yield from preserved(client, own, self.alignment(download.reference))  # lines 10-13
        return Upload(trained)  # line 14

    def alignment(self, reference: Adapter) -> Penalty:
        """lambda / 2 ||B_i A_i - B_g,i A_g,i||_F^2, summed over layers (Eq. 3)."""
        return ProductDistance(reference, weight=self.lam / 2)

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        how, key = self.reconstruction, server.key("sketch")
        best = best_rank(  # lines 16-19, Eqs. 4-6
            uploads, state.rank, scaled=False, method=how, oversample=self.oversample, key=key
        )
        return replace(state, reference=state.reference | best)

    def site_model(self, client: Client, download: Download) -> Model:
        return Model(lora=download.reference)

    def further_models(self, client: Client, download: Download) -> Mapping[str, Model]:
        return {"preserved": Model(lora=kept_factors(client, download.init_key))}

    def global_model(self, state: State) -> Model:
        return Model(lora={name: term.truncated(state.rank) for name, term in state.reference.items()})

    def check(self, payload: Any, card: Card) -> None:
        check_adapter(payload, card)

    def measures(self, state: State, federation: Federation, seen: Mapping[str, Seen]) -> dict[str, float]:
        return joint_terms(state.reference, federation, seen, self.lam)

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank)

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.down_rank)


def preserved(client: Client, own: Adapter, penalty: Penalty) -> Generator[Any, Any, Adapter]:
    """=> the factors after training, which are also what the client keeps (lines 10-13)."""
    fitted = yield Fit(Model(lora=own), penalties=[penalty])  # lines 10-12
    trained: Adapter = fitted.model["lora"]
    client.memory["factors"] = trained  # line 13: never overwritten by the server
    return trained
