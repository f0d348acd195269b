"""Rows of a matrix taken from their places and put back there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class Rows:
    """Which rows of a matrix (N, d) are taken, and where each of the N then is.

    index (n,) int64, all different; back (N,) int64, the place of a row among those that are taken, n for all others.
    """

    index: Tensor
    back: Tensor

    @classmethod
    def of(cls, index: Tensor, count: int) -> Rows:
        """Those at index (n,) of so many."""
        back = index.new_full((count,), len(index))
        back[index] = torch.arange(len(index), device=index.device)
        return cls(index, back)

    def picked(self, x: Tensor) -> Tensor:
        """The rows of x (N, d) that are taken: (n, d).

        The gradient is put where they were. PyTorch, which cannot know that they differ, would add it there row by row.
        """
        found: Tensor = _Picked.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def placed(self, x: Tensor) -> Tensor:
        """A matrix (N, d) of zeros with the rows of x (n, d) where they belong."""
        found: Tensor = _Placed.apply(x, self)  # type: ignore[no-untyped-call]
        return found


class _Picked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.placed(grads[0]), None


class _Placed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        # Several times as fast as copying each row to where it belongs.
        return torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, rows.back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.picked(grads[0]), None
