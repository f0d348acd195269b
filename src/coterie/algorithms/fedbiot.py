"""FedBiOT: clients train the outer blocks of a model whose middle they have as an emulator of fewer blocks.

FedBiOT, arXiv 2406.17706, Algorithm 1, and its released code. The clients' base is the server's without some of its
middle blocks (an emulator, see `kept_blocks`). The server trains low-rank factors on those that are left until its
hidden states and predictions are like the whole model's, on public data; the clients train an adapter on the first and
last `outer` blocks, on the task's loss plus mu times the squared distance of the merged adapter from the one received.
It is averaged as in FedIT, and deployed in the whole model. Bi-level: the server's alignment below, training above.
Alignment: ||H - H'||^2 / ||H||^2 of what enters the last outer blocks, or 1 - cos, plus 0.9 KL(whole || emulated).
Up and down: B_i, A_i of the adapter's layers, r (m + n) each. Down once for each alignment: the emulator's factors; the
emulator itself is a base model of the clients'. Weighted by examples.
adapter=bottleneck, as FedSLM compares it: in place of factors a residual bottleneck behind each of these layers, of 64
entries, its down-projection zero at first, 2 k m scalars a layer, drawn to the received one parameter by parameter.
Deviations: the code drops blocks of a range that is given; here the range is all but `outer` blocks at each end, two
as in its examples. It aligns in 50 rounds of 10 steps before the first round; here in one go of as many steps
(`align`), on each public data set in turn, and again every so many rounds where that is set. L2 is relative to each
token's norm. Of several clients' ranks, smaller ones are zero-padded. Where no block lies between the outer ones there
is nothing to align, and the method is FedIT with a proximal term.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import initial_adapter
from coterie.algorithms.offsite import Bottlenecks, Factors, Kind, block_of_last, of_layers
from coterie.errors import ConfigError
from coterie.maths.blocks import outer_layers
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    Imitation,
    Layer,
    Model,
    Once,
    Server,
    Term,
    Traits,
    Upload,
    Uploads,
    message,
)

PUBLIC = "public/"


@message
class State:
    """The adapter by layer, and the emulator's factors, empty where nothing is emulated.

    whole, emulated: the specs of the two base models. alignment: the mean loss of each alignment so far.
    """

    adapter: dict[str, Term]
    emulator: Adapter
    whole: str
    emulated: str
    alignment: list[float]


@message
class Download:
    """The adapter for this client, and the emulator's factors: a Once when sent."""

    adapter: dict[str, Term]
    emulator: Any


@dataclass(frozen=True)
class FedBiOT(Algorithm):
    """Federated bi-level offsite tuning (arXiv 2406.17706).

    drop: the part of the middle blocks that the emulator lacks; outer: blocks at each end that the adapter is in. mu:
    the weight of the distance to the received adapter. adapter, bottleneck: what it consists of, and a bottleneck's
    entries. align: steps of alignment; again: every so many rounds (None: only at the start). kd: the weight of the
    predictions in it, distance: of hidden states. align_rank: of the emulator's factors.
    """

    drop: float = 0.5
    outer: int = 2
    mu: float = 0.1
    adapter: Literal["lora", "bottleneck"] = "lora"
    bottleneck: int = 64
    align: int = 500
    again: int | None = None
    kd: float = 0.9
    distance: Literal["l2", "cosine"] = "l2"
    align_rank: int = 8

    traits = Traits(
        title="FedBiOT",
        paper="arXiv 2406.17706",
        up="B, A of outer blocks: r_i (m + n)",
        down="mean B, mean A of outer blocks: r_i (m + n); once the emulator's B, A",
        ranks="unequal",
        one_client=True,
        equal_clients=True,
        zero_weight=True,
        linear_upload=True,
    )

    def __post_init__(self) -> None:
        if not 0 <= self.drop < 1 or min(self.outer, self.bottleneck, self.align_rank, self.again or 1) < 1:
            raise ValueError("drop must lie in [0, 1); outer, bottleneck, align_rank and again must be positive")
        if min(self.mu, self.kd, self.align) < 0:
            raise ValueError("mu, kd and align cannot be negative")

    @property
    def kind(self) -> Kind:
        """What the adapter consists of."""
        return Factors() if self.adapter == "lora" else Bottlenecks(self.bottleneck)

    def emulation(self) -> tuple[float, int]:
        return self.drop, self.outer

    def start(self, federation: Federation, server: Server) -> Program:
        first, key = federation.cards[0], server.key("init")
        outer = outer_layers(federation.layers, self.outer)
        adapter = self.kind.initial({name: federation.layers[name] for name in sorted(outer)}, federation, key)
        middle = {name: layer for name, layer in federation.layers.items() if name not in outer}
        emulator = initial_adapter(middle, self.align_rank, first.scale, key.fold("emulator"))
        state = State(adapter, emulator, federation.server_card.spec, first.spec, [])
        return (yield from self.aligned(state, server)) if middle else state

    def aligned(self, state: State, server: Server) -> Program:
        """=> State: the emulator brought nearer to the whole model with the present adapter, on public data."""
        public = [name for name in server.data if name.startswith(PUBLIC)]
        if not public:
            raise ConfigError("FedBiOT's server aligns its emulator on public data; set server_data.public=200")
        last = block_of_last(state.adapter)
        emulator, losses = state.emulator, []
        for name in public if self.align else []:
            loss = Imitation(self.model(state.adapter, {}, state.whole), last, self.kd, self.distance)
            fitted = yield Fit(
                self.model(state.adapter, emulator, state.emulated),
                train=("shared.*",),
                head=False,
                loss=loss,
                data=name,
                steps=self.align,
            )
            emulator = fitted.model["shared"]
            losses.append(fitted.mean_loss)
        return replace(state, emulator=emulator, alignment=[*state.alignment, *losses])

    def send(self, state: State, card: Card) -> Download:
        held = {name: term for name, term in state.adapter.items() if name in card.layers}
        return Download(self.kind.cut(held, of_layers(card, held)), Once(dict(state.emulator)))

    def local(self, client: Client, download: Download) -> Program:
        model = self.model(download.adapter, download.emulator)
        drawn = self.kind.distance(download.adapter, self.mu)
        fitted = yield Fit(model, train=(f"{self.adapter}.*",), penalties=[drawn])
        return Upload(fitted.model[self.adapter])

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> Program:
        state = replace(state, adapter=self.kind.mean(state.adapter, uploads))
        if self.again is not None and state.emulator and server.round % self.again == 0:
            return (yield from self.aligned(state, server))
        return state

    def model(self, adapter: Mapping[str, Term], emulator: Mapping[str, Term], spec: str | None = None) -> Model:
        """A base with the adapter, and with the emulator's factors where there are any."""
        terms = {self.adapter: adapter} | ({"shared": emulator} if emulator else {})
        return Model(spec, **terms)  # type: ignore[arg-type]  # a term's name is no field's

    def check(self, payload: Any, card: Card) -> None:
        self.kind.check(payload, of_layers(card, outer_layers(card.layers, self.outer)))

    def site_model(self, client: Client, download: Download) -> Model:
        return self.model(download.adapter, download.emulator)

    def global_model(self, state: State) -> Model:
        return self.model(state.adapter, {}, state.whole)

    def further_global_models(self, state: State) -> Mapping[str, Model]:
        return {"emulated": self.model(state.adapter, state.emulator, state.emulated)} if state.emulator else {}

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return self.kind.size(layer, card)

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return self.bytes_up(layer, card)

    def measures(self, state: State, federation: Federation, seen: Mapping[str, Any]) -> dict[str, Any]:
        return {"alignment": state.alignment[-1]} if state.alignment else {}
