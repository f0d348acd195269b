"""Changes of a few entries of W, at places that all share."""

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


@message
class SparseDelta(Term):
    """W + D with D 0 outside some places: values (..., k) train, places (..., k) int32 of the flat W are data."""

    values: Tensor
    places: Tensor
    d_out: int
    d_in: int

    @property
    def rank(self) -> int:
        return min(self.d_out, self.d_in, int(self.values.shape[-1]))

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def with_parameters(self, values: Mapping[str, Tensor]) -> SparseDelta:
        return replace(self, values=values.get("values", self.values))

    @property
    def signature(self) -> tuple[Any, ...]:
        return (SparseDelta, self.d_out, self.d_in, int(self.values.shape[-1]), self.values.dtype)

    def dense(self) -> Tensor:
        leading = self.values.shape[:-1]
        flat = self.values.new_zeros((*leading, self.d_out * self.d_in))
        return flat.scatter(-1, self.places.long(), self.values).view(*leading, self.d_out, self.d_in)

    def apply(self, x: Tensor) -> Tensor:
        # A product with the whole D costs less than gathering k columns of x, whose copies autograd would keep.
        return x @ self.dense().mT.to(x.dtype)

    def check(self, where: str, layer: Layer, rank: int | None) -> None:
        """As `Term.check`; a client's rank is a number of low-rank factors and does not bound a sparse change."""
        if (self.d_out, self.d_in) != (layer.d_out, layer.d_in):
            raise ModelError(
                f"{where}: a change of {self.d_out} x {self.d_in} does not fit a layer of {layer.d_out} x {layer.d_in}"
            )
        k = self.values.numel()
        if tuple(self.values.shape) != (k,) or tuple(self.places.shape) != (k,) or self.places.is_floating_point():
            raise ModelError(
                f"{where}: values {tuple(self.values.shape)} and places {tuple(self.places.shape)} {self.places.dtype} "
                "where (k,) and (k,) int32 are expected"
            )
        ordered = self.places.sort().values
        if k and (int(ordered[0]) < 0 or int(ordered[-1]) >= layer.d_out * layer.d_in):
            raise ModelError(f"{where}: places must lie below {layer.d_out * layer.d_in}")
        if bool((ordered[1:] == ordered[:-1]).any()):
            raise ModelError(f"{where}: two values for one place")

    @classmethod
    def stack(cls, terms: Sequence[SparseDelta], rank: int) -> SparseDelta:
        values = torch.stack([term.values for term in terms])
        return SparseDelta(values, torch.stack([term.places for term in terms]), terms[0].d_out, terms[0].d_in)

    def unstack(self, index: int, like: SparseDelta) -> SparseDelta:
        return replace(self, values=self.values[index].clone(), places=self.places[index].clone())
