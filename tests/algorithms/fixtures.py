"""The specification's two small fixtures, uploads made of given factors, and what the sites of a small run use."""

from __future__ import annotations

from typing import Any

import torch

from coterie.engines.evaluation import site_models
from coterie.engines.in_process import InProcess, Played
from coterie.engines.scoring import Evaluation
from coterie.engines.traffic import Traffic
from coterie.protocol import Adapter, Card, Layer, LowRank, Uploads
from coterie.protocol.messages import Uploaded
from coterie.training.asks import Head
from coterie.wire.ledger import Ledger

LAYER = {"w": Layer(2, 2)}
T1_WEIGHTS = {"1": 0.75, "2": 0.25}


def term(B: list[list[float]], A: list[list[float]], scale: float = 1.0) -> LowRank:
    return LowRank(torch.tensor(B, dtype=torch.float64), torch.tensor(A, dtype=torch.float64), scale)


def t1() -> dict[str, LowRank]:
    """B_1 = e1, A_1 = e1'; B_2 = e2, A_2 = e2'."""
    return {"1": term([[1], [0]], [[1, 0]]), "2": term([[0], [1]], [[0, 1]])}


def t2() -> dict[str, LowRank]:
    """Ranks 1 and 2: B_1 = e1, A_1 = e1'; B_2 = I, A_2 = diag(3, 0)."""
    return {"1": term([[1], [0]], [[1, 0]]), "2": term([[1, 0], [0, 1]], [[3, 0], [0, 0]])}


def card(name: str, rank: int, scale: float = 1.0, reference_rank: int | None = None) -> Card:
    return Card(name, rank, 1, scale, LAYER, reference_rank)


def uploads(terms: dict[str, LowRank], weights: dict[str, float] | None = None) -> Uploads:
    share = weights or dict.fromkeys(terms, 1.0)
    return Uploads(
        [Uploaded(card(name, one.rank, float(one.scale)), adapter(one), share[name]) for name, one in terms.items()]
    )


def adapter(one: LowRank) -> Adapter:
    return {"w": one}


GROUPS = {"card": {"groups": ("x", "y")}}
"""A `world` of three clients, of whom c0 and c2 are in x, c1 in y."""


def used(run: InProcess, last: Played) -> dict[str, tuple[Any, Head | None]]:
    """The model and head that each site uses after the last round."""
    traffic = Traffic(Ledger(), 0, "main", False)
    view = Evaluation(run.setting, run.executor, run.store, last.progress.round, "main", traffic)
    found = site_models(view, last.progress.state, last.progress.heads, {})
    return {name: (model, head) for name, model, head in found}
