"""What several methods do alike with low-rank factors, as functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from coterie.algorithms.base import BYTES
from coterie.errors import ConfigError, ModelError
from coterie.maths import lowrank
from coterie.maths.concurrency import mapped
from coterie.maths.keys import Key
from coterie.protocol import Adapter, Card, Client, Federation, Layer, LowRank, Uploads, weighted_sum

Factor = Literal["B", "A"]
"""One factor of a pair."""

Terms = list[tuple[float, LowRank]]
"""What clients have of one layer, each with its weight, in id order."""

T = TypeVar("T")


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


def gaussian_adapter(layers: Mapping[str, Layer], rank: int, scale: float, key: Key) -> Adapter:
    """The Gaussian initialisation of PEFT: A ~ N(0, 1 / r^2), B = 0, fp32, r cut to what the layer can have.

    Each layer draws its own stream row by row.
    """
    made: Adapter = {}
    for name, layer in layers.items():
        r = min(rank, layer.d_out, layer.d_in)
        A = key.fold(name).normal((r, layer.d_in), std=1 / rank)
        made[name] = LowRank(torch.zeros(layer.d_out, r), A, scale)
    return made


def initial_routers(layers: Mapping[str, Layer], outputs: int, key: Key) -> dict[str, Tensor]:
    """A router (outputs, n) for each layer, uniform on [-1/sqrt(n), 1/sqrt(n)] as a linear layer starts, fp32."""
    made = {}
    for name, layer in layers.items():
        bound = 1 / math.sqrt(layer.d_in)
        made[name] = key.fold(name).uniform((outputs, layer.d_in), -bound, bound)
    return made


def initial_factors(card: Card, key: Key) -> Adapter:
    """`initial_adapter` in this client's layers, rank and scale."""
    return initial_adapter(card.layers, card.rank, card.scale, key)


def initial_pair(federation: Federation, key: Key) -> Adapter:
    """`initial_adapter` of all layers at the largest rank of any client, in the first client's scale."""
    return initial_adapter(federation.layers, federation.rank, federation.cards[0].scale, key)


def kept_factors(client: Client, init_key: Key) -> Adapter:
    """What the client keeps as its `factors`; before its first round those that it draws."""
    own: Adapter | None = client.memory.get("factors")
    return initial_factors(client.card, init_key) if own is None else own


def rank_of(adapter: Adapter) -> int:
    """The largest rank of any layer."""
    return max(term.rank for term in adapter.values())


def pair_bytes(layer: Layer, rank: int) -> int:
    """Bytes of a pair B (m, rank), A (rank, n) on the wire."""
    return rank * (layer.d_out + layer.d_in) * BYTES


def factor_shape(layer: Layer, rank: int, part: str) -> tuple[int, int]:
    """Of one factor of a pair, B (m, rank) or A (rank, n)."""
    return (layer.d_out, rank) if part == "B" else (rank, layer.d_in)


def factor_bytes(layer: Layer, rank: int, part: str) -> int:
    """Bytes of one factor on the wire."""
    return math.prod(factor_shape(layer, rank, part)) * BYTES


def factor_of_pair(adapter: Adapter, part: str, layers: Iterable[str] | None = None) -> dict[str, Tensor]:
    """One factor, "B" or "A", of every layer, or of these."""
    return {name: adapter[name].parameters[part] for name in (adapter if layers is None else layers)}


def with_factor(adapter: Adapter, part: str, values: Mapping[str, Tensor]) -> Adapter:
    """The adapter with these values of one factor in place of its own; layers without a value as they are."""
    return adapter | {name: replace(adapter[name], **{part: value}) for name, value in values.items()}


def layers_of(adapter: Adapter) -> dict[str, Layer]:
    """The layers that these factors are for."""
    return {name: Layer(int(term.B.shape[-2]), int(term.A.shape[-1])) for name, term in adapter.items()}


def cut_for(adapter: Adapter, card: Card, rank: int | None = None) -> Adapter:
    """The first r_i columns and rows of each layer that the client has, written in the client's scale."""
    width = card.rank if rank is None else rank
    return {name: adapter[name].truncated(width).rescaled(card.scale) for name in card.layers}


def with_scale(adapter: Adapter, scale: float) -> Adapter:
    """The same factors under another scale, by which the products change."""
    return {name: replace(term, scale=scale) for name, term in adapter.items()}


def by_layer(uploads: Uploads) -> Iterator[tuple[str, Terms]]:
    """Every layer that any client uploaded, with weights renormalised over the clients that have it, in id order.

    One after another, so that of uploads that wait on disk no more than a layer is read at a time.
    """
    return ((name, _terms(name, held)) for name, held in _held_by_layer(uploads).items())


def each_layer(uploads: Uploads, work: Callable[[str, Terms], T]) -> dict[str, T]:
    """What `work` makes of every layer of `by_layer`, some at a time where `mapped` may; for QR, SVD and the like."""
    held = _held_by_layer(uploads)
    return dict(zip(held, mapped(lambda name: work(name, _terms(name, held[name])), held), strict=True))


def _held_by_layer(uploads: Uploads) -> dict[str, list[tuple[float, Mapping[str, LowRank]]]]:
    """The whole payloads of the clients that have a layer, so that nothing is read yet, with renormalised weights."""
    held: dict[str, list[tuple[float, Mapping[str, LowRank]]]] = {}
    for _, adapter, weight in uploads.items():
        for name in adapter:
            held.setdefault(name, []).append((weight, adapter))
    totals = {name: sum(weight for weight, _ in some) for name, some in held.items()}
    return {
        name: some if len(some) == len(uploads) else [(weight / totals[name], adapter) for weight, adapter in some]
        for name, some in held.items()
        if totals[name] > 0
    }


def _terms(name: str, held: Iterable[tuple[float, Mapping[str, LowRank]]]) -> Terms:
    """One layer of these adapters."""
    return [(weight, adapter[name]) for weight, adapter in held]


def holders(uploads: Uploads, layer: str) -> Uploads:
    """Those whose payload, a dict by layer, has this layer and who count, with weights renormalised over them."""
    return uploads.where(lambda one: one.weight > 0 and layer in one.payload)


def check_adapter(payload: Any, card: Card, rank: int | None = None) -> None:
    """Raises ModelError unless the upload is one low-rank term for each of the client's layers, in its own scale.

    rank: what all terms must have, where a method cannot use less.
    """
    if not isinstance(payload, Mapping) or set(payload) != set(card.layers):
        found = f"{len(payload)} entries" if isinstance(payload, Mapping) else type(payload).__name__
        raise ModelError(f"client {card.id}: one term for each of {len(card.layers)} layers expected, not {found}")
    for name, term in payload.items():
        if not isinstance(term, LowRank):
            raise ModelError(f"client {card.id}, layer {name}: low-rank factors expected, not {type(term).__name__}")
        if term.scale != card.scale:
            raise ModelError(f"client {card.id}, layer {name}: scale {term.scale} where the client's is {card.scale:g}")
        if rank is not None and term.rank != rank:
            raise ModelError(f"client {card.id}, layer {name}: rank {term.rank} where {rank} is expected")


def is_factor(payload: Any, card: Card, part: Factor) -> bool:
    """Whether this is that factor, A (r, n) or B (m, r), of each of the client's layers."""
    wanted = {name: factor_shape(layer, card.rank, part) for name, layer in card.layers.items()}
    found = payload.items() if isinstance(payload, Mapping) else ()
    return {name: tuple(getattr(one, "shape", ())) for name, one in found} == wanted


def check_factor(payload: Any, card: Card, part: Factor) -> None:
    """Raises ModelError unless the upload `is_factor`."""
    if not is_factor(payload, card, part):
        shape = f"(m, {card.rank})" if part == "B" else f"({card.rank}, n)"
        raise ModelError(f"client {card.id}: an upload must be one {part} {shape} for each adapted layer")


def alike(terms: Terms, rank: int) -> Terms:
    """Without clients of weight zero, in the first client's scale and zero-padded to `rank`.

    B_i takes up the difference of scales, so that s_i B_i counts; products are unchanged.
    """
    scale = float(terms[0][1].scale)
    return [(weight, term.rescaled(scale).padded(rank)) for weight, term in terms if weight > 0]


def mean_factors(terms: Sequence[tuple[float, LowRank]]) -> LowRank:
    """Bbar = sum p_i B_i, Abar = sum p_i A_i of one layer's terms, in one scale and of one rank."""
    B = weighted_sum([(weight, term.B) for weight, term in terms])
    A = weighted_sum([(weight, term.A) for weight, term in terms])
    return LowRank(B, A, float(terms[0][1].scale))


def average_factors(uploads: Uploads, rank: int) -> Adapter:
    """Factor by factor: `mean_factors` of each layer's terms, made `alike`."""
    held = _held_by_layer(uploads)
    return {name: mean_factors(alike(_terms(name, some), rank)) for name, some in held.items()}


def best_rank(
    uploads: Uploads,
    rank: int,
    *,
    scaled: bool = True,
    method: Literal["auto", "exact", "randomised"] = "auto",
    oversample: int = 2,
    key: Key | None = None,
) -> Adapter:
    """The best rank-`rank` approximation of sum p_i s_i B_i A_i, layer by layer, never formed densely.

    B = Q_B U Sigma carries the magnitudes, A = (Q_A V)^T has orthonormal rows (FedPA-LoRA, Eqs. 4-7); the result's
    scale is 1. With scaled=False the products are taken without their scales, which must then be equal, and the
    result keeps that scale. `key` draws the test matrices of the randomised route.
    """

    def of_layer(name: str, terms: Terms) -> LowRank:
        best = lowrank.best_rank(
            [(term.left, term.A) for _, term in terms],
            [weight * (float(term.scale) if scaled else 1.0) for weight, term in terms],
            rank,
            method=method,
            oversample=oversample,
            key=None if key is None else key.fold(name),
        )
        return LowRank(best.B, best.A, 1.0 if scaled else terms[0][1].scale)

    return each_layer(uploads, of_layer)


def stack_weighted(uploads: Uploads) -> Adapter:
    """All factors side by side, the weight p_i s_i on one factor only: the product is sum p_i s_i B_i A_i exactly.

    Clients of weight zero are left out.
    """
    made: Adapter = {}
    for name, terms in by_layer(uploads):
        weights = [weight * float(term.scale) for weight, term in terms]
        made[name] = LowRank(*lowrank.stack_one_sided([(term.left, term.A) for _, term in terms], weights), 1.0)
    return made


def completed(adapter: Adapter, key: Key) -> Adapter:
    """Zero rows of A replaced by orthonormal ones, so that their directions can still learn; products unchanged.

    In a layer narrower than the rank as many as there is room for; the rest stay zero.
    """
    made: Adapter = {}
    for name, term in adapter.items():
        alive = int((term.A.abs().amax(dim=-1) > 0).sum())
        room = max(alive, min(term.rank, term.A.shape[-1]))
        if alive < room:
            A = lowrank.orthonormal_rows_completed(term.A[:alive], room, key.fold(name))
            made[name] = replace(term.truncated(room), A=A.to(term.A.dtype)).padded(term.rank)
        else:
            made[name] = term
    return made


def require_equal_ranks(federation: Federation, method: str) -> None:
    """Raises ConfigError naming two clients whose ranks differ."""
    for first, other in _unequal(federation, lambda card: card.rank):
        raise ConfigError(
            f"{method} needs one rank for all clients, but {first.id} has {first.rank} and {other.id} has "
            f"{other.rank}; give them one rank, or choose a method with unequal ranks (coterie list)"
        )


def require_equal_layers(federation: Federation, method: str) -> None:
    """Raises ConfigError naming two clients that adapt different layers."""
    for first, other in _unequal(federation, lambda card: set(card.layers)):
        odd = min(set(first.layers) ^ set(other.layers))
        raise ConfigError(
            f"{method} compares clients layer by layer and needs the same adapted layers for all, but of "
            f"{first.id} and {other.id} only one has {odd}; give them one base model and one set of target modules"
        )


def require_common_scale(federation: Federation, method: str) -> None:
    """Raises ConfigError naming two clients whose scales differ."""
    for first, other in _unequal(federation, lambda card: card.scale):
        raise ConfigError(
            f"{method} works on the unscaled product B A and needs one scale for all clients, but {first.id} has "
            f"{first.scale:g} and {other.id} has {other.scale:g}; set a constant scale (lora.scaling: constant)"
        )


def _unequal(federation: Federation, of: Callable[[Card], object]) -> Iterator[tuple[Card, Card]]:
    """The first client with each one that differs from it in this."""
    first = federation.cards[0]
    return ((first, card) for card in federation.cards if of(card) != of(first))
