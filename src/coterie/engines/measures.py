"""What a round's aggregation lost, from what simulation can see: local products before, the deployed product after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from coterie.maths.gram import mixture_distance, mixture_squared_norm
from coterie.protocol import Adapter, LowRank, Model


def aggregation_mismatch(
    locals_: Sequence[tuple[float, Model]], deployed: Model, patches: Sequence[Adapter] = ()
) -> dict[str, float]:
    """||deployed - ideal||_F over all layers, absolute (FedPA-LoRA, Eq. 1, scaled) and relative to ||ideal||_F.

    ideal = sum p_i (client i's summed low-rank terms) over the base that the clients trained on; deployed = the
    global model's terms and whatever the aggregation added to the base. Layers that nobody trained do not count.
    """
    layers = sorted({layer for _, model in locals_ for layer in _low_rank(model)})
    squared_error, squared_ideal = 0.0, 0.0
    for layer in layers:
        ideal = [
            (weight * float(term.scale), term.left, term.A)
            for weight, model in locals_
            for term in _low_rank(model).get(layer, [])
        ]
        factors, coefficients = [(B, A) for _, B, A in ideal], [c for c, _, _ in ideal]
        now = _low_rank(deployed).get(layer, []) + [patch[layer] for patch in patches if layer in patch]
        d_out, d_in = factors[0][0].shape[-2], factors[0][1].shape[-1]
        B = torch.cat([torch.zeros(d_out, 0)] + [float(term.scale) * term.left for term in now], dim=-1)
        A = torch.cat([torch.zeros(0, d_in)] + [term.A for term in now], dim=-2)
        squared_error += float(mixture_distance(B, A, factors, coefficients)) ** 2
        squared_ideal += float(mixture_squared_norm(factors, coefficients))
    ideal_norm = squared_ideal**0.5
    error = squared_error**0.5
    return {
        "absolute": error,
        "relative": error / ideal_norm if ideal_norm > 0 else 0.0,
        "ideal_norm": ideal_norm,
    }


def initialisation_mismatch(uploaded: Adapter, initial: Adapter, eps: float = 1e-12) -> dict[str, float]:
    """||Y_next - Y_up|| / (||Y_next|| + eps) for Y in {B, A} (FedPA-LoRA, Eq. 2), the mean over layers.

    `uploaded` are the factors sent in one round, `initial` those that enter the same client's next Fit; a change of
    rank counts as zero columns or rows.
    """
    sums = {"B": 0.0, "A": 0.0}
    common = sorted(set(uploaded) & set(initial))
    for layer in common:
        rank = max(uploaded[layer].rank, initial[layer].rank)
        before, after = uploaded[layer].padded(rank), initial[layer].padded(rank)
        for name, old, new in (("B", before.B, after.B), ("A", before.A, after.A)):
            sums[name] += float((new.double() - old.double()).norm() / (new.double().norm() + eps))
    return {name: total / len(common) for name, total in sums.items()} if common else {}


def factors_in(payload: Any) -> Adapter | None:
    """The upload itself when it is one low-rank term for each layer; None otherwise."""
    whole = isinstance(payload, Mapping) and bool(payload) and all(isinstance(t, LowRank) for t in payload.values())
    return dict(payload) if whole else None


def spread(values: Mapping[str, float]) -> dict[str, float]:
    """Mean over clients, and the mean of the lowest half and quarter (rounded up)."""
    ordered = sorted(values.values())
    half, quarter = -(-len(ordered) // 2), -(-len(ordered) // 4)
    return {
        "mean": sum(ordered) / len(ordered),
        "worst_50": sum(ordered[:half]) / half,
        "worst_25": sum(ordered[:quarter]) / quarter,
    }


def _low_rank(model: Model) -> dict[str, list[LowRank]]:
    found: dict[str, list[LowRank]] = {}
    for layers in model.terms.values():
        for layer, term in layers.items():
            if isinstance(term, LowRank):
                found.setdefault(layer, []).append(term)
    return found
