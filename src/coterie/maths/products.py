"""Products of many rows by a frozen matrix and by few others, forward and backward in no more passes than needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
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


def by_frozen(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias (..., d_out) for x (..., d_in) and W (d_out, d_in), neither of which has a gradient."""
    found: Tensor = _ByFrozen.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return found


def by_adapted(x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor) -> Tensor:
    """x (W + B A)^T + bias (S, N, d_out), all of one dtype, where W and the bias have no gradient.

    x (S, N, d_in), W (d_out, d_in), A (S, r, d_in), B (S, d_out, r): each of the S with its own pair.
    """
    found: Tensor = _ByAdapted.apply(x, weight, bias, A, B)  # type: ignore[no-untyped-call]
    return found


def adds_within(weight: Tensor) -> bool:
    """Whether `by_frozen` adds a bias within its product, where F.linear first fills the result with it."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and _onednn() is not None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None or x.dtype != weight.dtype or not adds_within(weight):
        return F.linear(x, weight, bias)
    onednn = _onednn()
    assert onednn is not None
    return onednn(x, weight, bias, "none", [], "")


def _back(dy: Tensor, weight: Tensor) -> Tensor:
    """dy W (..., d_in), in one product however dy (..., d_out) lies in memory."""
    return (dy.reshape(-1, dy.shape[-1]) @ weight).view(*dy.shape[:-1], weight.shape[1])


@cache
def _onednn() -> Callable[..., Tensor] | None:
    """The product that torch.compile calls, which is no public one: None where it is missing or says something else."""
    x, weight, bias = (torch.linspace(-1, 1, 32 * n).view(32, n).bfloat16() for n in (24, 24, 1))
    try:
        found: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
        said = found(x, weight, bias.flatten(), "none", [], "")
    except Exception:  # a build without it may fail in any way
        return None
    return found if torch.equal(said, F.linear(x, weight, bias.flatten())) else None


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


class _ByFrozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return _back(grads[0], weight), None, None


class _ByAdapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor) -> Tensor:
        z = x @ A.mT
        ctx.save_for_backward(x, weight, A, B, z)
        return _linear(x, weight, bias).baddbmm_(z, B.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, Tensor | None]:
        x, weight, A, B, z = ctx.saved_tensors
        (dy,) = grads
        of_x, _, _, of_a, of_b = ctx.needs_input_grad
        dz = dy @ B
        if torch.is_grad_enabled():  # by whoever wants second derivatives: what was saved has no history
            z = x @ A.mT
        # Both gradients of factors are taken from the large matrix as it lies in memory, as in by_few.
        return (
            _back(dy, weight).baddbmm_(dz, A) if of_x else None,
            None,
            None,
            dz.mT @ x if of_a else None,
            (z.mT @ dy).mT if of_b else None,
        )
