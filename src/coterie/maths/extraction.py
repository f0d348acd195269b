"""Experts as convex combinations of a pool of uploads, found by projected gradient descent on the weights alone.

B_m = sum_p omega_mp B_p over a pool (P, D), a row for each upload with all its layers side by side. Losses are
differentiated by B_m only, and the weights' gradient is <B_p, dL_m/dB_m>, so that a step costs one pass of the model
for each expert and two matrix products, however large the pool is (FedSEE, Appendix C.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.maths.simplex import balanced, project_rows

CLIP = 0.1
"""The largest norm of an expert's gradient, all its layers together, and of a row of the weights' gradient."""

EVERY = 5
"""Steps from one Sinkhorn scaling to the next; in between, weights are only kept from being negative."""


@dataclass(frozen=True)
class Descent:
    """How weights omega (M, P) descend on sum_m L_m(B_m) + regulariser / 2 ||omega||_F^2.

    balanced: clients' blocks of columns sum to M / N (FedSEE, C.2); else every row is on the simplex by itself
    (Theorem 2), projected at each step.
    """

    steps: int = 50
    lr: float = 0.1
    regulariser: float = 0.01
    balanced: bool = True

    def feasible(self, omega: Tensor, owners: Tensor, clients: int) -> Tensor:
        """The weights (M, P) within their constraints, fp64; owners (P,) int64, the client of each column."""
        wide = omega.double()
        return balanced(wide, owners, clients) if self.balanced else project_rows(wide)

    def pull(self, omega: Tensor) -> Tensor:
        """The regulariser's gradient at these weights (M, P)."""
        return self.regulariser * omega

    @torch.no_grad()
    def stepped(
        self, number: int, omega: Tensor, pool: Tensor, gradients: Tensor, owners: Tensor, clients: int
    ) -> Tensor:
        """The weights after step `number` of 1..steps, given dL_m/dB_m (M, D) at these; feasible after the last."""
        slopes = weight_gradients(clipped(gradients), pool).double() + self.pull(omega)
        moved = omega - self.lr * clipped(slopes)
        if self.balanced and number % EVERY and number < self.steps:
            return moved.clamp(min=0)
        return self.feasible(moved, owners, clients)


@torch.no_grad()
def mixtures(omega: Tensor, pool: Tensor) -> Tensor:
    """B_m = sum_p omega_mp B_p, (M, D) in the pool's dtype, for omega (M, P) and a pool (P, D)."""
    return omega.to(pool.dtype) @ pool


@torch.no_grad()
def weight_gradients(gradients: Tensor, pool: Tensor) -> Tensor:
    """dL_m/d omega_mp = <B_p, dL_m/dB_m>, (M, P), for gradients (M, D) by the experts and a pool (P, D)."""
    return gradients.to(pool.dtype) @ pool.mT


@torch.no_grad()
def clipped(rows: Tensor, most: float = CLIP) -> Tensor:
    """Rows (M, ...) shortened to a norm of at most `most`; shorter ones are as they were."""
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    shorter: Tensor = rows * (most / norms).clamp(max=1)
    return shorter


def flat(tensors: Mapping[str, Tensor], order: Sequence[str]) -> Tensor:
    """The named tensors one after another, (D,)."""
    return torch.cat([tensors[name].reshape(-1) for name in order])


def unflat(row: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors of these shapes from a row (D,) that holds them in this order; copies."""
    made, start = {}, 0
    for name, shape in shapes.items():
        end = start + math.prod(shape)
        made[name] = row[start:end].reshape(shape).clone()
        start = end
    return made
