"""Products of many rows by few, whose gradients are taken from the large matrix as it lies in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def by_few(x: Tensor, A: Tensor) -> Tensor:
    """x A^T (..., N, r) for x (..., N, d) and A (..., r, d) of one dtype, where r is small beside N and d.

    The gradient of A is computed as dz^T x. PyTorch would compute its transpose x^T dz, which has the same value and
    takes up to eight times as long on a CPU, since x is then read across its rows.
    """
    if x.shape[:-2] != A.shape[:-2]:
        return x @ A.mT
    found: Tensor = _ByFew.apply(x, A)  # type: ignore[no-untyped-call]
    return found


class _ByFew(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, A: Tensor) -> Tensor:
        ctx.save_for_backward(x, A)
        return x @ A.mT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, A = ctx.saved_tensors
        (dz,) = grads
        of_x, of_a = ctx.needs_input_grad
        return dz @ A if of_x else None, dz.mT @ x if of_a else None
