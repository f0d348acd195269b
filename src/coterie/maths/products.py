"""Products of many rows by a frozen matrix and by few others, forward and backward in no more passes than needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 2048
"""For how many rows a weight is laid out; one that is serves any number."""


def by_few(x: Tensor, A: Tensor) -> Tensor:
    """x A^T (..., N, r) for x (..., N, d) and A (..., r, d) of one dtype, where r is small beside N and d.

    The gradient of A is computed as dz^T x. PyTorch would compute its transpose x^T dz, which has the same value and
    takes up to eight times as long on a CPU, since x is then read across its rows.
    """
    if x.shape[:-2] != A.shape[:-2]:
        return x @ A.mT
    found: Tensor = _ByFew.apply(x, A)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class Packed:
    """A frozen weight W in the layout of oneDNN, for x W^T and for dy W, lest every product lay it out anew."""

    onward: Tensor
    back: Tensor


def packed(weight: Tensor) -> Packed | None:
    """Copies of W (d_out, d_in); None where products do not profit: see `is_fast`."""
    onednn = _onednn() if is_fast(weight) else None
    if onednn is None:
        return None
    return Packed(onednn.lay_out(weight.detach(), _ROWS), onednn.lay_out(weight.detach().t().contiguous(), _ROWS))


def is_fast(weight: Tensor) -> bool:
    """Whether products with W may be oneDNN's own, which add the bias within and take packed weights: of bfloat16 on a
    CPU, where this PyTorch has them."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and _onednn() is not None


def by_frozen(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed | None = None) -> Tensor:
    """x W^T + bias (..., d_out) for x (..., d_in) and W (d_out, d_in), neither of which has a gradient."""
    found: Tensor = _ByFrozen.apply(x, weight, bias, packed)  # type: ignore[no-untyped-call]
    return found


def by_adapted(
    x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, packed: Packed | None = None
) -> Tensor:
    """x (W + B A)^T + bias (S, N, d_out), all of one dtype, where W and the bias have no gradient.

    x (S, N, d_in), W (d_out, d_in), A (S, r, d_in), B (S, d_out, r): each of the S with its own pair.
    """
    found: Tensor = _ByAdapted.apply(x, weight, bias, A, B, packed)  # type: ignore[no-untyped-call]
    return found


def _onward(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed | None) -> Tensor:
    onednn = _onednn() if x.dtype == weight.dtype and is_fast(weight) else None
    if onednn is None or (bias is None and packed is None):
        return F.linear(x, weight, bias)
    return onednn.product(x, weight if packed is None else packed.onward, bias, "none", [], "")


def _back(dy: Tensor, weight: Tensor, packed: Packed | None) -> Tensor:
    """dy W (..., d_in), in one product however dy (..., d_out) lies in memory."""
    rows = dy.reshape(-1, dy.shape[-1])
    onednn = None if packed is None else _onednn()
    if onednn is None or packed is None:
        return (rows @ weight).view(*dy.shape[:-1], weight.shape[1])
    return onednn.product(rows, packed.back, None, "none", [], "").view(*dy.shape[:-1], weight.shape[1])


class _OneDnn(NamedTuple):
    """What torch.compile calls: (x, W, bias, "none", [], "") -> x W^T + bias, and (W, rows) -> W for it."""

    product: Callable[..., Tensor]
    lay_out: Callable[[Tensor, int], Tensor]


@cache
def _onednn() -> _OneDnn | None:
    """The private operators, None where they are missing or say something else than the public ones."""
    x, weight = (torch.linspace(-1, 1, 24 * n).view(n, 24).bfloat16() for n in (40, 32))
    bias = torch.linspace(-1, 1, 32).bfloat16()
    try:
        found = _OneDnn(torch.ops.mkldnn._linear_pointwise, torch.ops.mkldnn._reorder_linear_weight)
        ways = weight, found.lay_out(weight, _ROWS)
        said = [found.product(x, way, bias, "none", [], "") for way in ways]
    except Exception:  # a build without them may fail in any way
        return None
    return found if all(torch.equal(one, F.linear(x, weight, bias)) for one in said) else None


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
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.packed = packed
        return _onward(x, weight, bias, packed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return _back(grads[0], weight, ctx.packed), None, None, None


class _ByAdapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, packed: Packed | None
    ) -> Tensor:
        z = x @ A.mT
        ctx.save_for_backward(x, weight, A, B, z)
        ctx.packed = packed
        return _onward(x, weight, bias, packed).baddbmm_(z, B.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, Tensor | None, None]:
        x, weight, A, B, z = ctx.saved_tensors
        (dy,) = grads
        of_x, _, _, of_a, of_b, _ = ctx.needs_input_grad
        dz = dy @ B
        if torch.is_grad_enabled():  # by whoever wants second derivatives: what was saved has no history
            z = x @ A.mT
        # Both gradients of factors are taken from the large matrix as it lies in memory, as in by_few.
        return (
            _back(dy, weight, ctx.packed).baddbmm_(dz, A) if of_x else None,
            None,
            None,
            dz.mT @ x if of_a else None,
            (z.mT @ dy).mT if of_b else None,
            None,
        )
