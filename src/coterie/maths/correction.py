"""The left factor that makes a product B A with a given A agree with a sum of products D = sum_i c_i B_i A_i.

Only Gram matrices are formed: S = A A^T (r, r) and T = D A^T = sum_i c_i B_i (A_i A^T) (m, r), with which
<B A, D> = <B, T> and ||B A||^2 = <B, B S>. The computation runs in float64 unless `dtype` says otherwise; nothing here
is to be differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.maths.gram import squared_norm
from coterie.maths.stacking import Factors, cast, check_product, stack_factors

CUTOFF = 1e-12
"""Directions of A whose squared length is below this share of the largest are taken for absent."""

ROUNDING = 1e-14
"""What an objective of about 1 may rise by rounding. It tells X only to the root of that, so X itself must rest."""


@torch.no_grad()
def ridge_correction(
    B: Tensor,
    A: Tensor,
    factors: Sequence[Factors],
    coefficients: Sequence[float],
    penalty: float,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The X that makes ||D - X A||_F^2 + penalty ||X - B||_F^2 least, X = B + (T - B S)(S + penalty I)^-1.

    Cost (m + n) r r_tot. With penalty 0 the smallest correction of least error.

    Args:
        B, A: (m, r) and (r, n).
        factors, coefficients: D, as of `stack_factors`.
        penalty: at least 0.
        dtype: of the computation.

    Returns:
        X (m, r) in B's dtype.

    Raises:
        ValueError: as `stack_factors`, shapes of B and A that do not fit, or a negative penalty.
    """
    X, S, T, _ = _grams(B, A, factors, coefficients, penalty, dtype)
    return (X + (T - X @ S) @ _inverse(S, penalty)).to(B.dtype)


@torch.no_grad()
def cosine_correction(
    B: Tensor,
    A: Tensor,
    factors: Sequence[Factors],
    coefficients: Sequence[float],
    penalty: float,
    *,
    sweeps: int = 100,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """An X that makes F(X) = 1 - cos(D, X A) + penalty ||X - B||_F^2 stationary, found by descent from B.

    With x = ||X A|| and c = cos(D, X A), dF/dX = 0 reads X (c/x^2 S + 2 penalty I) = T / (||D|| x) + 2 penalty B. A
    sweep solves this for X with x and c as they are, gives X the length that lies nearest to B (the cosine is blind
    to it), and goes there, or half as far as often as F would rise. So F never rises, and the cosine is never below
    that of B: there is no step size that could be wrong for factors of another size. It ends when X rests.
    Cost (m + n) r r_tot once, then m r^2 a sweep. Source: LoRA-FAIR (arXiv 2411.14961), its objective.

    Args, Returns, Raises: as `ridge_correction`; X is B where D or B A vanishes or they make no acute angle.
    """
    start, S, T, norm = _grams(B, A, factors, coefficients, penalty, dtype)
    X, (value, c, x) = start, _objective(start, start, S, T, norm, penalty)
    for _ in range(sweeps):
        if not c > 0:
            break
        mu = 2 * penalty * x**2 / c
        target = (x / (c * norm) * T + mu * start) @ _inverse(S, mu)
        along = float((target * start).sum() / target.square().sum())
        target = along * target if along > 0 else target
        for half in range(30):
            tried = X + 0.5**half * (target - X)
            rated = _objective(tried, start, S, T, norm, penalty)
            if rated[0] <= value + ROUNDING:
                break
        else:
            break
        moved, X, (value, c, x) = float((tried - X).norm()), tried, rated
        if moved <= ROUNDING * float(X.norm()):
            break
    return X.to(B.dtype)


def _objective(
    X: Tensor, start: Tensor, S: Tensor, T: Tensor, norm: float, penalty: float
) -> tuple[float, float, float]:
    """(F(X), cos(D, X A), ||X A||); a cosine with 0 counts as 0."""
    x = float((X * (X @ S)).sum().clamp(min=0).sqrt())
    c = float((X * T).sum()) / (norm * x) if norm * x > 0 else 0.0
    return 1 - c + penalty * float((X - start).square().sum()), c, x


def _grams(
    B: Tensor,
    A: Tensor,
    factors: Sequence[Factors],
    coefficients: Sequence[float],
    penalty: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """B, S, T and ||D||, in `dtype`."""
    check_product(B, A)
    if not penalty >= 0:
        raise ValueError(f"the penalty on a correction must be at least 0, not {penalty:g}")
    left, right = stack_factors(factors, coefficients, dtype=dtype)
    B, A = cast((B, A), dtype)
    if (left.shape[-2], right.shape[-1]) != (B.shape[-2], A.shape[-1]):
        wanted = f"{left.shape[-2]} x {right.shape[-1]}"
        raise ValueError(f"B {tuple(B.shape)} and A {tuple(A.shape)} make no {wanted} matrix like the sum's")
    return B, A @ A.mT, left @ (right @ A.mT), float(squared_norm(left, right, dtype=dtype).clamp(min=0).sqrt())


def _inverse(S: Tensor, ridge: float) -> Tensor:
    """(S + ridge I)^-1 on the range of S, 0 beyond it when there is no ridge to speak of."""
    eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    inverse: Tensor = torch.linalg.pinv(S + ridge * eye, rtol=CUTOFF, hermitian=True)
    return inverse
