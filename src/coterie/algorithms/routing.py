"""One expert for each cluster and a router beside: what a client is sent, the term that it trains, what it uploads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.base import BYTES
from coterie.algorithms.clustered import members
from coterie.algorithms.factors import check_adapter, initial_routers
from coterie.errors import ModelError
from coterie.maths.keys import Key
from coterie.protocol import Adapter, Card, Layer, Routed, Uploads, message


@message
class Download:
    """All experts, the router (2M - 1, n) of each layer, and which expert is the client's own."""

    experts: list[Adapter]
    router: dict[str, Tensor]
    own: int

    def terms(self) -> dict[str, Routed]:
        """By layer: outputs 0..M-1 point to experts 0..M-1, the M - 1 others to the own one, and the top M count."""
        M, made = len(self.experts), {}
        places = torch.tensor([*range(M), *[self.own] * (M - 1)])
        for name, router in self.router.items():
            terms = [expert[name] for expert in self.experts]
            B, A = tuple(term.B for term in terms), tuple(term.A for term in terms)
            made[name] = Routed(B, A, router, scale=terms[0].scale, outputs=places, top=M)
        return made


@message
class Trained:
    """The client's own expert and router."""

    expert: Adapter
    router: dict[str, Tensor]

    @classmethod
    def of(cls, terms: Mapping[str, Routed], own: int) -> Trained:
        """The expert `own` and the router of every layer."""
        expert = {name: term.expert(own) for name, term in terms.items()}
        return cls(expert, {name: term.router for name, term in terms.items()})

    def fits(self, router: Mapping[str, Tensor]) -> bool:
        """Whether the router has as many outputs as this one, in every layer."""
        return all(one.shape == router[name].shape for name, one in self.router.items())


def outputs(experts: int) -> int:
    """2M - 1 outputs of a router over M experts."""
    return 2 * experts - 1


def first_routers(layers: Mapping[str, Layer], experts: int, key: Key) -> dict[str, Tensor]:
    """A router for each layer, as a linear layer starts."""
    return initial_routers(layers, outputs(experts), key)


def router_bytes(layer: Layer, experts: int) -> int:
    """Bytes of one layer's router on the wire."""
    return outputs(experts) * layer.d_in * BYTES


def trained_by(clients: Collection[str], uploads: Uploads, router: Mapping[str, Tensor]) -> Uploads:
    """Those of these clients who count and trained an expert and a router, of as many outputs as were sent."""
    return members(
        uploads,
        lambda one: one.card.id in clients and isinstance(one.payload, Trained) and one.payload.fits(router),
    )


def check_expert(payload: Any, card: Card) -> None:
    """Raises ModelError unless the upload is an adapter or, with routers of one number of outputs, `Trained`."""
    check_adapter(payload.expert if isinstance(payload, Trained) else payload, card)
    if isinstance(payload, Trained):
        shapes = {name: tuple(router.shape) for name, router in payload.router.items()}
        found = {shape[0] for shape in shapes.values() if shape}
        if len(found) != 1 or shapes != {name: (*found, layer.d_in) for name, layer in card.layers.items()}:
            raise ModelError(f"client {card.id}: routers (2M - 1, n) of every layer expected, not {shapes}")
