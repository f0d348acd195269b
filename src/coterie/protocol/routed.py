"""Low-rank experts, weighted token by token by a linear router on the layer's own input.

All experts are computed in one pass, their factors side by side; a token's weights multiply what lies between the two
products. So a client may train some experts and use the others as they are: each expert's factors are parameters of
their own, and what no pattern names takes no gradient and no weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.errors import ModelError
from coterie.maths.products import by_few
from coterie.protocol.messages import message
from coterie.protocol.parties import Layer
from coterie.protocol.terms import LowRank, Term


@message
class Routed(Term):
    """s sum_e p_e(x) B_e A_e x, the weights p(x) a softmax over the outputs of a linear router.

    B: M experts (..., d_out, r). A: for each (..., r, d_in), or a single one for all. router: (..., K, d_in), bias:
    (..., K) or none. outputs: (..., K) int64, the expert to which each output of the router points; None: K = M, each
    its own. allowed: (..., M) bool, the experts that take part, at least one; None: all. top: how many outputs count
    for a token, the largest, lower places first among equals; None: all.
    Parameters are `B.0`, `B.1`, ..., `A.0`, ... (one where A is common), `router`, `bias`; `outputs` and `allowed` are
    data, each client's own in a stack.
    """

    B: tuple[Tensor, ...]
    A: tuple[Tensor, ...]
    router: Tensor
    scale: float | Tensor = 1.0
    bias: Tensor | None = None
    outputs: Tensor | None = None
    allowed: Tensor | None = None
    top: int | None = None

    @property
    def experts(self) -> int:
        """M."""
        return len(self.B)

    @property
    def width(self) -> int:
        """r, the rank of each expert."""
        return int(self.B[0].shape[-1])

    @property
    def rank(self) -> int:
        return self.experts * self.width

    @property
    def parameters(self) -> dict[str, Tensor]:
        found = {f"B.{e}": B for e, B in enumerate(self.B)} | {f"A.{e}": A for e, A in enumerate(self.A)}
        found["router"] = self.router
        return found if self.bias is None else found | {"bias": self.bias}

    def with_parameters(self, values: Mapping[str, Tensor]) -> Routed:
        now = self.parameters | dict(values)
        return replace(
            self,
            B=tuple(now[f"B.{e}"] for e in range(self.experts)),
            A=tuple(now[f"A.{e}"] for e in range(len(self.A))),
            router=now["router"],
            bias=now.get("bias"),
        )

    @property
    def signature(self) -> tuple[Any, ...]:
        optional = tuple(field is None for field in (self.bias, self.outputs, self.allowed))
        shapes = (self.experts, len(self.A), self.B[0].shape[-2], self.A[0].shape[-1], self.router.shape[-2])
        return (Routed, *shapes, self.router.dtype, optional, self.top)

    def expert(self, index: int) -> LowRank:
        """One expert by itself, in this term's scale."""
        return LowRank(self.B[index], self.A[index if len(self.A) > 1 else 0], self.scale)

    def weights(self, x: Tensor) -> Tensor:
        """p (..., N, M) for x (..., N, d_in), rows that sum to one, in x's dtype but fp32 at least.

        Softmax over the allowed outputs, the `top` largest renormalised (that is the softmax over those alone), and
        summed for each expert.
        """
        logits = by_few(x, self.router.to(x.dtype))
        if self.bias is not None:
            logits = logits + self.bias.unsqueeze(-2).to(x.dtype)
        logits = logits.to(torch.promote_types(x.dtype, torch.float32))
        if self.allowed is not None:
            usable = self.allowed if self.outputs is None else self.allowed.gather(-1, self.outputs)
            logits = logits.masked_fill(~usable.unsqueeze(-2), -torch.inf)
        if self.top is not None and self.top < logits.shape[-1]:
            first = logits.detach().sort(dim=-1, descending=True, stable=True).indices[..., : self.top]
            kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, first, True)
            logits = logits.masked_fill(~kept, -torch.inf)
        p = logits.softmax(dim=-1)
        if self.outputs is None:
            return p
        # A product, since adding in place by index has no fixed order on a GPU.
        return p @ torch.nn.functional.one_hot(self.outputs, self.experts).to(p.dtype)

    def apply(self, x: Tensor) -> Tensor:
        return self.apply_dropped(x, x)

    def apply_dropped(self, x: Tensor, dropped: Tensor) -> Tensor:
        return self.routed(x, dropped)[0]

    def routed(self, x: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        """What is added (..., N, d_out), and the routing weights p (..., N, M) that it is added with.

        The router sees the layer's whole input x, the experts what dropout left of it.
        """
        weights = self.weights(x)
        p = weights.to(x.dtype)
        inner = by_few(dropped, torch.cat(self.A, dim=-2).to(x.dtype))
        apart = inner.reshape(*inner.shape[:-1], len(self.A), self.width)
        mixed = (p.unsqueeze(-1) * apart).flatten(-2)
        scale = self.scale
        if isinstance(scale, Tensor):
            scale = scale.reshape(*scale.shape, 1, 1).to(x.dtype)
        made: Tensor = (mixed @ torch.cat(self.B, dim=-1).mT.to(x.dtype)) * scale
        return made, weights

    def dense(self) -> Tensor:
        raise ModelError("a routed term adds another matrix for every token; there is none for all")

    def check(self, where: str, layer: Layer, rank: int | None) -> None:
        r, M, K = self.width, self.experts, int(self.router.shape[-2]) if self.router.dim() == 2 else 0
        wanted = {(layer.d_out, r)}, {(r, layer.d_in)}
        if len(self.A) not in (1, M) or ({tuple(B.shape) for B in self.B}, {tuple(A.shape) for A in self.A}) != wanted:
            raise ModelError(
                f"{where}: {M} B of {_shapes(self.B)} and {len(self.A)} A of {_shapes(self.A)} do not fit a layer of "
                f"{layer.d_out} x {layer.d_in}; expected ({layer.d_out}, r) and, one for each B or one for all, "
                f"(r, {layer.d_in})"
            )
        if rank is not None and r > rank:
            raise ModelError(f"{where}: experts of rank {r} are above this client's rank {rank}")
        if K == 0 or self.router.shape[-1] != layer.d_in or (self.bias is not None and tuple(self.bias.shape) != (K,)):
            raise ModelError(f"{where}: a router of {_shapes((self.router,))} cannot read inputs of {layer.d_in}")
        if self.outputs is None:
            if K != M:
                raise ModelError(f"{where}: {K} outputs of the router for {M} experts; say where each points")
        elif tuple(self.outputs.shape) != (K,) or not bool(((self.outputs >= 0) & (self.outputs < M)).all()):
            raise ModelError(f"{where}: each of {K} outputs of the router must point to one of {M} experts")
        if self.allowed is not None:
            usable = tuple(self.allowed.shape) == (M,) and self.allowed.dtype == torch.bool
            if not usable or not bool((self.allowed if self.outputs is None else self.allowed[self.outputs]).any()):
                raise ModelError(f"{where}: of {M} experts, at least one that the router points to must be allowed")
        if self.top is not None and self.top < 1:
            raise ModelError(f"{where}: top {self.top} would leave no expert; it must be positive")

    @classmethod
    def stack(cls, terms: Sequence[Routed], rank: int) -> Routed:
        width = max(rank, *(term.width for term in terms))
        pad, first = torch.nn.functional.pad, terms[0]

        def joined(pick: str) -> Tensor | None:
            values = [getattr(term, pick) for term in terms]
            return None if values[0] is None else torch.stack(values)

        return Routed(
            tuple(torch.stack([pad(t.B[e], (0, width - t.width)) for t in terms]) for e in range(first.experts)),
            tuple(torch.stack([pad(t.A[e], (0, 0, 0, width - t.width)) for t in terms]) for e in range(len(first.A))),
            torch.stack([term.router for term in terms]),
            torch.tensor([float(term.scale) for term in terms], dtype=first.router.dtype, device=first.router.device),
            joined("bias"),
            joined("outputs"),
            joined("allowed"),
            first.top,
        )

    def unstack(self, index: int, like: Routed) -> Routed:
        r = like.width
        return replace(
            like,
            B=tuple(B[index, :, :r].clone() for B in self.B),
            A=tuple(A[index, :r].clone() for A in self.A),
            router=self.router[index].clone(),
            bias=None if self.bias is None else self.bias[index].clone(),
        )


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(shape) for shape in sorted({tuple(tensor.shape) for tensor in tensors}))
