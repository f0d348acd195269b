"""FedPA-LoRA's joint objective as figures of a round: how far products lie apart, what a low reference rank lacks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from coterie.maths.gram import distance
from coterie.protocol import Adapter, Federation, Seen


def joint_terms(
    reference: Adapter, federation: Federation, seen: Mapping[str, Seen], lam: float | Mapping[str, float]
) -> dict[str, float]:
    """delta of Eqs. 86-87, and the mean of lambda_i / 2 ||X_i - X_g||_F^2 that Eq. 20 adds to the task losses.

    `lam` is one for all clients, or each client's own by its id.
    """
    apart = 0.0
    for client, one in seen.items():
        if one.model is not None:
            strength = lam[client] if isinstance(lam, Mapping) else lam
            apart += one.weight * strength / 2 * mismatch(one.model["lora"], reference) ** 2
    return {"truncation_delta": truncation_delta(reference, federation), "regulariser": apart}


def truncation_delta(reference: Adapter, federation: Federation) -> float:
    """delta of Eqs. 86-87: what the reference of the smallest R_i lacks of the global one, over all layers together."""
    smallest = min(card.down_rank for card in federation.cards)  # columns of B_g are u_k sigma_k
    tail = sum(float(term.B[:, smallest:].double().square().sum()) for term in reference.values())
    return float(tail**0.5)


def mismatch(own: Adapter, reference: Adapter) -> float:
    """||X_i - X_g||_F of the unscaled products, over all layers that the client has together."""
    terms = ((term, reference[name]) for name, term in own.items())
    return math.sqrt(math.fsum(float(distance(a.left, a.A, b.left, b.A)) ** 2 for a, b in terms))
