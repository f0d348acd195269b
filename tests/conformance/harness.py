"""One round of any method by hand, with the local training replaced by given factors."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import Algorithm
from coterie.engines.traffic import separated, unwrapped
from coterie.maths.keys import Key, root_key
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Evaluate,
    Federation,
    Fit,
    Fitted,
    Layer,
    LowRank,
    Memory,
    Model,
    Score,
    Server,
    Upload,
    Uploads,
    copied,
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
        )
        for index, (name, rank) in enumerate(ranks.items())
    ]


@dataclass(frozen=True)
class Outcome:
    """What a round by hand left behind."""

    state: Any
    before: Any
    downloads: dict[str, Any]
    bodies: dict[str, Any]
    payloads: dict[str, Any]
    fitted: dict[str, Model]
    memories: dict[str, dict[str, Any]]


def server(number: int = 1) -> Server:
    root = root_key(3)
    return Server((), lambda purpose: root.fold("server", purpose, number), number, "main")


def play(
    algorithm: Algorithm,
    members: list[Card],
    trained: Trained,
    *,
    weights: dict[str, float] | None = None,
    state: Any = None,
    memories: dict[str, dict[str, Any]] | None = None,
    number: int = 1,
    tamper: Callable[[str, Any], Any] = lambda name, payload: payload,
) -> Outcome:
    """One round; everything passes through bytes."""
    federation = Federation(tuple(sorted(members, key=lambda card: card.id)), 3)
    before = result_of(algorithm.start(federation, server(0)), {}) if state is None else state
    downloads, bodies, payloads, fitted, kept = {}, {}, {}, {}, {}
    for card in members:
        content = algorithm.send(before, card)
        bodies[card.id] = separated(content)[0]
        downloads[card.id] = decode(encode(unwrapped(content))) if content is not None else None
        memory = Memory((memories or {}).get(card.id, {}), copied)
        root = root_key(3)
        client = Client(card, memory, ("train", "test"), _keys(root, card.id, number), number, "main")
        seen: dict[str, Model] = {}
        upload = result_of(algorithm.local(client, downloads[card.id]), seen, card.id, trained)
        assert isinstance(upload, Upload)
        payloads[card.id] = tamper(card.id, decode(encode(upload.payload)) if upload.payload is not None else None)
        fitted[card.id] = seen["model"]
        kept[card.id] = memory.commit()
    share = weights or {card.id: 1.0 for card in members}
    uploads = Uploads([Uploaded(card, payloads[card.id], share[card.id]) for card in members])
    after = result_of(algorithm.aggregate(before, uploads, server(number)), {})
    return Outcome(after, before, downloads, bodies, payloads, fitted, kept)


def result_of(program: Any, seen: dict[str, Model], name: str = "server", trained: Trained | None = None) -> Any:
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
            [_answer(one, seen, name, trained) for one in request]
            if isinstance(request, list)
            else _answer(request, seen, name, trained)
        )


def _answer(request: Any, seen: dict[str, Model], name: str, trained: Trained | None) -> Any:
    if isinstance(request, Fit):
        assert trained is not None
        made = trained(name, request.initial).parameters
        named = matching(list(made), request.train)  # what no pattern names stays as it entered
        seen["model"] = request.initial.with_parameters({part: made[part] for part in named})
        return Fitted(seen["model"], mean_loss=1.0, examples_seen=8, steps_taken=2)
    if isinstance(request, Evaluate):
        return Score(loss=1.0, accuracy=0.5, examples=8)
    raise AssertionError(f"the harness cannot answer {type(request).__name__}")


def random_training(seed: int = 0) -> Trained:
    """Every client ends at factors of its own, in the shapes that entered."""

    def trained(name: str, model: Model) -> Model:
        key = root_key(seed).fold(name)
        return model.with_parameters(
            {part: key.fold(part).normal(tuple(value.shape)) for part, value in model.parameters.items()}
        )

    return trained


def equal_training(seed: int = 0) -> Trained:
    """Every client ends at the same factors."""
    one = random_training(seed)
    return lambda name, model: one("everybody", model)


def rotated(inner: Trained, seed: int = 5) -> Trained:
    """The same products written with other factors, (B R, R^-1 A)."""

    def trained(name: str, model: Model) -> Model:
        made = inner(name, model)
        lora: Adapter = {}
        for layer, term in made["lora"].items():
            R = torch.eye(term.rank) + 0.3 * root_key(seed).fold(name, layer).normal((term.rank, term.rank))
            lora[layer] = replace(term, B=term.B @ R, A=torch.linalg.solve(R, term.A))
        return Model(lora=lora)

    return trained


def deployed(algorithm: Algorithm, outcome: Outcome) -> dict[str, Tensor] | None:
    """What the global model adds to the base that clients trained on, layer by layer, in fp64."""
    model = algorithm.global_model(outcome.state)
    if model is None:
        return None
    base = getattr(outcome.state, "base", None)
    patches = base.since(outcome.before.base.version) if base is not None else ()
    found: dict[str, Tensor] = {}
    for adapter in [*model.terms.values(), *patches]:
        for layer, term in adapter.items():
            assert isinstance(term, LowRank)
            product = dense(term)
            found[layer] = found[layer] + product if layer in found else product
    return found


def dense(term: LowRank) -> Tensor:
    return float(term.scale) * (term.left.double() @ term.A.double())


def ideal(outcome: Outcome, weights: dict[str, float]) -> dict[str, Tensor]:
    """sum p_i s_i B_i A_i, densely."""
    total = sum(weights.values())
    found: dict[str, Tensor] = {}
    for name in sorted(weights):
        for layer, term in outcome.fitted[name]["lora"].items():
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
