"""Sketch-PA: keep your own factors, be drawn towards a common product that is rebuilt from averaged sketches.

Ours, of FedPA-LoRA (arXiv 2608.15381), Algorithm 1, and SeFoRA (arXiv 2608.10144), Algorithms 1 and 2.
Clients are FedPA-LoRA's: factors preserved, product alignment, unequal r_i and R_i. What they upload is SeFoRA's:
linear sketches, so the server never sees a factor, needs their sum alone, and there is no bilinear mismatch.
Up: Y_i = B_i (A_i Omega) and Z_i = (Psi B_i) A_i, s m + k n scalars a layer whatever r_i, with s = 3 R and k = 6 R, R
the largest R_i. Down: the reference, R_i (m + n); once, the seed of the initial factors and of all rounds' matrices.
The reference is the truncated SVD of what the mean sketch gives back, so that its leading R_i columns and rows are a
client's, as FedPA-LoRA's are; in a narrower layer the rest is zero. Exact where the mean product has a rank up to R;
beyond, nearer than SeFoRA's k = r + 2.
Deviations: lines 16-19 of FedPA-LoRA are SeFoRA's lines 30-31, with shrunk least squares (`sefora_plus`); all else is
FedPA-LoRA's. A layer is never sketched wider or higher than it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch

from coterie.algorithms.base import Program
from coterie.algorithms.factors import kept_factors, layers_of
from coterie.algorithms.fedpa_lora import Download as References
from coterie.algorithms.fedpa_lora import FedPALoRA, State, preserved
from coterie.algorithms.sketch_measures import sketch_losses, trained_by
from coterie.algorithms.sketches import check_sketches, mean_sketches, sketch_bytes, sketched
from coterie.errors import ConfigError
from coterie.maths.sketch import unsketch_shrunk
from coterie.protocol import (
    Card,
    Client,
    Federation,
    Layer,
    LowRank,
    Once,
    Seen,
    Server,
    Upload,
    Uploads,
    message,
)


@message
class Download(References):
    """What FedPA-LoRA downloads, and R, which sets the sizes of the sketches; the seed serves them too."""

    rank: int


@dataclass(frozen=True)
class SketchPA(FedPALoRA):
    """FedPA-LoRA on sketches.

    columns, rows: of Omega and Psi, as multiples of R. rank: R, the largest R_i unless given.
    """

    columns: int = 3
    rows: int = 6
    rank: int | None = None

    reconstruction: Literal["auto", "exact", "randomised"] = field(default="exact", init=False, repr=False)
    oversample: int = field(default=2, init=False, repr=False)

    traits = replace(
        FedPALoRA.traits,
        title="Sketch-PA",
        paper="ours, of arXiv 2608.15381 and 2608.10144",
        up="sketches: 3R m + 6R n",
        best_rank=False,
        linear_upload=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.columns < self.rows:
            raise ValueError(f"columns ({self.columns}) must be at least 1 and below rows ({self.rows})")

    def sizes(self, layer: Layer, R: int) -> tuple[int, int]:
        """s and k of one layer."""
        s = min(self.columns * R, layer.d_out, layer.d_in)
        return s, max(s, min(self.rows * R, layer.d_out))

    def in_federation(self, federation: Federation) -> Self:
        top = max(card.down_rank for card in federation.cards)
        return replace(self, rank=top) if self.rank is None else self

    def start(self, federation: Federation, server: Server) -> State:
        state = super().start(federation, server)
        if self.rank is not None and self.rank < state.rank:
            raise ConfigError(f"rank must be at least {state.rank}, the largest reference rank, not {self.rank}")
        return replace(state, rank=self.rank or state.rank)

    def send(self, state: State, card: Card) -> Download:
        sent = super().send(state, card)
        return Download(sent.reference, Once(state.init_key), state.rank)

    def local(self, client: Client, download: Any) -> Program:
        own = kept_factors(client, download.init_key)
        trained = yield from preserved(client, own, self.alignment(download.reference))
        key = download.init_key.fold("sketch", client.round)
        return Upload(sketched(trained, client.card, key, lambda one: self.sizes(one, download.rank)))

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        key, layers = state.init_key.fold("sketch", server.round), layers_of(state.reference)
        means = mean_sketches(uploads, layers, key, lambda layer: self.sizes(layer, state.rank))
        made = {}
        for name, (Y, Z, (Omega, Psi)) in means.items():
            before = state.reference[name]
            U, SVh = unsketch_shrunk(Y, Z, Omega, Psi, min(state.rank, Y.shape[-1]))
            S = SVh.norm(dim=-1)
            B, A = U * S, torch.where(S[:, None] > 0, SVh / S[:, None], 0)
            made[name] = LowRank(B.to(before.B.dtype), A.to(before.A.dtype), before.scale).padded(state.rank)
        return replace(state, reference=state.reference | made)

    def check(self, payload: Any, card: Card) -> None:
        check_sketches(payload, card)

    def measures(self, state: State, federation: Federation, seen: Mapping[str, Seen]) -> dict[str, float]:
        layers = federation.layers
        lost = sketch_losses(
            trained_by(seen), state.reference, state.rank, lambda name: self.sizes(layers[name], state.rank)
        )
        return super().measures(state, federation, seen) | lost

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return sketch_bytes(layer, lambda one: self.sizes(one, self.rank or card.down_rank))
