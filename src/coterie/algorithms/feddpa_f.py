"""FedDPA-F: one adapter for all, then a copy of it fine-tuned at home; each input mixes the two.

FedDPA-F, arXiv 2403.19211. First the global adapter is trained as in FedIT. In one further round, without uploads,
every client fine-tunes a copy of the final one: its local adapter, which stays. Used are both: an input that is like
the client's own data by cosine alpha takes lam * alpha of the local adapter, the rest of the global one.
Up: B_i, A_i, r_i (m + n) scalars a layer, nothing in the last round. Down: the averaged factors, r_i (m + n).
Likeness is the mean cosine to `anchors` random training examples, between last hidden states of the prompt's last
token, or pooled states of an encoder, computed with the local adapter alone as in the released code. Clients are
weighted equally, as there. The last round is as long as any other, that is E epochs where the experiment sets epochs.
Deviations: a negative mean cosine counts as zero. The released code gives the likeness to the global adapter and the
rest to the local one, against the paper's text, which is followed; `as_released` turns it round. FedPA-LoRA (its
Appendix A) describes F as copying the new global adapter in every round: that costs a fine-tuning each time and ends
at the same local adapter, so only the last copy is made here, and until then a site uses the global adapter alone.
Unequal ranks are averaged with zero-padding, as in FedIT. The paper has no head: it follows the experiment's policy,
is trained with the global adapter and rests in the last round, so that nothing is sent then.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import average_factors, check_adapter, cut_for, initial_pair, pair_bytes, rank_of
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    Layer,
    Mix,
    Model,
    Phase,
    Predict,
    Server,
    Traits,
    Upload,
    Uploads,
    input_features,
    message,
)


@message
class State:
    """The averaged factors of the global adapter, at the federation's largest rank."""

    lora: Adapter


@dataclass(frozen=True)
class FedDPAF(Algorithm):
    """Dual-personalising adapter, local one by fine-tuning (arXiv 2403.19211).

    lam: the local adapter's largest share. anchors: S, the training examples that an input is compared with.
    as_released: the likeness is the global adapter's share.
    """

    lam: float = 0.5
    anchors: int = 5
    as_released: bool = False

    traits = Traits(
        title="FedDPA-F",
        paper="arXiv 2403.19211",
        up="B, A: r_i (m + n)",
        down="mean B, mean A: r_i (m + n)",
        ranks="unequal",
        weights="uniform",
        one_client=True,
        equal_clients=True,
        zero_weight=True,
        linear_upload=True,
        averages=True,
        personal=True,
        keeps_memory=True,
    )

    def __post_init__(self) -> None:
        if not (0 <= self.lam <= 1 and self.anchors >= 1):
            raise ValueError(f"lam ({self.lam:g}) must be in [0, 1] and anchors ({self.anchors}) at least 1")

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase("main", rounds), Phase("local", 1, clients="all", uploads=False)]

    def start(self, federation: Federation, server: Server) -> State:
        return State(initial_pair(federation, server.key("init")))

    def send(self, state: State, card: Card) -> Adapter:
        return cut_for(state.lora, card)

    def local(self, client: Client, download: Adapter) -> Program:
        if client.phase == "local":
            # a copy of the final global adapter; the head, which others use too, stays as it is
            fitted = yield Fit(Model(local=download), train=("local.*",), head=False)
            yield from self.keep(client, fitted.model["local"])
            return Upload(None)
        fitted = yield Fit(Model(lora=download))
        return Upload(fitted.model["lora"])

    def keep(self, client: Client, local: Adapter) -> Generator[Any, Any, None]:
        """Keeps the local adapter, and the features of S own examples as it sees them."""
        seen = yield Predict(Model(local=local), "train", features=True, sample=self.anchors)
        client.memory["local"] = local
        client.memory["anchors"] = input_features(seen.embeddings, seen.examples)

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        sent = uploads.where(lambda one: one.payload is not None)
        if not len(sent):
            return state
        rank = rank_of(state.lora)
        return replace(state, lora=state.lora | average_factors(sent, rank))

    def check(self, payload: Any, card: Card) -> None:
        if payload is not None:
            check_adapter(payload, card)

    def site_model(self, client: Client, download: Adapter) -> Model:
        local: Adapter | None = client.memory.get("local")
        if local is None:
            return Model(lora=download)
        return Model(lora=download, local=local, mix=self.mix(client.memory["anchors"]))

    def mix(self, anchors: Tensor) -> Mix:
        """alpha = lam * mean cosine of the local adapter, 1 - alpha of the global one."""
        near, far = ("lora", "local") if self.as_released else ("local", "lora")
        return Mix(anchors, self.lam, near, far, by="local")

    def global_model(self, state: Any) -> Model:
        return Model(lora=state.lora)

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank)

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank)
