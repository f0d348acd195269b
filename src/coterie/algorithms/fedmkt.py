"""FedMKT: clients and server teach each other by what they predict on a public pool, whatever their models and tokens.

FedMKT, arXiv 2406.02224, and its released code. A client trains its adapter on its own data, then says what it predicts
on the pool: of each label (a token of an answer, or a class) the K largest logits, and each example's loss. The server
writes that in its own tokens, takes for each example the source with the least loss, itself among them, and distils;
then the clients distil from the server alike.
Selection: dual-min CE, the highest exp(-CE); or the mean of all sources, by a softmax over these (`mean`). Loss:
gold * CE(labels) + (1 - gold) * KL(target || own), target the softmax of the source's K logits over a temperature.
Tokens: answers are aligned by minimum edit over the tokens' strings, tokens of the other vocabulary become the nearest
own ones; a token without a counterpart is learnt from its label alone. Equal tokens are left as they are.
Up: K logits and ids for each label of the pool, E losses: 8 K n + 4 E bytes whatever the layers. Down: the same of the
server, in its tokens; once, a seed. The pool is given by the clients themselves, a part of their examples each
(server_data.pool; 20 % in FedSLM): it leaves them as data, and the ledger books it so. Models never travel, unless
clients with one base model share their mean adapter (`average`): r (m + n) a layer, each way.
Deviations: along an alignment, edits are counted in parts of the longer token, lest a piece of a word stand beside a
short neighbour. The clients' turn to distil stands at the beginning of their next round, which is the same order; a
closing phase has the last one. Losses are compared in fp32 and the distillation is over answers' tokens, where the code
has bfloat16 and counts prompts too. FedSLM does not say which term its 0.9 weights; as in the code, the labels'. Beyond
the K logits a source counts as saying nothing. Heads of classifiers stay at home, and the server's stays what it was
drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import (
    average_factors,
    check_adapter,
    cut_for,
    initial_adapter,
    kept_factors,
    pair_bytes,
)
from coterie.errors import ConfigError, ModelError
from coterie.maths.keys import Key
from coterie.maths.knowledge import chosen_targets
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Distillation,
    Federation,
    Fit,
    Layer,
    Model,
    Once,
    Phase,
    Predict,
    Server,
    TopLogits,
    Traits,
    Translate,
    Upload,
    Uploads,
    message,
)
from coterie.protocol.top_logits import EXAMPLE_BYTES, ROW_BYTES

POOL = "pool"
"""The public examples' name at every party."""


@message
class State:
    """The server's adapter on the base `spec`, what it last said of the pool, and mean adapters by base model."""

    init_key: Key
    spec: str
    lora: Adapter
    said: TopLogits | None
    means: dict[str, Adapter]


@message
class Download:
    """The seed (a Once when sent), what the server said with its base `spec`, and the mean adapter of one's like."""

    init_key: Any
    spec: str
    said: TopLogits | None
    mean: Adapter | None


@message
class Said:
    """What a client says of the pool; its factors where these are averaged."""

    top: TopLogits
    factors: Adapter | None


@dataclass(frozen=True)
class FedMKT(Algorithm):
    """Federated mutual knowledge transfer (arXiv 2406.02224).

    top_k: K. gold: the weight of the labels in distillation, the rest is that of the targets. select: whose prediction
    an example is learnt from. epochs: of each distillation (None: the experiment's local training). average: whether
    clients with one base model train on from their mean adapter.
    """

    top_k: int = 128
    gold: float = 0.9
    select: Literal["best", "mean"] = "best"
    temperature: float = 1.0
    epochs: int | None = None
    average: bool = False

    traits = Traits(
        title="FedMKT",
        paper="arXiv 2406.02224",
        up="K logits and ids a label of the pool, a loss an example, beside all layers",
        down="the server's, in the same form",
        ranks="unequal",
        bases="any",
        head="local",
        adaptive_size=True,
        personal=True,
        keeps_memory=True,
        shares_data=True,
        server_trains=True,
    )

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.temperature <= 0 or not 0 <= self.gold <= 1:
            raise ValueError(
                f"top_k ({self.top_k}) and temperature ({self.temperature:g}) must be positive, gold ({self.gold:g}) "
                "in [0, 1]"
            )

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase("main", rounds), Phase("closing", 1, clients="all", uploads=False)]

    def start(self, federation: Federation, server: Server) -> State:
        if POOL not in server.data:
            raise ConfigError("FedMKT's parties meet in a public pool of the clients' data; set server_data.pool=0.2")
        own, key = federation.server_card, server.key("init")
        return State(key, own.spec, initial_adapter(own.layers, own.rank, own.scale, key), None, {})

    def send(self, state: State, card: Card) -> Download:
        mean = state.means.get(card.spec)
        return Download(Once(state.init_key), state.spec, state.said, None if mean is None else cut_for(mean, card))

    def local(self, client: Client, download: Download) -> Program:
        model = entering(client, download)
        if download.said is not None:
            model = yield from self.distilled(model, [Translate(download.said, download.spec, POOL)])
        if client.phase != "closing":
            model = (yield Fit(model)).model
        client.memory["factors"] = model["lora"]
        if client.phase == "closing":
            return Upload(None)
        seen = yield Predict(model, POOL, top_k=self.top_k)
        return Upload(Said(TopLogits.of(seen), model["lora"] if self.average else None))

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> Program:
        sent = uploads.where(lambda one: one.weight > 0 and one.payload is not None)
        if not len(sent):
            return state
        asked = [Translate(said.top, card.spec, POOL) for card, said, _ in sent.items()]
        model = yield from self.distilled(Model(lora=state.lora), asked)
        seen = yield Predict(model, POOL, top_k=self.top_k)
        return replace(state, lora=model["lora"], said=TopLogits.of(seen), means=state.means | self.means(sent))

    def distilled(self, model: Model, others: Sequence[Translate]) -> Program:
        """=> the model after learning from the pool's labels and from the best of its own and others' predictions."""
        seen = yield Predict(model, POOL, top_k=self.top_k)
        sources = [TopLogits.of(seen), *(yield list(others))]
        ids, p = chosen_targets(
            [one.ids for one in sources],
            [one.logits for one in sources],
            torch.stack([one.losses for one in sources]),
            seen.examples,
            self.temperature,
            self.select == "mean",
        )
        fitted = yield Fit(model, data=POOL, loss=Distillation(ids, p, self.gold), epochs=self.epochs)
        trained: Model = fitted.model
        return trained

    def means(self, sent: Uploads) -> dict[str, Adapter]:
        """The mean adapter of the clients with each base model, at their largest rank."""
        found: dict[str, Adapter] = {}
        for spec in sorted({one.card.spec for one in sent}) if self.average else ():
            of_spec = sent.where(lambda one, spec=spec: one.card.spec == spec)  # type: ignore[misc]
            found[spec] = average_factors(of_spec.each(lambda said: said.factors), max(o.card.rank for o in of_spec))
        return found

    def check(self, payload: Any, card: Card) -> None:
        if not isinstance(payload, Said):
            if payload is not None:
                raise ModelError(f"client {card.id}: an upload must say what it predicts of the pool")
            return
        payload.top.check(f"client {card.id}", self.top_k, card.pool)
        if self.average:
            check_adapter(payload.factors, card)

    def site_model(self, client: Client, download: Download) -> Model:
        if client.phase != "closing":
            return entering(client, download)
        return Model(lora=kept_factors(client, download.init_key))  # distilled from the mean by now

    def global_model(self, state: State) -> Model:
        return Model(spec=state.spec, lora=state.lora)

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank) if self.average else 0

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank) if self.average else 0

    def bytes_apart(self, card: Card, federation: Federation) -> tuple[int, int]:
        sizes = [own.pool or (0, 0) for own in (card, federation.server_card)]
        up, down = (E * EXAMPLE_BYTES + n * self.top_k * ROW_BYTES for E, n in sizes)
        return up, down


def entering(client: Client, download: Download) -> Model:
    """What a client goes on from: the mean of its like, where that is sent; else its own."""
    return Model(lora=kept_factors(client, download.init_key) if download.mean is None else download.mean)
