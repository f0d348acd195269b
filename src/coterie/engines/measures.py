"""What a round's aggregation lost, from what simulation can see: local products before, the deployed product after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from coterie.maths.gram import mixture_distance, mixture_squared_norm
from coterie.protocol import Adapter, LowRank, Model


def aggregation_mismatch(
    locals_: Sequence[tuple[float, Model]], deployed: Model, patches: Sequence[Adapter] = (), by_layer: bool = False
) -> dict[str, Any]:
    """||deployed - ideal||_F over all layers, absolute (FedPA-LoRA, Eq. 1, scaled) and relative to ||ideal||_F.

    ideal = sum p_i (client i's summed low-rank terms) over the base that the clients trained on; deployed = the
    global model's terms and whatever the aggregation added to the base. Layers that nobody trained do not count.
    With `by_layer`, "layers" holds the same of every layer by its name.
    """
    layers = sorted({layer for _, model in locals_ for layer in low_rank_terms(model)})
    squared: dict[str, tuple[float, float]] = {}
    for layer in layers:
        ideal = [
            (weight * float(term.scale), term.left, term.A)
            for weight, model in locals_
            for term in low_rank_terms(model).get(layer, [])
        ]
        factors, coefficients = [(B, A) for _, B, A in ideal], [c for c, _, _ in ideal]
        now = low_rank_terms(deployed).get(layer, []) + [patch[layer] for patch in patches if layer in patch]
        d_out, d_in = factors[0][0].shape[-2], factors[0][1].shape[-1]
        B = torch.cat([torch.zeros(d_out, 0)] + [float(term.scale) * term.left for term in now], dim=-1)
        A = torch.cat([torch.zeros(0, d_in)] + [term.A for term in now], dim=-2)
        error = float(mixture_distance(B, A, factors, coefficients)) ** 2
        squared[layer] = error, float(mixture_squared_norm(factors, coefficients))
    whole = _mismatch(sum(error for error, _ in squared.values()), sum(ideal for _, ideal in squared.values()))
    return whole | ({"layers": {layer: _mismatch(*pair) for layer, pair in squared.items()}} if by_layer else {})


def _mismatch(squared_error: float, squared_ideal: float) -> dict[str, float]:
    error, ideal_norm = squared_error**0.5, squared_ideal**0.5
    return {"absolute": error, "relative": error / ideal_norm if ideal_norm > 0 else 0.0, "ideal_norm": ideal_norm}


def initialisation_mismatch(
    uploaded: Adapter, initial: Adapter, eps: float = 1e-12, by_layer: bool = False
) -> dict[str, Any]:
    """||Y_next - Y_up|| / (||Y_next|| + eps) for Y in {B, A} (FedPA-LoRA, Eq. 2), the mean over layers.

    `uploaded` are the factors that one round's training ended with, `initial` those that enter the same client's next
    Fit; a change of rank counts as zero columns or rows. With `by_layer`, "layers" holds the same of every layer by
    its name.
    """
    layers: dict[str, dict[str, float]] = {}
    common = sorted(set(uploaded) & set(initial))
    for layer in common:
        rank = max(uploaded[layer].rank, initial[layer].rank)
        before, after = uploaded[layer].padded(rank), initial[layer].padded(rank)
        layers[layer] = {
            name: float((new.double() - old.double()).norm() / (new.double().norm() + eps))
            for name, old, new in (("B", before.B, after.B), ("A", before.A, after.A))
        }
    return _mean_of(layers) | ({"layers": layers} if by_layer else {}) if layers else {}


def mean_initialisation_mismatch(clients: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over clients of what `initialisation_mismatch` found; of a layer, over the clients that have it."""
    names = sorted({layer for found in clients for layer in found.get("layers", ())})
    layers = {name: _mean_of([found["layers"][name] for found in clients if name in found["layers"]]) for name in names}
    return _mean_of(clients) | ({"layers": layers} if layers else {})


def _mean_of(pairs: Mapping[str, Mapping[str, float]] | Sequence[Mapping[str, float]]) -> dict[str, float]:
    listed = list(pairs.values()) if isinstance(pairs, Mapping) else list(pairs)
    return {name: sum(pair[name] for pair in listed) / len(listed) for name in ("B", "A")}


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


def low_rank_terms(model: Model) -> dict[str, list[LowRank]]:
    """What of a model is low-rank, by layer."""
    found: dict[str, list[LowRank]] = {}
    for layers in model.terms.values():
        for layer, term in layers.items():
            factors = term.low_rank()
            if factors is not None:
                found.setdefault(layer, []).append(factors)
    return found
