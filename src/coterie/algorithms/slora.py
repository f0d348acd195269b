"""SLoRA: fine-tune a sparse part of W together first, and start LoRA from what that found.

SLoRA, arXiv 2308.06522. Stage 1, the first `sparse_rounds` rounds: clients train the entries of W that one random mask
names, drawn by the server and the same for all and for every round; sum p_i D_i is the next start. At the switch
B = U_r S_r / s and A = V_r^T of each layer's D by truncated SVD, and W is W_0 again. Stage 2 is FedIT from there.
Up and down: in stage 1 the values at the mask, density m n scalars a layer, and once the seed of the mask; in stage 2
the factors, r (m + n).
Deviations: `rounds` counts both stages, so that methods compare at equal rounds. Unless set, the density is
r (m + n) / (m n), the traffic of stage 2, and stage 1 takes a tenth of the rounds (neither is known of the paper). All
of S stands on B, as in FlexLoRA; where D has a lower rank than r, rows of A are completed orthonormally, to be able to
learn. Weight decay acts on D, not on W. One rank is required of all clients; their scales may differ, as in FedIT.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.base import BYTES, Program
from coterie.algorithms.factors import completed, layers_of, require_equal_ranks
from coterie.algorithms.fedit import FedIT
from coterie.algorithms.masked import Values, at_mask, check_values
from coterie.maths.keys import Key
from coterie.maths.sparse_change import low_rank_part
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    Layer,
    LowRank,
    Model,
    Once,
    Phase,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)


@message
class State:
    """The factors of stage 2; of stage 1 the averaged values at the mask (None after it), its seed and last round."""

    lora: Adapter
    values: dict[str, Tensor] | None
    mask_key: Key
    last: int


@message
class Download:
    """Stage 1, down: the averaged values, and the seed of the mask: a Once when sent, the Key itself on arrival."""

    values: dict[str, Tensor]
    mask_key: Any


@dataclass(frozen=True)
class SLoRA(FedIT):
    """Sparse fine-tuning, then LoRA from its SVD (arXiv 2308.06522).

    sparse_rounds: of stage 1; a tenth of all, one at least, where None. density: see above where None; 1 trains all W.
    """

    sparse_rounds: int | None = None
    density: float | None = None

    traits = Traits(
        title="SLoRA",
        paper="arXiv 2308.06522",
        up="values at a common mask: density m n; then B, A: r (m + n)",
        down="their mean; then mean B, mean A: r (m + n)",
        ranks="equal",
        one_client=True,
        equal_clients=True,
        zero_weight=True,
        linear_upload=True,
    )

    def __post_init__(self) -> None:
        if self.sparse_rounds is not None and self.sparse_rounds < 0:
            raise ValueError(f"sparse_rounds must not be negative, not {self.sparse_rounds}")
        if self.density is not None and not 0 < self.density <= 1:
            raise ValueError(f"density must lie in (0, 1], not {self.density:g}")

    def phases(self, rounds: int) -> list[Phase]:
        first = self.stage_1(rounds)
        return [*([Phase("sparse", first)] if first else []), Phase("main", rounds - first)]

    def stage_1(self, rounds: int) -> int:
        """How many of so many rounds are sparse."""
        if self.sparse_rounds is None:
            return max(1, round(rounds / 10)) if rounds > 1 else 0
        return min(self.sparse_rounds, rounds)

    def start(self, federation: Federation, server: Server) -> Any:
        require_equal_ranks(federation, self.traits.title)
        last, rank = self.stage_1(federation.rounds), federation.rank
        zero = {name: torch.zeros(self.count(layer, rank)) for name, layer in federation.layers.items()}
        lora = super().start(federation, server).lora
        return State(lora, zero if last else None, server.key("mask"), last)

    def send(self, state: Any, card: Card) -> Any:
        if state.values is None:
            return super().send(state, card)
        return Download({name: state.values[name] for name in card.layers}, Once(state.mask_key))

    def local(self, client: Client, download: Any) -> Program:
        if not isinstance(download, Download):
            return (yield from super().local(client, download))
        fitted = yield Fit(self.site_model(client, download), train=("sparse.*",))
        return Upload(Values({name: term.values for name, term in fitted.model["sparse"].items()}))

    def aggregate(self, state: Any, uploads: Uploads, server: Server) -> Any:
        sparse = state.values is not None
        due = uploads.where(lambda one: isinstance(one.payload, Values) == sparse)  # all, unless one is out of order
        if not sparse or not len(due):
            return super().aggregate(state, due, server) if len(due) else state
        values = state.values | due.mean(lambda payload: payload.values)  # D = sum p_i D_i
        if server.round < state.last:
            return replace(state, values=values)
        primed = {}
        for name, change in at_mask(values, layers_of(state.lora), state.mask_key).items():
            term = state.lora[name]
            B, A = low_rank_part(change.dense(), term.rank)  # B = U_r S_r / s, A = V_r^T
            primed[name] = LowRank(B, A, 1.0).rescaled(float(term.scale))
        return replace(state, lora=completed(primed, server.key("completion")), values=None)

    def count(self, layer: Layer, rank: int) -> int:
        """How many entries of W train in stage 1."""
        m, n = layer.d_out, layer.d_in
        return min(rank * (m + n), m * n) if self.density is None else max(1, round(self.density * m * n))

    def check(self, payload: Any, card: Card) -> None:
        if not isinstance(payload, Values):
            return super().check(payload, card)
        check_values(payload, card, {name: self.count(layer, card.rank) for name, layer in card.layers.items()})

    def site_model(self, client: Client, download: Any) -> Model:
        if isinstance(download, Download):
            return Model(sparse=at_mask(download.values, client.card.layers, download.mask_key))  # W_0 + D
        return super().site_model(client, download)

    def global_model(self, state: Any) -> Model:
        if state.values is None:
            return super().global_model(state)
        return Model(sparse=at_mask(state.values, layers_of(state.lora), state.mask_key))

    def bytes_of_round(self, layer: Layer, card: Card, number: int, phase: Phase) -> tuple[int, int]:
        if phase.name != "sparse":
            return super().bytes_of_round(layer, card, number, phase)
        return self.count(layer, card.rank) * BYTES, self.count(layer, card.rank) * BYTES
