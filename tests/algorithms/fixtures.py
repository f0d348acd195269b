"""The specification's two small fixtures, and uploads made of given factors."""

from __future__ import annotations

import torch

from coterie.protocol import Adapter, Card, Layer, LowRank, Uploads
from coterie.protocol.messages import Uploaded

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
