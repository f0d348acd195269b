"""What the benchmarks over all methods share: real rounds of the engine in which training is stood in for.

`StandIn` answers a Fit with factors drawn at random in the shapes that entered, in no time and without any model, so
what is seen of a round is the method's own and the engine's. `Watched` keeps what each round consisted of.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from coterie.algorithms import METHODS, Algorithm
from coterie.compress.ranks import rank_of
from coterie.data.text import TextSet
from coterie.engines.in_process import InProcess, Progress
from coterie.engines.setting import Measuring, Setting, Site, WeightPolicy
from coterie.engines.sites import Volatile
from coterie.engines.visits import Visit
from coterie.maths.keys import Key, root_key
from coterie.protocol import (
    BaseLog,
    Card,
    Evaluate,
    Fit,
    Fitted,
    Gradient,
    Layer,
    Model,
    Phase,
    Predict,
    Predictions,
    Score,
    Server,
    Translate,
    Uploads,
    Weights,
    map_tensors,
    matching,
)
from coterie.protocol.messages import Uploaded
from coterie.training.asks import Ask, Done, Plan
from coterie.wire.ledger import Ledger

TASKS = 6
"""Of how many tasks a server has examples, where a method needs some."""

CLASSES, VOCABULARY, POOL = 4, 512, (100, 200)
"""Classes of a task, what predictions are over, and a pool's examples and labels."""

Trained = Callable[[str, Model, Key], Model]
"""What a party's Fit ends at: its name, the model that enters, the request's key."""


@dataclass(frozen=True)
class StandIn:
    """An executor without models: every answer is drawn from the request's key. double: Fits enter and end in fp64.

    layers: of each base model by its spec, for `Weights`; width: entries of a feature.
    """

    trained: Trained
    double: bool = False
    at_once: int = 1
    plan: Plan = field(default_factory=Plan)
    layers: Mapping[str, Mapping[str, Layer]] = field(default_factory=dict)
    width: int = 6

    def set_base(self, log: BaseLog, spec: str) -> None:
        """There is none."""

    def answer(self, asks: Sequence[Ask]) -> list[Done | Exception]:
        """As `Executor.answer`."""
        return [Done(self._answer(ask), None) for ask in asks]

    def _answer(self, ask: Ask) -> Any:
        request = ask.request
        if isinstance(request, Fit):
            start = map_tensors(request.initial, _doubled) if self.double else request.initial
            made = self.trained(ask.party, start, ask.key).parameters
            named = matching(list(made), request.train)  # what no pattern names stays as it entered
            return Fitted(start.with_parameters({part: made[part] for part in named}), 1.0, 8, 2)
        if isinstance(request, Evaluate):
            return Score(loss=float(ask.key.unit(1)[0]), accuracy=0.5, examples=8)
        if isinstance(request, Predict):
            return predictions(request, ask.key, self.width)
        if isinstance(request, Translate):
            return request.said
        if isinstance(request, Weights):
            return {name: base_weight(name, self.layers[ask.spec][name]) for name in request.names}
        if isinstance(request, Gradient):
            return {part: ask.key.fold(part).normal(tuple(v.shape)) for part, v in request.model.parameters.items()}
        raise TypeError(f"the stand-in cannot answer {type(request).__name__}")


def predictions(request: Predict, key: Key, width: int) -> Predictions:
    """Standard normal logits, features and losses; of a pool's examples with several labels, else one row of each."""
    count, rows = POOL if request.data == "pool" else (request.sample or 8, request.sample or 8)
    examples = torch.arange(rows) * count // rows
    logits, ids = key.fold("logits").normal((rows, VOCABULARY)), None
    if request.top_k is not None:
        logits, ids = logits.topk(min(request.top_k, VOCABULARY))
    features = key.fold("features").normal((rows, width)) if request.features else None
    losses = key.fold("losses").normal((rows,)).abs()
    return Predictions(logits, examples % CLASSES, ids, features, examples, examples % CLASSES, losses)


def base_weight(name: str, layer: Layer) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """W (m, n), or U (m, k), V (k, n) of a layer that is held factored, all drawn from the layer's name alone."""
    key = root_key(6).fold(name)
    if layer.inner is None:
        return key.fold("W").normal((layer.d_out, layer.d_in))
    return key.fold("U").normal((layer.d_out, layer.inner)), key.fold("V").normal((layer.inner, layer.d_in))


def at_random(party: str, model: Model, key: Key) -> Model:
    """Every party ends at standard normal factors of its own."""
    return drawn(model, key)


def alike(party: str, model: Model, key: Key, spread: float = 0.1) -> Model:
    """All end at the same factors but for a spread of their own; fewer rows are the first ones of more."""
    common, own = drawn(model, root_key(5)).parameters, drawn(model, key).parameters
    return model.with_parameters({part: common[part] + spread * own[part] for part in own})


def drawn(model: Model, key: Key) -> Model:
    """The model with standard normal parameters; of a B (m, r) the columns are drawn one after another."""
    made = {}
    for part, value in model.parameters.items():
        left = part.endswith(".B") and value.dim() == 2
        shape = tuple(value.mT.shape if left else value.shape)
        found = key.fold(part).normal(shape).to(value.dtype)
        made[part] = found.mT.contiguous() if left else found
    return model.with_parameters(made)


@dataclass(frozen=True)
class Round:
    """One round as the server meets it: its state before and after; `fitted` has each client's last trained model."""

    number: int
    phase: str
    before: Any
    after: Any
    uploads: Uploads
    downloads: dict[str, Any]
    fitted: dict[str, Model]
    server: Server


class Reached(Exception):
    """The phase that was waited for has the uploads of its first round, which is not played to its end."""


class Watched(InProcess):
    """The engine, keeping what its rounds consisted of."""

    seen: list[Round]
    stop_in: str | None = None
    """The phase whose first aggregation it stops at."""

    def _aggregate(
        self, progress: Progress, answered: dict[str, Visit], weights: dict[str, float], number: int, phase: Phase
    ) -> Any:
        def kept(after: Any) -> Round:
            uploads = Uploads(
                [Uploaded(self.cards[name], v.payload, weights[name], v.head_group) for name, v in answered.items()]
            )
            downloads = {name: visit.download for name, visit in answered.items()}
            fitted = {name: v.party.fits[-1][1].model for name, v in answered.items() if v.party.fits}
            server = self._server(number, phase.name)
            return Round(number, phase.name, progress.state, after, uploads, downloads, fitted, server)

        if phase.name == self.stop_in:
            self.seen.append(kept(None))
            raise Reached
        made = super()._aggregate(progress, answered, weights, number, phase)
        if phase.clients != "none":
            self.seen.append(kept(made[0]))
        return made


def cards(ranks: Sequence[int], layers: Mapping[str, Layer], scale: float = 2.0) -> list[Card]:
    """One client for each rank, with as many examples more as it is later in the list."""
    width = max(layer.d_out for layer in layers.values())
    return [
        Card(f"c{i:02d}", rank, 10 + i, scale, dict(layers), width=width, classes=CLASSES, pool=POOL)
        for i, rank in enumerate(ranks)
    ]


def with_bases(algorithm: Algorithm, members: Sequence[Card]) -> list[Card]:
    """The same clients; of a method for compressed models, three in ten cut to 0.4, four to 0.6 and three full.

    As FedSLM deals them out; all layers are cut.
    """
    if algorithm.traits.bases != "compressed":
        return list(members)
    ratios = [0.4] * 3 + [0.6] * 4 + [None] * 3
    return [cut(card, ratios[10 * i // len(members)]) for i, card in enumerate(members)]


def cut(card: Card, ratio: float | None) -> Card:
    """The client with a base model of so many of the parameters; the full one for None."""
    if ratio is None:
        return card
    layers = {n: replace(one, inner=rank_of(n, one, ratio)) for n, one in card.layers.items()}
    return replace(card, spec=f"ratio-{ratio:g}", layers=layers)


def watched(
    algorithm: Algorithm,
    members: Sequence[Card],
    *,
    rounds: int,
    trained: Trained = at_random,
    double: bool = False,
    strict: bool = True,
    weights: WeightPolicy = "paper",
    server: Card | None = None,
) -> Watched:
    """An engine over these clients, ready to begin.

    server: what the server itself trains; None: the base model that the clients' are, or were cut from.
    """
    data = TextSet(torch.arange(8, dtype=torch.int32), torch.arange(5) * 2, torch.arange(4) % 2, torch.arange(4), 2)
    pools = {"pooled", *(f"pooled/{card.group}" for card in members)} if algorithm.traits.pools_data else set()
    taught = algorithm.traits.server_data or algorithm.emulation() is not None
    public = {f"public/{task}" for task in range(TASKS)} | {"unlabeled"} if taught else set()
    shared = {"pool": data} if algorithm.traits.shares_data else {}
    whole = {n: replace(layer, inner=None) for card in members for n, layer in card.layers.items()}
    own = server or replace(members[0], id="server", spec="base", layers=whole)
    setting = Setting(
        algorithm=algorithm,
        sites={card.id: Site(card, {"train": data, **shared}) for card in members},
        rounds=rounds,
        seed=11,
        server_data=dict.fromkeys(pools | public, data) | shared,
        measuring=Measuring(objective_examples=0, mismatch=False),
        strict=strict,
        weights=weights,
        server_base=own.spec,
        server_card=own,
        set_up={card.spec: factor_bytes(card) for card in members},
    )
    layers = {card.spec: card.layers for card in [*members, own]}
    executor = StandIn(trained, double, layers=layers, width=own.width or 1)
    engine = Watched(setting, executor, Volatile(), Ledger())  # type: ignore[arg-type]
    engine.seen = []
    return engine


def factor_bytes(card: Card) -> int:
    """Bytes of U and V, which come with a compressed base model, once."""
    return sum(4 * layer.inner * (layer.d_out + layer.d_in) for layer in card.layers.values() if layer.inner)


def begun(engine: Watched) -> Progress:
    """The run before its first round; in fp64 where the stand-in trains in it."""
    progress = engine.begin()
    return map_tensors(progress, _doubled) if engine.executor.double else progress  # type: ignore[attr-defined]


def made(name: str, options: Mapping[str, Mapping[str, Any]]) -> Algorithm:
    """A registered method with its options of this benchmark."""
    return METHODS[name](**options.get(name, {}))


def machine() -> dict[str, Any]:
    """Where figures were measured."""
    found = {"architecture": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return found | {"processor": model, "load": load}


def versions() -> dict[str, str]:
    """Of what computes."""
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def counting() -> FlopCounterMode:
    """A counter of products' FLOPs that knows those too which PyTorch's own leaves out."""

    def batched(_: Any, a: Sequence[int], b: Sequence[int], *, out_shape: Any, **__: Any) -> int:
        return 2 * math.prod(a) * b[-1]

    def linear(x: Sequence[int], weight: Sequence[int], *_: Any, out_shape: Any, **__: Any) -> int:
        return 2 * math.prod(x) * weight[0]

    known: dict[Any, Any] = {torch.ops.aten.baddbmm_: batched}
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        known[torch.ops.mkldnn._linear_pointwise] = linear
    return FlopCounterMode(display=False, custom_mapping=known)
