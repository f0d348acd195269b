"""What sketches of a round lost, as far as simulation can tell, which knows the products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch

from coterie.maths.gram import inner, squared_norm
from coterie.maths.sketch import error_bound, tail_energies
from coterie.maths.spectrum import product_spectrum
from coterie.maths.stacking import stack_factors
from coterie.protocol import Adapter, LowRank, Seen


def sketch_losses(
    trained: Mapping[str, tuple[float, Adapter]], rebuilt: Adapter, rank: int, sizes: Callable[[str], tuple[int, int]]
) -> dict[str, float]:
    """What the sketches lost, over all layers together and relative to ||W||_F, W = sum p_i B_i A_i unscaled.

    sketch_error: ||What - W||_F. tail_energy: tau_{rank + 1}, what the best approximation of that rank would lose.
    sketch_bound: the root of Lemma 2's bound on E||What - W||_F^2 for the plain reconstruction from the same sketch
    before any truncation, left out where a layer's sizes are outside of it; of a method that truncates or shrinks it
    is no bound on sketch_error. Nothing where nobody trained or W is zero. Figures below 1e-8 are rounding.

    trained: weight and factors of each client. sizes: s and k of a layer by its name.
    """
    error = tail = bound = energy = 0.0
    bounded = True
    for name, term in rebuilt.items():
        held = [(weight, adapter[name]) for weight, adapter in trained.values() if name in adapter]
        total = sum(weight for weight, _ in held)
        if total <= 0:
            continue
        factors, weights = [(one.left, one.A) for _, one in held], [weight / total for weight, _ in held]
        W, What = stack_factors(factors, weights, dtype=torch.float64), (term.left.double(), term.A.double())
        spectrum = product_spectrum(*W)
        tails = tail_energies(spectrum)
        apart = tails[0] - 2 * inner(*W, *What) + squared_norm(*What)
        error += max(0.0, float(apart))
        energy += float(tails[0])
        tail += float(tails[rank]) if rank < len(tails) else 0.0
        s, k = sizes(name)
        bounded = bounded and s >= 2 and k > s + 1
        bound += float(error_bound(spectrum, s, k)) if bounded else 0.0
    if energy <= 0:
        return {}
    found = {"sketch_error": error, "tail_energy": tail} | ({"sketch_bound": bound} if bounded else {})
    return {name: (value / energy) ** 0.5 for name, value in found.items()}


def trained_by(seen: Mapping[str, Seen]) -> dict[str, tuple[float, Adapter]]:
    """Weight and trained factors of everybody of whom simulation knows them."""
    return {
        name: (one.weight, cast("dict[str, LowRank]", one.model["lora"]))
        for name, one in seen.items()
        if one.model is not None and "lora" in one.model
    }
