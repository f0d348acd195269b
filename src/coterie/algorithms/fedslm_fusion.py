"""FedSLM's groups of clients with one base model each, and the fusion of what they made into one full model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.algorithms.base import Program
from coterie.algorithms.factors import average_factors, initial_adapter, rank_of
from coterie.errors import ConfigError, ModelError, nearest
from coterie.maths.keys import Key
from coterie.protocol import Adapter, Card, Dense, Layer, LowRank, Uploads, Weights, message

Fuse = Literal["literal", "trained_only"]
"""What a group that did not train a layer has for it: its truncation of the layer, or the server's own weights."""

MLP = ("gate_proj", "up_proj", "down_proj")


@message
class Groups:
    """What stage 1 has made of each group, by spec, and who ever answered.

    cores: Sigma (k, k) by layer of each compressed group. full: the factors of the group of full models, by its spec,
    if there are such clients. answered: the examples of every client that has answered once, by spec and id.
    """

    cores: dict[str, dict[str, Tensor]]
    full: dict[str, Adapter]
    answered: dict[str, dict[str, int]]

    @classmethod
    def begun(cls, cards: Iterable[Card], trained: Sequence[str] | None, key: Key) -> Groups:
        """Identities for compressed clients (see `trained_cores`), fresh factors for the full models' largest rank."""
        cores: dict[str, dict[str, Tensor]] = {}
        full: dict[str, list[Card]] = {}
        for card in cards:
            if factored(card):
                chosen = trained_cores(card, trained)
                cores[card.spec] = {name: torch.eye(layer.inner or 0) for name, layer in chosen.items()}
            else:
                full.setdefault(card.spec, []).append(card)
        pairs = {
            spec: initial_adapter(held[0].layers, max(card.rank for card in held), held[0].scale, key)
            for spec, held in full.items()
        }
        return cls(cores, pairs, {})

    def averaged(self, uploads: Uploads) -> Groups:
        """Each group's own mean of what its clients sent (Eq. 7); a group without any stays as it is."""
        cores, full = dict(self.cores), dict(self.full)
        answered = {spec: dict(clients) for spec, clients in self.answered.items()}
        for spec in sorted({one.card.spec for one in uploads if one.weight > 0}):
            members = uploads.where(lambda one, spec=spec: one.weight > 0 and one.card.spec == spec)  # type: ignore[misc]
            if spec in cores:
                cores[spec] = members.mean()
            else:
                full[spec] = full[spec] | average_factors(members, rank_of(full[spec]))
            answered[spec] = answered.get(spec, {}) | {one.card.id: one.card.examples for one in members}
        return Groups(cores, full, answered)

    def shares(self) -> dict[str, float]:
        """n_g / n over the clients that ever answered (Eq. 9); a group that never did is none."""
        held = {spec: sum(clients.values()) for spec, clients in self.answered.items()}
        total = sum(held.values())
        return {spec: examples / total for spec, examples in held.items() if examples}


def factored(card: Card) -> dict[str, Layer]:
    """The client's compressed layers; none of a full model."""
    return {name: layer for name, layer in card.layers.items() if layer.inner is not None}


def trained_cores(card: Card, names: Sequence[str] | None) -> dict[str, Layer]:
    """The compressed layers in which a core is trained: those of these names or name endings.

    names: None for the projections of the MLP, and where no layer is called like one, for all compressed layers.

    Raises:
        ConfigError: a name that is no compressed layer's, or no name at all.
    """
    held = factored(card)
    if names is not None and not names:
        raise ConfigError("trained: name a layer, such as up_proj, or leave the option out")
    for name in names or ():
        if not any(_ends(layer, name) for layer in held):
            last = list(dict.fromkeys(layer.rpartition(".")[2] for layer in held))
            raise ConfigError(f"trained: client {card.id} has no compressed layer {name!r}{nearest(name, last)}")
    chosen = {layer: shape for layer, shape in held.items() if any(_ends(layer, name) for name in names or MLP)}
    return chosen or held


def fused(groups: Groups, layers: Iterable[str], fuse: Fuse) -> Program:
    """=> {layer: W_g - W} for the layers in S, a program of the server (Eqs. 8 and 9).

    One layer's matrices at a time are in memory beside the result. layers: all adapted ones; S are those that some
    group holds compressed, or, without any such group, all of them.
    """
    shares = groups.shares()
    found: dict[str, Dense] = {}
    for name in layers:
        whole = (yield Weights((name,)))[name]
        W: Tensor = whole if isinstance(whole, Tensor) else whole[0] @ whole[1]
        parts = []
        for spec, share in shares.items():
            if spec in groups.full:
                parts.append((share, _full(W, groups.full[spec].get(name)), False))
                continue
            held = (yield Weights((name,), spec))[name]
            core = groups.cores[spec].get(name)
            parts.append((share, *_reconstructed(W, held, core, fuse)))
        if any(compressed for _, _, compressed in parts) or not groups.cores:
            W_g = torch.stack([share * W_i.double() for share, W_i, _ in parts]).sum(dim=0)
            found[name] = Dense((W_g - W.double()).to(W.dtype))
    return found


def _full(W: Tensor, term: LowRank | None) -> Tensor:
    """W + s B A, what the group of full models has in place of a reconstruction."""
    return W if term is None else W.double() + term.product().double()


def _reconstructed(W: Tensor, held: Any, core: Tensor | None, fuse: Fuse) -> tuple[Tensor, bool]:
    """U Sigma V (Eq. 8), and whether the group holds the layer compressed at all."""
    if isinstance(held, Tensor):
        return held, False
    if core is None and fuse == "trained_only":
        return W, True
    U, V = (factor.double() for factor in held)
    return (U @ V if core is None else U @ core.double() @ V), True


def check_cores(payload: Any, card: Card, layers: Mapping[str, Layer]) -> None:
    """Raises ModelError unless the upload is one core (k, k) for each of these layers."""
    if not isinstance(payload, Mapping) or set(payload) != set(layers):
        raise ModelError(f"client {card.id}: one core for each of {len(layers)} compressed layers is expected")
    for name, layer in layers.items():
        shape = tuple(payload[name].shape) if isinstance(payload[name], Tensor) else type(payload[name]).__name__
        if shape != (layer.inner, layer.inner):
            wanted = (layer.inner, layer.inner)
            raise ModelError(f"client {card.id}, layer {name}: a core {shape} where {wanted} is expected")


def _ends(layer: str, name: str) -> bool:
    return layer == name or layer.endswith(f".{name}")
