"""Experts for all clients, of which each trains a few: the model that a client is sent, and what goes back of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.contributions import Assignment
from coterie.algorithms.factors import (
    average_factors,
    check_adapter,
    factor_shape,
    initial_factors,
    initial_routers,
)
from coterie.errors import ModelError
from coterie.protocol import Adapter, Card, Client, Model, Routed, Uploads, message

Block = dict[str, Tensor]
"""B (m, r) of one expert, by layer."""


@message
class Common:
    """What clients share beside experts: an adapter that always acts (none in an ablation) and the layers' routers.

    router (M, n), bias (M,).
    """

    shared: Adapter
    router: dict[str, Tensor]
    bias: dict[str, Tensor]

    @property
    def terms(self) -> dict[str, Adapter]:
        """The adapter as a model's term, where there is one."""
        return {"shared": self.shared} if self.shared else {}


@message
class Start:
    """A Once of the common pair's seed, for the first round; the Key itself on arrival."""

    init_key: Any


@message
class Download:
    """A Once of A^global, the experts that the client routes to, what is shared, and what the client is assigned.

    common: None before anybody has trained it. shared_key: a Once of the seed of the first A^s, where all have one.
    """

    A: Any
    experts: dict[int, Block]
    common: Common | None
    assignment: Assignment
    shared_key: Any


@message
class Trained:
    """The blocks that a client trained, by expert, and its copy of what is shared."""

    blocks: dict[int, Block]
    common: Common

    def fits(self, experts: int) -> bool:
        """Whether routers have an output for each of so many experts."""
        return all(len(bias) == experts for bias in self.common.bias.values())


def starting_common(client: Client, download: Download, shared: bool) -> Common:
    """What a client starts from beside experts: what all share, else its own draw.

    That is an adapter as LoRA starts, and routers as a linear layer starts, with biases of zero.
    """
    if download.common is not None:
        return download.common
    card, M = client.card, len(download.assignment.target)
    key = client.key("shared") if download.shared_key is None else download.shared_key.fold("shared")
    pair = initial_factors(card, key) if shared else {}
    bias = {name: torch.zeros(M) for name in card.layers}
    return Common(pair, initial_routers(card.layers, M, client.key("router")), bias)


def mean_common(trained: Uploads, rank: int) -> Common:
    """What is shared, parameter by parameter the mean by the uploads' weights."""
    return Common(
        average_factors(trained.each(lambda sent: sent.common.shared), rank),
        trained.mean(lambda sent: sent.common.router),
        trained.mean(lambda sent: sent.common.bias),
    )


def routed_model(card: Card, download: Download, common: Common, own: Mapping[int, Block] | None = None) -> Model:
    """A client's model (Eq. 12): the experts that it was sent, `own` blocks in their place, and what is shared.

    All M experts have a place, so that clients of other choices stack; whom it does not route to is not allowed.
    """
    M, blocks, experts = len(download.assignment.target), download.experts | dict(own or {}), {}
    allowed = torch.zeros(M, dtype=torch.bool).index_fill(0, torch.tensor(download.assignment.inference), True)
    for name, layer in card.layers.items():
        none, A, scale = torch.zeros(factor_shape(layer, card.rank, "B")), (download.A[name],), card.scale
        B = tuple(blocks[m][name] if m in blocks else none.clone() for m in range(M))
        experts[name] = Routed(B, A, common.router[name], scale, common.bias[name], allowed=allowed)
    return Model(experts=experts, **common.terms)  # type: ignore[arg-type]  # a term's name is no field's


def trained_parts(model: Model, active: Sequence[int]) -> Trained:
    """What of a client's model goes back: the active blocks alone, and its copy of what is shared."""
    terms: Mapping[str, Routed] = model["experts"]
    blocks = {m: {name: term.B[m] for name, term in terms.items()} for m in active}
    router = {name: term.router for name, term in terms.items()}
    bias = {name: term.bias for name, term in terms.items() if term.bias is not None}
    shared: Any = model.terms.get("shared", {})
    return Trained(blocks, Common(shared, router, bias))


def check_trained(payload: Trained, card: Card, shared: bool, most: int) -> None:
    """Raises ModelError unless blocks and routers fit the client's layers, one to `most` blocks of M experts."""
    common, M = payload.common, max((len(bias) for bias in payload.common.bias.values()), default=0)
    if shared or common.shared:
        check_adapter(common.shared, card, card.rank)
    found = {
        "routers": {name: tuple(value.shape) for name, value in common.router.items()},
        "biases": {name: tuple(value.shape) for name, value in common.bias.items()},
    }
    wanted = {
        "routers": {name: (M, layer.d_in) for name, layer in card.layers.items()},
        "biases": dict.fromkeys(card.layers, (M,)),
    }
    for what, shapes in found.items():
        if shapes != wanted[what]:
            raise ModelError(f"client {card.id}: {what} of every layer over as many experts expected, not {shapes}")
    if not 1 <= len(payload.blocks) <= most or not set(payload.blocks) <= set(range(M)):
        raise ModelError(
            f"client {card.id}: 1 to {most} blocks of {M} experts expected, not of {sorted(payload.blocks)}"
        )
    blocks = {name: factor_shape(layer, card.rank, "B") for name, layer in card.layers.items()}
    for m, block in payload.blocks.items():
        if {name: tuple(B.shape) for name, B in block.items()} != blocks:
            raise ModelError(f"client {card.id}: the block of expert {m} must be one B (m, {card.rank}) for each layer")
