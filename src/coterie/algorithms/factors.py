"""What several methods do alike with low-rank factors, as functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch

from coterie.errors import ConfigError
from coterie.maths import lowrank
from coterie.maths.keys import Key
from coterie.protocol import Adapter, Card, Federation, Layer, LowRank, Uploads, weighted_sum


def initial_adapter(layers: Mapping[str, Layer], rank: int, scale: float, key: Key) -> Adapter:
    """Standard LoRA initialisation: A uniform on [-1/sqrt(n), 1/sqrt(n)] (Kaiming with a = sqrt 5), B = 0, fp32.

    Each layer draws its own stream row by row, so the factors of a smaller rank are the first rows of a larger one.
    """
    made: Adapter = {}
    for name, layer in layers.items():
        bound = 1 / math.sqrt(layer.d_in)
        A = key.fold(name).uniform((rank, layer.d_in), -bound, bound)
        made[name] = LowRank(torch.zeros(layer.d_out, rank), A, scale)
    return made


def initial_factors(card: Card, key: Key) -> Adapter:
    """`initial_adapter` in this client's layers, rank and scale."""
    return initial_adapter(card.layers, card.rank, card.scale, key)


def cut_for(adapter: Adapter, card: Card, rank: int | None = None) -> Adapter:
    """The first r_i columns and rows of each layer that the client has, written in the client's scale."""
    width = card.rank if rank is None else rank
    return {name: adapter[name].truncated(width).rescaled(card.scale) for name in card.layers}


def average_factors(uploads: Uploads, rank: int) -> Adapter:
    """Factor by factor: Bbar = sum p_i B_i, Abar = sum p_i A_i, shorter ones zero-padded to `rank`.

    Where scales differ the averaged B_i are first rewritten in the first client's scale, so that s_i B_i counts.
    """
    entries = [(weight, payload) for _, payload, weight in uploads.items()]
    made: Adapter = {}
    for name in entries[0][1]:
        scale = entries[0][1][name].scale
        terms = [(weight, adapter[name].rescaled(scale).padded(rank)) for weight, adapter in entries]
        made[name] = LowRank(
            weighted_sum([(weight, term.B) for weight, term in terms]),
            weighted_sum([(weight, term.A) for weight, term in terms]),
            scale,
        )
    return made


def best_rank(
    uploads: Uploads,
    rank: int,
    *,
    scaled: bool = True,
    method: Literal["auto", "exact", "randomised"] = "auto",
    key: Key | None = None,
) -> Adapter:
    """The best rank-`rank` approximation of sum p_i s_i B_i A_i, layer by layer, never formed densely.

    B = Q_B U Sigma carries the magnitudes, A = (Q_A V)^T has orthonormal rows (FedPA-LoRA, Eqs. 4-7); the result's
    scale is 1. With scaled=False the products are taken without their scales, which must then be equal, and the
    result keeps that scale. `key` draws the test matrices of the randomised route.
    """
    entries = [(weight, payload) for _, payload, weight in uploads.items()]
    made: Adapter = {}
    for name in entries[0][1]:
        terms = [(weight, adapter[name]) for weight, adapter in entries]
        best = lowrank.best_rank(
            [(term.left, term.A) for _, term in terms],
            [weight * (float(term.scale) if scaled else 1.0) for weight, term in terms],
            rank,
            method=method,
            key=None if key is None else key.fold(name),
        )
        made[name] = LowRank(best.B, best.A, 1.0 if scaled else terms[0][1].scale)
    return made


def stack_weighted(uploads: Uploads) -> Adapter:
    """All factors side by side, the weight p_i s_i on one factor only: the product is sum p_i s_i B_i A_i exactly."""
    entries = [(weight, payload) for _, payload, weight in uploads.items()]
    made: Adapter = {}
    for name in entries[0][1]:
        terms = [(weight, adapter[name]) for weight, adapter in entries]
        B = torch.cat([term.left for _, term in terms], dim=-1)
        A = torch.cat([weight * float(term.scale) * term.A for weight, term in terms], dim=-2)
        made[name] = LowRank(B, A, 1.0)
    return made


def completed(adapter: Adapter, key: Key) -> Adapter:
    """Zero rows of A replaced by orthonormal ones, so that their directions can still learn; products unchanged."""
    made: Adapter = {}
    for name, term in adapter.items():
        alive = int((term.A.abs().amax(dim=-1) > 0).sum())
        A = lowrank.orthonormal_rows_completed(term.A[:alive], term.rank, key.fold(name))
        made[name] = replace(term, A=A.to(term.A.dtype))
    return made


def require_equal_ranks(federation: Federation, method: str) -> None:
    """Raises ConfigError naming two clients whose ranks differ."""
    first = federation.cards[0]
    for card in federation.cards:
        if card.rank != first.rank:
            raise ConfigError(
                f"{method} needs one rank for all clients, but {first.id} has {first.rank} and {card.id} has "
                f"{card.rank}; give them one rank, or choose a method with unequal ranks (coterie list)"
            )


def require_common_scale(federation: Federation, method: str) -> None:
    """Raises ConfigError naming two clients whose scales differ."""
    first = federation.cards[0]
    for card in federation.cards:
        if card.scale != first.scale:
            raise ConfigError(
                f"{method} works on the unscaled product B A and needs one scale for all clients, but {first.id} has "
                f"{first.scale:g} and {card.id} has {card.scale:g}; set a constant scale (lora.scaling: constant)"
            )
