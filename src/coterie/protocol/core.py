"""Cores: small trained matrices between frozen bases, one or several heads to a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.errors import ModelError
from coterie.protocol.messages import message
from coterie.protocol.parties import Layer
from coterie.protocol.terms import LowRank, Term


@message
class Core(Term):
    """sum_j s_j U_j H_j V_j over h heads; U and V are data, what trains is H and, where there is one, s.

    U (..., d_out, h r) and V (..., h r, d_in): the heads' bases side by side; core (..., h, r, r): H; gain (..., h): s,
    None for ones.
    """

    U: Tensor
    core: Tensor
    V: Tensor
    gain: Tensor | None = None

    @property
    def heads(self) -> int:
        """h, the number of heads."""
        return int(self.core.shape[-3])

    @property
    def head_rank(self) -> int:
        """r, the width of each head."""
        return int(self.core.shape[-1])

    @property
    def rank(self) -> int:
        return self.heads * self.head_rank

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {"core": self.core} if self.gain is None else {"core": self.core, "gain": self.gain}

    def with_parameters(self, values: Mapping[str, Tensor]) -> Core:
        return replace(self, core=values.get("core", self.core), gain=values.get("gain", self.gain))

    @property
    def signature(self) -> tuple[Any, ...]:
        shape = self.U.shape[-2], self.V.shape[-1]
        return (Core, *shape, self.core.dtype, self.gain is None)

    def folded(self) -> Tensor:
        """s_j H_j (..., h, r, r)."""
        return self.core if self.gain is None else self.core * self.gain[..., None, None]

    def low_rank(self) -> LowRank:
        """B = [s_1 U_1 H_1, s_2 U_2 H_2, ...], A = V."""
        H = self.folded()
        U = _apart(self.U, -1, self).movedim(-2, -3)  # (..., h, d_out, r)
        return LowRank((U @ H).movedim(-3, -2).flatten(-2), self.V)

    def apply(self, x: Tensor) -> Tensor:
        return self.low_rank().apply(x)

    def dense(self) -> Tensor:
        return self.low_rank().product()

    def chosen(self, heads: Sequence[int]) -> Core:
        """These heads alone, in this order."""
        index = torch.tensor(list(heads), dtype=torch.int64, device=self.core.device)
        return replace(
            self,
            U=_apart(self.U, -1, self).index_select(-2, index).flatten(-2),
            core=self.core.index_select(-3, index),
            V=_apart(self.V, -2, self).index_select(-3, index).flatten(-3, -2),
            gain=None if self.gain is None else self.gain.index_select(-1, index),
        )

    def padded(self, heads: int, head_rank: int) -> Core:
        """Zero bases up to so many heads of that width; what is added is unchanged, and no padding gets a gradient."""
        h, r = max(0, heads - self.heads), max(0, head_rank - self.head_rank)
        if not h and not r:
            return self
        pad = torch.nn.functional.pad
        return replace(
            self,
            U=pad(_apart(self.U, -1, self), (0, r, 0, h)).flatten(-2),
            core=pad(self.core, (0, r, 0, r, 0, h)),
            V=pad(_apart(self.V, -2, self), (0, 0, 0, r, 0, h)).flatten(-3, -2),
            gain=None if self.gain is None else pad(self.gain, (0, h)),
        )

    def check(self, where: str, layer: Layer, rank: int | None) -> None:
        """As `Term.check`; a client's rank is a number of low-rank factors and does not bound a core."""
        if self.core.dim() != 3 or self.core.shape[1] != self.core.shape[2]:
            raise ModelError(f"{where}: a core {tuple(self.core.shape)} where (heads, r, r) is expected")
        wide = self.rank
        if tuple(self.U.shape) != (layer.d_out, wide) or tuple(self.V.shape) != (wide, layer.d_in):
            raise ModelError(
                f"{where}: U {tuple(self.U.shape)} and V {tuple(self.V.shape)} do not fit a layer of {layer.d_out} x "
                f"{layer.d_in}; expected U ({layer.d_out}, {wide}) and V ({wide}, {layer.d_in})"
            )
        if self.gain is not None and tuple(self.gain.shape) != (self.heads,):
            raise ModelError(f"{where}: gain {tuple(self.gain.shape)} where ({self.heads},) is expected")

    @classmethod
    def stack(cls, terms: Sequence[Core], rank: int) -> Core:
        """As `Term.stack`; as many heads of the widest width as `rank` needs, so clients should have one width."""
        width = max(term.head_rank for term in terms)
        heads = max(-(-rank // width), *(term.heads for term in terms))
        wide = [term.padded(heads, width) for term in terms]
        gains = [term.gain for term in wide if term.gain is not None]
        return Core(
            torch.stack([term.U for term in wide]),
            torch.stack([term.core for term in wide]),
            torch.stack([term.V for term in wide]),
            torch.stack(gains) if gains else None,
        )

    def unstack(self, index: int, like: Core) -> Core:
        h, r = like.heads, like.head_rank
        return Core(
            _apart(self.U[index], -1, self)[:, :h, :r].flatten(1).clone(),
            self.core[index, :h, :r, :r].clone(),
            _apart(self.V[index], 0, self)[:h, :r].flatten(0, 1).clone(),
            None if self.gain is None else self.gain[index, :h].clone(),
        )


def _apart(bases: Tensor, axis: int, term: Core) -> Tensor:
    """Bases that lie side by side along `axis`, with an axis of heads before it."""
    apart: Tensor = torch.unflatten(bases, axis, (term.heads, term.head_rank))
    return apart
