"""Routed experts as the papers write them: token by token, output by output, expert by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.protocol import Routed


def token_weights(logits: list[float], outputs: list[int], allowed: list[bool], top: int) -> dict[int, float]:
    """Softmax over allowed outputs, the `top` largest kept and renormalised, summed for each expert."""
    usable = [k for k, expert in enumerate(outputs) if allowed[expert]]
    largest = max(logits[k] for k in usable)
    raw = {k: float(torch.exp(torch.tensor(logits[k] - largest, dtype=torch.float64))) for k in usable}
    total = sum(raw.values())
    chosen = sorted(usable, key=lambda k: (-raw[k], k))[:top]
    kept = sum(raw[k] / total for k in chosen)
    weights: dict[int, float] = {}
    for k in chosen:
        weights[outputs[k]] = weights.get(outputs[k], 0.0) + raw[k] / total / kept
    return weights


def routed_output(term: Routed, x: Tensor, dropped: Tensor) -> Tensor:
    """What a term of one client adds for tokens x (N, d_in), (N, d_out); experts see `dropped`."""
    outputs = list(range(len(term.B))) if term.outputs is None else term.outputs.tolist()
    allowed = [True] * len(term.B) if term.allowed is None else term.allowed.tolist()
    rows = []
    for token, seen in zip(x, dropped, strict=True):
        logits = term.router @ token + (0 if term.bias is None else term.bias)
        total = torch.zeros(term.B[0].shape[0], dtype=x.dtype)
        weights = token_weights(logits.tolist(), outputs, allowed, term.top or len(outputs))
        for expert, weight in weights.items():
            A = term.A[expert] if len(term.A) > 1 else term.A[0]
            total = total + weight * float(term.scale) * (term.B[expert] @ (A @ seen))
        rows.append(total)
    return torch.stack(rows)
