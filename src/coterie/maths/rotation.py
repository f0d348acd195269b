"""Orthogonal matrices that turn one factor onto another (Procrustes), and rotations part of the way.

Letters: X the factor to be turned and Y the one to be met, both (..., k, r), R (..., r, r). For a pair of factors
(B, A), the pair (B R, R^T A) has the same product. SVD runs in float64 unless `dtype` says otherwise; nothing here is
to be differentiated.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def procrustes(X: Tensor, Y: Tensor, *, proper: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
    """The orthogonal R that makes ||X R - Y||_F least: R = U V^T with U S V^T the SVD of X^T Y.

    Source: FedRot-LoRA (arXiv 2602.23638); Schoenemann 1966, and Kabsch 1976 for `proper`.

    Args:
        X, Y: (..., k, r), leading axes broadcast.
        proper: only rotations, det R = +1: where U V^T reflects, the last right singular vector changes its sign.
        dtype: of the computation.

    Returns:
        R (..., r, r), in `dtype`; the identity where X^T Y is 0. Where X^T Y has no full rank, one of several R.

    Raises:
        ValueError: shapes that do not fit.
        torch.linalg.LinAlgError: entries that are not finite.
    """
    if X.dim() < 2 or X.shape[-2:] != Y.shape[-2:]:
        raise ValueError(f"X {tuple(X.shape)} cannot be turned onto Y {tuple(Y.shape)}: both must be (..., k, r)")
    return _orthogonal(X.to(dtype).mT @ Y.to(dtype), proper)


@torch.no_grad()
def partial(R: Tensor, strength: float) -> Tensor:
    """The orthogonal matrix nearest to (1 - strength) I + strength R: R at 1, the identity at 0.

    Unique unless R turns some plane by half a turn and strength is 1/2. Source: FedRot-LoRA (arXiv 2602.23638), soft
    rotation.

    Args:
        R: (..., r, r), orthogonal; its dtype is that of the computation.
        strength: from 0 to 1.

    Returns:
        (..., r, r) in R's dtype.

    Raises:
        ValueError: a strength outside [0, 1].
    """
    if not 0 <= strength <= 1:
        raise ValueError(f"the strength of a rotation must lie between 0 and 1, not {strength:g}")
    eye = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    return _orthogonal((1 - strength) * eye + strength * R, proper=False)


def _orthogonal(M: Tensor, proper: bool) -> Tensor:
    """U V^T of M = U S V^T, with det +1 if asked for; the identity where M is 0."""
    U, _, Vh = torch.linalg.svd(M)
    if proper:
        sign = torch.linalg.det(U) * torch.linalg.det(Vh)
        flip = torch.ones_like(Vh[..., 0])
        flip[..., -1] = torch.where(sign < 0, -1.0, 1.0)
        Vh = flip[..., None] * Vh
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    return torch.where((M == 0).all(dim=-1, keepdim=True).all(dim=-2, keepdim=True), eye, U @ Vh)
