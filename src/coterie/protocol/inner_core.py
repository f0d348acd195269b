"""Cores inside factored layers of the base: what trains stands between the layer's own two factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.errors import ModelError
from coterie.protocol.messages import message
from coterie.protocol.parties import Layer
from coterie.protocol.terms import Term

_WHOLE = 16
"""To what sizes are padded: matrix products may sum in an order that depends on where in memory a client's part of a
stack begins, and then its last bits on its company."""


@message
class InnerCore(Term):
    """Makes a layer U V of the base U H V; H is the identity where nothing was trained (FedSLM, Eqs. 2 and 6).

    core (..., k, k): H, k the rank of the layer's factors, which are neither held nor sent with the term. Dropout does
    not act on it.
    """

    core: Tensor

    @classmethod
    def identity(cls, rank: int) -> InnerCore:
        """H = I, float32, under which the layer is as it was."""
        return cls(torch.eye(rank))

    @property
    def rank(self) -> int:
        """k, the rank of what a core of that size can change."""
        return int(self.core.shape[-1])

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {"core": self.core}

    def with_parameters(self, values: Mapping[str, Tensor]) -> InnerCore:
        return replace(self, core=values.get("core", self.core))

    @property
    def signature(self) -> tuple[Any, ...]:
        return (InnerCore, self.rank, self.core.dtype)

    def inside(self, z: Tensor) -> Tensor:
        """z (..., N, k), which the layer's second factor made of its input, as H z, in z's dtype.

        H - I is what is cast, lest small changes of the diagonal vanish where z has few digits.
        """
        short = -self.rank % _WHOLE
        change = self._change(short).to(z.dtype)
        if not short:
            return z + z @ change.mT
        return z + (torch.nn.functional.pad(z, (0, short)) @ change.mT)[..., : self.rank]

    def _change(self, short: int) -> Tensor:
        """H - I with so many rows and columns of zeros at the ends."""
        if self.core.requires_grad and torch.is_grad_enabled():
            change = self.core - torch.eye(self.rank, dtype=self.core.dtype, device=self.core.device)
            return torch.nn.functional.pad(change, (0, short, 0, short)) if short else change
        # Of few rows, as where a token is generated, an identity would cost as much as the product with the core.
        change = torch.nn.functional.pad(self.core.detach(), (0, short, 0, short)) if short else self.core.clone()
        change.diagonal(dim1=-2, dim2=-1)[..., : self.rank].sub_(1)
        return change

    def between(self, U: Tensor, V: Tensor) -> Tensor:
        """U H V (..., d_out, d_in) in the dtype of the factors."""
        return U @ self.core.to(U.dtype) @ V

    def apply(self, x: Tensor) -> Tensor:
        raise ModelError("a core inside a layer adds nothing by itself; it acts between the layer's own factors")

    def dense(self) -> Tensor:
        raise ModelError("a core inside a layer is no matrix by itself; give its layer's factors to between(U, V)")

    def check(self, where: str, layer: Layer, rank: int | None) -> None:
        """As `Term.check`; a client's rank is one of low-rank factors and does not bound a core."""
        if layer.inner is None:
            raise ModelError(f"{where}: a core inside a layer that holds no factors; compress the base model first")
        if tuple(self.core.shape) != (layer.inner, layer.inner):
            raise ModelError(
                f"{where}: a core {tuple(self.core.shape)} inside a layer whose factors have rank {layer.inner}"
            )

    @classmethod
    def stack(cls, terms: Sequence[InnerCore], rank: int) -> InnerCore:
        return InnerCore(torch.stack([term.core for term in terms]))

    def unstack(self, index: int, like: InnerCore) -> InnerCore:
        return InnerCore(self.core[index].clone())
