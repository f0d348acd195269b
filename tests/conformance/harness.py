"""One round of any method by hand, with the local training replaced by given factors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import Algorithm
from coterie.engines.traffic import separated, unwrapped
from coterie.maths.keys import Key, root_key
from coterie.protocol import (
    Card,
    Client,
    Core,
    Evaluate,
    Federation,
    Fit,
    Fitted,
    Gradient,
    Layer,
    LowRank,
    Memory,
    Model,
    Phase,
    Predict,
    Predictions,
    Score,
    Server,
    Term,
    Translate,
    Upload,
    Uploads,
    Weights,
    as_adapters,
    copied,
    map_tensors,
    matching,
)
from coterie.protocol.messages import Uploaded
from coterie.wire.codec import decode, encode

LAYERS = {"first": Layer(7, 5), "second": Layer(6, 6)}

Trained = Callable[[str, Model], Model]
"""What a client's Fit returns, given the client's id and the model that entered."""


def cards(
    ranks: dict[str, int], scale: float | dict[str, float] = 2.0, layers: dict[str, Layer] | None = None
) -> list[Card]:
    return [
        Card(
            id=name,
            rank=rank,
            examples=10 + 5 * index,
            scale=scale[name] if isinstance(scale, dict) else scale,
            layers=layers or LAYERS,
            width=6,
            classes=3,
            pool=(8, 8),
        )
        for index, (name, rank) in enumerate(ranks.items())
    ]


@dataclass(frozen=True)
class Outcome:
    """What a round by hand left behind, by client; what the server itself trained stands under `server`."""

    state: Any
    before: Any
    downloads: dict[str, Any]
    bodies: dict[str, Any]
    payloads: dict[str, Any]
    fitted: dict[str, Model]
    memories: dict[str, dict[str, Any]]
    chosen: dict[str, str | None]


def server(number: int = 1, data: tuple[str, ...] = (), phase: str = "main") -> Server:
    root = root_key(3)
    return Server(data, lambda purpose: root.fold("server", purpose, number), number, phase)


def server_data(algorithm: Algorithm, members: list[Card]) -> tuple[str, ...]:
    """The names of the data that the server is given: a reference's pools, or examples with and without classes."""
    if algorithm.traits.shares_data:
        return ("pool",)
    if algorithm.traits.server_data:
        return (*(f"public/{task}" for task in "xyz"), "unlabeled")
    return ("pooled", *sorted({f"pooled/{card.group}" for card in members})) if algorithm.traits.pools_data else ()


def play(
    algorithm: Algorithm,
    members: list[Card],
    trained: Trained,
    *,
    weights: dict[str, float] | None = None,
    state: Any = None,
    memories: dict[str, dict[str, Any]] | None = None,
    number: int = 1,
    phase: str = "main",
    tamper: Callable[[str, Any], Any] = lambda name, payload: payload,
) -> Outcome:
    """One round, in which everybody takes part, or nobody where no client ever does; all passes through bytes."""
    data = server_data(algorithm, members)
    federation = Federation(tuple(sorted(members, key=lambda card: card.id)), 3, data)
    before = result_of(algorithm.start(federation, server(0, data)), {}) if state is None else state
    downloads, bodies, payloads, fitted, kept, chosen = {}, {}, {}, {}, {}, {}
    alone = {one.name for one in algorithm.phases(3) if one.clients == "none"}
    taking_part = [] if phase in alone else members
    for card in taking_part:
        content = algorithm.send(before, card)
        bodies[card.id] = separated(content)[0]
        downloads[card.id] = decode(encode(unwrapped(content))) if content is not None else None
        memory = Memory((memories or {}).get(card.id, {}), copied)
        root = root_key(3)
        client = Client(card, memory, ("train", "test"), _keys(root, card.id, number), number, phase)
        seen: dict[str, Model] = {}
        upload = result_of(algorithm.local(client, downloads[card.id]), seen, card.id, trained)
        assert isinstance(upload, Upload)
        payloads[card.id] = tamper(card.id, decode(encode(upload.payload)) if upload.payload is not None else None)
        chosen[card.id] = upload.head_group if upload.payload is not None else None
        fitted |= {card.id: seen["model"]} if seen else {}
        kept[card.id] = memory.commit()
    share = weights or {card.id: 1.0 for card in members}
    uploads = Uploads([Uploaded(card, payloads[card.id], share[card.id], chosen[card.id]) for card in taking_part])
    made: dict[str, Model] = {}
    program = algorithm.aggregate(before, uploads, server(number, data, phase))
    after = result_of(program, made, "server", trained, members)
    fitted |= {"server": made["model"]} if made else {}
    return Outcome(after, before, downloads, bodies, payloads, fitted, kept, chosen)


def schedule(algorithm: Algorithm, rounds: int) -> list[Phase]:
    """The phase of every round of a run of so many main rounds."""
    return [phase for phase in algorithm.phases(rounds) for _ in range(phase.rounds)]


def play_phases(
    algorithm: Algorithm, members: list[Card], training: Callable[[int], Trained], rounds: int = 2
) -> list[Outcome]:
    """A whole run of so many main rounds by hand, one round after another through all phases, each by its training."""
    played: list[Outcome] = []
    for number, phase in enumerate(schedule(algorithm, rounds), start=1):
        before = {} if not played else {"state": played[-1].state, "memories": played[-1].memories}
        played.append(play(algorithm, members, training(number), number=number, phase=phase.name, **before))  # type: ignore[arg-type]
    return played


def main_round(algorithm: Algorithm, members: list[Card], trained: Trained, **options: Any) -> Outcome:
    """The first round of the main phase, with `options` as in `play`, after all rounds before it."""
    before: dict[str, Any] = {}
    number = 1
    for phase in takewhile(lambda one: one.name != "main", algorithm.phases(3)):
        for _ in range(phase.rounds):
            outcome = play(algorithm, members, random_training(9), number=number, phase=phase.name, **before)
            before, number = {"state": outcome.state, "memories": outcome.memories}, number + 1
    return play(algorithm, members, trained, number=number, **before, **options)


def result_of(
    program: Any,
    seen: dict[str, Model],
    name: str = "server",
    trained: Trained | None = None,
    members: Sequence[Card] = (),
) -> Any:
    """Runs a program to its end, with the given factors as the answer to every Fit."""
    if not isinstance(program, Generator):
        return program
    answer: Any = None
    while True:
        try:
            request = program.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = (
            [_answer(one, seen, name, trained, members) for one in request]
            if isinstance(request, list)
            else _answer(request, seen, name, trained, members)
        )


def _answer(
    request: Any, seen: dict[str, Model], name: str, trained: Trained | None, members: Sequence[Card] = ()
) -> Any:
    if isinstance(request, Fit):
        assert trained is not None
        made = trained(name, request.initial).parameters
        named = matching(list(made), request.train)  # what no pattern names stays as it entered
        seen["model"] = request.initial.with_parameters({part: made[part] for part in named})
        return Fitted(seen["model"], mean_loss=1.0, examples_seen=8, steps_taken=2)
    if isinstance(request, Evaluate):
        return Score(loss=1.0, accuracy=0.5, examples=8)
    if isinstance(request, Predict):
        drawn = root_key(4).fold(name, "features").normal((request.sample or 8, 6))
        rows = torch.arange(len(drawn))
        features = drawn if request.features else None
        logits, ids = drawn[:, :2].sort(dim=1, descending=True)
        if request.top_k is None:
            logits, ids = drawn[:, :2], None
        losses = drawn[:, 2].abs()
        return Predictions(logits, rows % 2, ids, features, rows, classes=rows % 2, losses=losses)
    if isinstance(request, Translate):
        return request.said
    if isinstance(request, Gradient):
        return {
            part: root_key(4).fold(name, part).normal(tuple(v.shape)) for part, v in request.model.parameters.items()
        }
    if isinstance(request, Weights):
        return {layer: base_weight(members, layer, request.spec) for layer in request.names}
    raise AssertionError(f"the harness cannot answer {type(request).__name__}")


def base_weight(members: Sequence[Card], layer: str, spec: str | None) -> Tensor | tuple[Tensor, Tensor]:
    """W of a layer, or what the singular value decomposition makes of it at the inner rank that this spec has there."""
    shape = next(card.layers[layer] for card in members if layer in card.layers)
    W = root_key(6).fold(layer).normal((shape.d_out, shape.d_in))
    held = next((card.layers[layer] for card in members if card.spec == spec), shape)
    if spec is None or held.inner is None:
        return W
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    root = S[: held.inner].sqrt()
    return U[:, : held.inner] * root, root[:, None] * Vh[: held.inner]


def random_training(seed: int = 0, std: float = 1.0) -> Trained:
    """Every client ends at factors of its own, in the shapes that entered."""

    def trained(name: str, model: Model) -> Model:
        key = root_key(seed).fold(name)
        return model.with_parameters(
            {part: key.fold(part).normal(tuple(value.shape), std=std) for part, value in model.parameters.items()}
        )

    return trained


def fading_training(number: int) -> Trained:
    """Every round other factors, a tenth as large as in the round before, so that a client's last rank shrinks too."""
    return random_training(number, std=10.0**-number)


def equal_training(seed: int = 0) -> Trained:
    """Every client ends at the same factors."""
    one = random_training(seed)
    return lambda name, model: one("everybody", model)


def rotated(inner: Trained, seed: int = 5) -> Trained:
    """The same products written with other factors: (B R, R^-1 A), or a core's gain and what it multiplies."""

    def written(name: str, layer: str, term: Term) -> Term:
        key = root_key(seed).fold(name, layer)
        if isinstance(term, Core) and term.gain is not None:
            factor = key.uniform((term.heads,), 1.5, 2.5)
            return replace(term, gain=term.gain * factor, core=term.core / factor[:, None, None])
        if not isinstance(term, LowRank):
            return term
        R = (torch.eye(term.rank) + 0.3 * key.normal((term.rank, term.rank))).to(term.B.dtype)
        return replace(term, B=term.B @ R, A=torch.linalg.solve(R, term.A))

    def trained(name: str, model: Model) -> Model:
        made = inner(name, model)
        terms = {
            part: {layer: written(name, layer, term) for layer, term in held.items()}
            for part, held in made.terms.items()
        }
        return made.with_parameters(Model(**terms).parameters)

    return trained


def in_double(inner: Trained) -> Trained:
    """The same training, its results in fp64."""

    def trained(name: str, model: Model) -> Model:
        return model.with_parameters({part: value.double() for part, value in inner(name, model).parameters.items()})

    return trained


def deployed(algorithm: Algorithm, outcome: Outcome) -> dict[str, Tensor] | None:
    """What the global model adds to the base that clients trained on, layer by layer, in fp64."""
    model = algorithm.global_model(outcome.state)
    if model is None:
        return None
    base = getattr(outcome.state, "base", None)
    patches = as_adapters(base.since(outcome.before.base.version)) if base is not None else []
    found: dict[str, Tensor] = {}
    for adapter in [*model.terms.values(), *patches]:
        for layer, term in adapter.items():
            product = dense(term)
            found[layer] = found[layer] + product if layer in found else product
    return found


def dense(term: Term) -> Tensor:
    wide = map_tensors(term, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    made: Tensor = wide.dense()
    return made


def ideal(outcome: Outcome, weights: dict[str, float]) -> dict[str, Tensor]:
    """sum p_i s_i B_i A_i, densely, of all that a client's model adds to the base but what is its own (`local`)."""
    total = sum(weights.values())
    found: dict[str, Tensor] = {}
    for name in sorted(weights):
        for adapter in (held for part, held in outcome.fitted[name].terms.items() if part != "local"):
            for layer, term in adapter.items():
                part = weights[name] / total * dense(term)
                found[layer] = found[layer] + part if layer in found else part
    return found


def best(matrices: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The truncated SVD of each matrix, densely."""
    found = {}
    for layer, matrix in matrices.items():
        U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
        found[layer] = U[:, :rank] @ torch.diag(S[:rank]) @ Vh[:rank]
    return found


def gap(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest relative distance over layers."""
    return max(
        float((first[layer] - second[layer]).norm() / (second[layer].norm() + 1e-30)) for layer in first | second
    )


def _keys(root: Key, name: str, number: int) -> Callable[[str], Key]:
    return lambda purpose: root.fold("client", purpose, number, name)
