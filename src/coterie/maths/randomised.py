"""Randomised range finder for a low-rank product, applied to its factors (Halko, Martinsson, Tropp 2011)."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.maths.keys import Key
from coterie.maths.stacking import check_product


def range_factors(B: Tensor, A: Tensor, size: int, key: Key, *, power: int = 0) -> tuple[Tensor, Tensor]:
    """Q and C = Q^T BA with orthonormal columns in Q, so that QC is BA projected on a sampled range.

    Q spans D Omega for D = BA and a Gaussian Omega (n, size), after `power` steps D D^T that sharpen a slowly
    decaying spectrum; every step is orthonormalised anew, since powers alone lose the small directions to
    rounding. Omega is drawn in float32 (the same bits on every machine) and shared by all leading axes.
    Cost: (m + n) r size per product with D; no m x n matrix. With size >= rank(D), QC = D.
    Source: FedPA-LoRA, Remark 2; Halko et al., Algorithms 4.1 and 4.4.

    Args:
        B, A: factors (..., m, r) and (..., r, n); their dtype is that of the computation.
        size: sampled directions (target rank plus oversampling); cut to min(m, n, r).
        key: of the test matrix.
        power: number of power steps, >= 0.

    Returns:
        Q (..., m, size) and C (..., size, n).

    Raises:
        ValueError: shapes that do not fit, a negative size or power.
    """
    check_product(B, A)
    if size < 0 or power < 0:
        raise ValueError(f"size {size} and power {power} of a range finder must not be negative")
    m, r, n = B.shape[-2], B.shape[-1], A.shape[-1]
    size = min(size, m, r, n)
    Omega = key.normal((n, size)).to(device=B.device, dtype=B.dtype)
    Q = _orthonormal(B @ (A @ Omega))
    for _ in range(power):
        Q = _orthonormal(A.mT @ (B.mT @ Q))
        Q = _orthonormal(B @ (A @ Q))
    return Q, (Q.mT @ B) @ A


def _orthonormal(Y: Tensor) -> Tensor:
    Q: Tensor = torch.linalg.qr(Y).Q
    return Q
