"""FedProto: exchange the mean feature of each class, and draw every client's features towards the common ones.

FedProto, arXiv 2105.00243, Algorithm 1, and its released code. Models are never averaged: a client trains its own
adapter on cross-entropy plus lambda times the mean squared difference between an example's feature and the global
prototype of its class; a prototype is the mean feature of a class, the global one the mean over the clients that hold
the class. Classes without a global prototype add nothing, so the first round is plain training.
Up: the prototypes of the client's own C_i classes, C_i d scalars whatever the layers; their names are plain numbers. So
is how many examples each has, which is sent with `by_count` alone. Down: the global prototypes, C d; once, a seed.
Deviations: clients count equally for a class, as in the code; the paper's weights by examples are `by_count`. Means
come from a pass after training, without dropout; the code averages what the last epoch's steps saw (`literal`). For
language models, where the method has no form of its own, the class is the option that is the answer, and the feature
the last hidden state, from which the answer's first token is predicted; open answers have no classes and are refused.
Where clients' features differ in size, all are projected to the smallest size by Gaussian matrices, one for each size,
from one seed; nothing aligns the spaces but training. There is no server model, with which FedSLM compares it: the
figure of a federation is the mean over clients' own models. Beside it stands each client's model judged by the nearest
global prototype instead of its head or of the options' tokens (`nearest`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.base import BYTES, Algorithm, Program
from coterie.algorithms.factors import kept_factors
from coterie.errors import ConfigError, ModelError
from coterie.maths.keys import Key
from coterie.protocol import (
    Card,
    ClassMeans,
    Client,
    Federation,
    Fit,
    Layer,
    Model,
    Once,
    Predict,
    PrototypeDistance,
    Prototypes,
    Server,
    Traits,
    Upload,
    Uploads,
    input_features,
    message,
)


@message
class Space:
    """Where prototypes live: w entries, from features of `width` entries (None: of w); the seeds of all matrices."""

    init_key: Key
    entries: int
    projected: bool


@message
class State:
    """The space, the number C of classes, and the global prototypes by class."""

    space: Space
    classes: int
    prototypes: dict[int, Tensor]


@message
class Download:
    """The space (a Once when sent), C, and the classes that have a prototype, with those (k, w); None before any."""

    space: Any
    classes: int
    held: tuple[int, ...]
    means: Tensor | None


@dataclass(frozen=True)
class FedProto(Algorithm):
    """Federated prototype learning (arXiv 2105.00243) over adapters of any models.

    lam: lambda, the weight of the distance to prototypes. by_count: whether a client counts for a class by its
    examples. literal: prototypes of the features that the last epoch of training saw. nearest: whether to measure the
    nearest prototype as a classifier too.
    """

    lam: float = 1.0
    by_count: bool = False
    literal: bool = False
    nearest: bool = True

    traits = Traits(
        title="FedProto",
        paper="arXiv 2105.00243",
        up="C_i d beside all layers: class means of features",
        down="C d beside all layers: global prototypes",
        ranks="unequal",
        bases="any",
        weights="uniform",
        head="local",
        adaptive_size=True,
        personal=True,
        keeps_memory=True,
    )

    def start(self, federation: Federation, server: Server) -> State:
        widths, counts = ({card.id: getattr(card, name) for card in federation.cards} for name in ("width", "classes"))
        for name in sorted(widths):
            if widths[name] is None or counts[name] is None:
                raise ConfigError(
                    f"FedProto needs classes and features, and client {name} has {counts[name]} classes and features "
                    f"of size {widths[name]}; take a task of classes or of options, not of open answers"
                )
        space = Space(server.key("init"), min(widths.values()), len(set(widths.values())) > 1)
        return State(space, max(counts.values()), {})

    def send(self, state: State, card: Card) -> Download:
        held = tuple(sorted(state.prototypes))
        means = torch.stack([state.prototypes[c] for c in held]) if held else None
        return Download(Once(state.space), state.classes, held, means)

    def local(self, client: Client, download: Download) -> Program:
        points = prototypes_of(download, client.card)
        drawn = () if points is None else (PrototypeDistance(points, self.lam),)  # L_S + lambda L_R
        model = Model(lora=kept_factors(client, download.space.init_key))
        fitted = yield Fit(model, penalties=drawn, collect=self.literal)
        client.memory["factors"] = fitted.model["lora"]
        if self.literal:
            found = fitted.collected
        else:
            seen = yield Predict(fitted.model, "train", top_k=1, features=True)
            chosen = [input_features(rows, seen.examples) for rows in (seen.embeddings, seen.classes)]
            found = ClassMeans.of(*chosen)  # C_i^(j), the mean of f_i over the examples of class j
        counts = found.counts if self.by_count else (1,) * len(found.classes)  # private unless they weigh
        return Upload(replace(found, means=placed(found.means, download.space), counts=counts))

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        common = ClassMeans.common([(weight, sent) for _, sent, weight in uploads.items()], self.by_count)
        return replace(state, prototypes=state.prototypes | common)  # a class that nobody holds now keeps its own

    def check(self, payload: Any, card: Card) -> None:
        k = len(payload.classes) if isinstance(payload, ClassMeans) else 0
        if not k or len(payload.counts) != k or payload.means.dim() != 2 or len(payload.means) != k:
            raise ModelError(f"client {card.id}: an upload must be a mean (k, w) and a count for each of k classes")
        known = range(card.classes or 0)
        if any(c not in known for c in payload.classes) or min(payload.counts) < 1:
            raise ModelError(f"client {card.id}: means of classes {payload.classes} where there are {card.classes}")

    def site_model(self, client: Client, download: Download) -> Model:
        return Model(lora=kept_factors(client, download.space.init_key))

    def further_models(self, client: Client, download: Download) -> Mapping[str, Model]:
        points = prototypes_of(download, client.card) if self.nearest else None
        if points is None:
            return {}
        return {"nearest prototype": Model(nearest=points, lora=kept_factors(client, download.space.init_key))}

    def global_model(self, state: State) -> None:
        return None

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return 0

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return 0

    def bytes_apart(self, card: Card, federation: Federation) -> tuple[int, int]:
        size = min(one.width or 0 for one in federation.cards) * BYTES
        return (card.classes or 0) * size, max(one.classes or 0 for one in federation.cards) * size


def projection(width: int, space: Space) -> Tensor | None:
    """P (w, width), entries N(0, 1/w), so that lengths stay on average; None where features are used as they are."""
    if not space.projected:
        return None
    return space.init_key.fold("projection", width).normal((space.entries, width), 1 / math.sqrt(space.entries))


def placed(means: Tensor, space: Space) -> Tensor:
    """Means (k, d) of features in the prototypes' space, (k, w)."""
    P = projection(means.shape[-1], space)
    return means if P is None else means @ P.mT


def prototypes_of(download: Download, card: Card) -> Prototypes | None:
    """The global prototypes as this client's features meet them; None while there are none."""
    if download.means is None:
        return None
    held = torch.zeros(download.classes, dtype=torch.bool)
    held[list(download.held)] = True
    means = torch.zeros(download.classes, download.space.entries)
    means[list(download.held)] = download.means
    return Prototypes(means, held, projection(card.width or download.space.entries, download.space))
