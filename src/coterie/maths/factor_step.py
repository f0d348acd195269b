"""One factor of B A moved so that the product comes as near to another one as the other factor lets it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from coterie.maths.stacking import Factors, cast, check_products


@torch.no_grad()
def factor_step(B: Tensor, A: Tensor, target: Factors, moved: Literal["B", "A"]) -> Tensor:
    """dB = (W - B A) A^+, or dA = B^+ (W - B A), for W given as factors; no m x n matrix is formed.

    Of all steps of least ||B A + (step in one factor) - W||_F the one of least norm. Source: FedSRD (arXiv 2510.04601),
    server side.

    Args:
        B, A: (m, r) and (r, n).
        target: W as (m, q) and (q, n).
        moved: the factor whose step is asked for.

    Returns:
        (m, r) for "B", (r, n) for "A", in fp64.

    Raises:
        ValueError: factors that do not fit.
    """
    B, A = B.double(), A.double()
    check_products([target, (B, A)])
    left, right = cast(target, torch.float64)
    if moved == "B":
        inverse = pseudo_inverse(A)
        return left @ (right @ inverse) - B @ (A @ inverse)
    inverse = pseudo_inverse(B)
    return (inverse @ left) @ right - (inverse @ B) @ A


def pseudo_inverse(factor: Tensor) -> Tensor:
    """In fp64, cut off where fp32 is: directions below are what one factor's rounding left in the other."""
    made: Tensor = torch.linalg.pinv(factor.double(), rtol=max(factor.shape) * torch.finfo(torch.float32).eps)
    return made
