"""FedSLM by hand: cards, factors of one matrix, a server that answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import FedSLM
from coterie.algorithms.fedslm import State
from coterie.algorithms.fedslm_fusion import Fuse, Groups, fused
from coterie.compress.ranked import ranked_svd
from coterie.maths.keys import root_key
from coterie.protocol import (
    Card,
    Federation,
    Fit,
    Fitted,
    Layer,
    Predict,
    Predictions,
    Server,
    Uploads,
    Weights,
)

KEY = root_key(31)
W = KEY.fold("W").normal((6, 8), dtype=torch.float64)


def card(name: str, k: int | None, examples: int = 10, layers: tuple[str, ...] = ("up_proj",), rank: int = 2) -> Card:
    held = {layer: Layer(6, 8, k) for layer in layers}
    return Card(name, rank, examples, 2.0, held, spec="base" if k is None else f"ratio-{k}")


def factors(k: int, matrix: Tensor = W) -> tuple[Tensor, Tensor]:
    terms = ranked_svd(matrix).cut(k)
    return terms.U, terms.V


def server(phase: str = "main", data: tuple[str, ...] = ("unlabeled",)) -> Server:
    return Server(data, lambda purpose: KEY.fold("server", purpose), 1, phase)


def begun(method: FedSLM, *cards: Card) -> State:
    state = method.start(Federation(cards, 3, ("unlabeled",)), server())
    assert isinstance(state, State)
    return state


def averaged(method: FedSLM, state: State, sent: Mapping[str, tuple[Card, Any, float]]) -> State:
    after = method.aggregate(state, Uploads(dict(sent)), server())
    assert isinstance(after, State)
    return after


def fuse(groups: Groups, base: Mapping[str, Tensor], how: Fuse = "literal") -> dict[str, Tensor]:
    """W_g by layer, with the singular value decomposition of each layer as the compressed models."""
    program, answer = fused(groups, list(base), how), None
    while True:
        try:
            asked = program.send(answer)
        except StopIteration as stop:
            return {name: base[name] + term.W for name, term in stop.value.items()}
        assert isinstance(asked, Weights) and len(asked.names) == 1
        (name,) = asked.names
        rank = 0 if asked.spec is None else int(asked.spec.removeprefix("ratio-"))
        answer = {name: factors(rank, base[name]) if rank else base[name]}


def taught(method: FedSLM, logits: Tensor) -> tuple[State, list[Any]]:
    """The state after the elicitation, and what the server asked for beside weights."""
    cards = [card("a", 3), card("b", None)]
    state = begun(method, *cards)
    state = averaged(method, state, {one.id: (one, method.send(state, one), 0.5) for one in cards})
    program, answer = method.aggregate(state, Uploads({}), server("elicitation")), None
    asked: list[Any] = []
    while True:
        try:
            request = program.send(answer)  # type: ignore[union-attr]
        except StopIteration as stop:
            return stop.value, asked
        if isinstance(request, Weights):
            answer = {"up_proj": W.float() if request.spec != "ratio-3" else tuple(f.float() for f in factors(3))}
            continue
        asked.append(request)
        if isinstance(request, Predict):
            answer = Predictions(logits, torch.full((len(logits),), -1))
        else:
            assert isinstance(request, Fit)
            moved = {name: value + len(asked) for name, value in request.initial.parameters.items()}
            answer = Fitted(request.initial.with_parameters(moved), len(asked) / 10, 4, 2)
