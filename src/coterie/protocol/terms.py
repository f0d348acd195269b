"""Models as named terms: what a client adds to its frozen base, written as data.

Leading axes are allowed everywhere: one client or a stack of clients, one layer or a stack of equal layers, use
the same maths. A term declares its parameters; training patterns see only these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import Tensor

from coterie.errors import ModelError, nearest
from coterie.maths.products import by_few
from coterie.protocol.messages import message
from coterie.protocol.mix import Mix
from coterie.protocol.parties import Layer
from coterie.protocol.prototypes import Prototypes

NAMES = ("lora", "shared", "local", "experts", "router", "core", "sparse", "bottleneck", "delta")


class Term(ABC):
    """One addend of a linear layer: x (..., N, d_in) -> (..., N, d_out)."""

    @property
    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """The tensors that may be trained, by short name."""

    @abstractmethod
    def with_parameters(self, values: Mapping[str, Tensor]) -> Self:
        """The same term with these tensors in place of its parameters."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """What this term adds to the layer's output, in x's dtype."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The matrix (..., d_out, d_in) that this term adds to W."""

    @abstractmethod
    def check(self, where: str, layer: Layer, rank: int | None) -> None:
        """Raises ModelError unless shapes fit the layer (and the rank, when one is given)."""

    @classmethod
    @abstractmethod
    def stack(cls, terms: Sequence[Self], rank: int) -> Self:
        """Several clients' terms along a new leading axis, ranks zero-padded to `rank` at least."""

    @abstractmethod
    def unstack(self, index: int, like: Self) -> Self:
        """Client `index` of a stack, cut to the shape that `like` had."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of what is added (an upper bound)."""

    @property
    @abstractmethod
    def signature(self) -> tuple[Any, ...]:
        """What must be equal for two clients' terms to stack."""

    def low_rank(self) -> LowRank | None:
        """The same addend as low-rank factors, for terms that are nothing else; None for others."""
        return None

    def apply_dropped(self, x: Tensor, dropped: Tensor) -> Tensor:
        """`apply` under dropout: `dropped` is the input x with some entries dropped, all that most terms see of it."""
        return self.apply(dropped)


@message
class LowRank(Term):
    """s B A, or s B diag(d) A: B (..., d_out, r), A (..., r, d_in), d (..., r); scale a number or, stacked, (...,)."""

    B: Tensor
    A: Tensor
    scale: float | Tensor = 1.0
    diagonal: Tensor | None = None

    @property
    def rank(self) -> int:
        return int(self.A.shape[-2])

    @property
    def parameters(self) -> dict[str, Tensor]:
        pair = {"B": self.B, "A": self.A}
        return pair if self.diagonal is None else pair | {"diagonal": self.diagonal}

    def with_parameters(self, values: Mapping[str, Tensor]) -> LowRank:
        return replace(self, **values)

    @property
    def signature(self) -> tuple[Any, ...]:
        return (LowRank, self.B.shape[-2], self.A.shape[-1], self.B.dtype, self.diagonal is None)

    def low_rank(self) -> LowRank:
        return self

    @property
    def left(self) -> Tensor:
        """B, or B diag(d)."""
        return self.B if self.diagonal is None else self.B * self.diagonal.unsqueeze(-2)

    def unscaled_product(self) -> Tensor:
        """B A (..., d_out, d_in), without the scale."""
        return self.left @ self.A

    def product(self) -> Tensor:
        """s B A (..., d_out, d_in)."""
        return self._scale(2) * self.unscaled_product()

    def dense(self) -> Tensor:
        return self.product()

    def apply(self, x: Tensor) -> Tensor:
        inner = by_few(x, self.A.to(x.dtype))
        if self.diagonal is not None:
            inner = inner * self.diagonal.unsqueeze(-2).to(x.dtype)
        scale = self._scale(2)
        return (inner @ self.B.mT.to(x.dtype)) * (scale.to(x.dtype) if isinstance(scale, Tensor) else scale)

    def truncated(self, rank: int) -> LowRank:
        """The first `rank` columns of B and rows of A; all of them when there are fewer."""
        diagonal = None if self.diagonal is None else self.diagonal[..., :rank]
        return replace(self, B=self.B[..., :rank], A=self.A[..., :rank, :], diagonal=diagonal)

    def directions(self, chosen: Sequence[int]) -> LowRank:
        """These columns of B and rows of A, in this order."""
        index = torch.tensor(list(chosen), dtype=torch.int64, device=self.A.device)
        diagonal = None if self.diagonal is None else self.diagonal.index_select(-1, index)
        return replace(self, B=self.B.index_select(-1, index), A=self.A.index_select(-2, index), diagonal=diagonal)

    def padded(self, rank: int) -> LowRank:
        """Zero columns and rows up to `rank`; the product is unchanged."""
        short = rank - self.rank
        if short <= 0:
            return self
        pad = torch.nn.functional.pad
        diagonal = None if self.diagonal is None else pad(self.diagonal, (0, short))
        return replace(self, B=pad(self.B, (0, short)), A=pad(self.A, (0, 0, 0, short)), diagonal=diagonal)

    def rescaled(self, scale: float) -> LowRank:
        """The same product written with another scale, the difference taken up by B; unchanged when equal."""
        if self.scale == scale:
            return self
        if scale == 0:
            raise ModelError("a scale of 0 cannot carry a product; give the client a positive scale")
        return replace(self, B=self.B * (self.scale / scale), scale=scale)

    def check(self, where: str, layer: Layer, rank: int | None) -> None:
        r = self.rank
        if tuple(self.B.shape) != (layer.d_out, r) or tuple(self.A.shape) != (r, layer.d_in):
            raise ModelError(
                f"{where}: B {tuple(self.B.shape)} and A {tuple(self.A.shape)} do not fit a layer of "
                f"{layer.d_out} x {layer.d_in}; expected B ({layer.d_out}, r) and A (r, {layer.d_in})"
            )
        if self.diagonal is not None and tuple(self.diagonal.shape) != (r,):
            raise ModelError(f"{where}: diagonal {tuple(self.diagonal.shape)} where ({r},) is expected")
        if rank is not None and r > rank:
            raise ModelError(f"{where}: rank {r} is above this client's rank {rank}")

    @classmethod
    def stack(cls, terms: Sequence[LowRank], rank: int) -> LowRank:
        top = max(rank, *(term.rank for term in terms))
        wide = [term.padded(top) for term in terms]
        scale = torch.tensor([float(term.scale) for term in terms], dtype=terms[0].B.dtype)
        diagonals = [term.diagonal for term in wide if term.diagonal is not None]
        return LowRank(
            torch.stack([term.B for term in wide]),
            torch.stack([term.A for term in wide]),
            scale,
            torch.stack(diagonals) if diagonals else None,
        )

    def unstack(self, index: int, like: LowRank) -> LowRank:
        r = like.rank
        diagonal = None if self.diagonal is None else self.diagonal[index, :r].clone()
        return LowRank(self.B[index, :, :r].clone(), self.A[index, :r].clone(), like.scale, diagonal)

    def _scale(self, trailing: int) -> float | Tensor:
        if isinstance(self.scale, Tensor):
            return self.scale.reshape(self.scale.shape + (1,) * trailing)
        return self.scale


@message
class Dense(Term):
    """A full matrix W (..., d_out, d_in); for the server only, never on the wire."""

    W: Tensor

    @property
    def rank(self) -> int:
        return int(min(self.W.shape[-2:]))

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {"W": self.W}

    def with_parameters(self, values: Mapping[str, Tensor]) -> Dense:
        return replace(self, **values)

    @property
    def signature(self) -> tuple[Any, ...]:
        return (Dense, tuple(self.W.shape[-2:]), self.W.dtype)

    def dense(self) -> Tensor:
        return self.W

    def apply(self, x: Tensor) -> Tensor:
        return x @ self.W.mT.to(x.dtype)

    def check(self, where: str, layer: Layer, rank: int | None) -> None:
        raise ModelError(f"{where}: a dense matrix may not travel; send low-rank factors")

    @classmethod
    def stack(cls, terms: Sequence[Dense], rank: int) -> Dense:
        return Dense(torch.stack([term.W for term in terms]))

    def unstack(self, index: int, like: Dense) -> Dense:
        return Dense(self.W[index].clone())


Adapter = dict[str, LowRank]
"""One low-rank term for each adapted layer, by layer name."""


@message
class Model:
    """Named terms on a base: `Model(lora={layer: LowRank})`; `spec` names another base than the party's own.

    Each term acts in full unless `mix` gives each input its own share of two of them. With `nearest`, the class (or
    option) of an input is that of the nearest prototype, whatever head or options' tokens say; such a model is
    evaluated, not trained.
    """

    terms: dict[str, dict[str, Term]]
    spec: str | None = None
    mix: Mix | None = None
    nearest: Prototypes | None = None

    def __init__(
        self,
        /,
        spec: str | None = None,
        mix: Mix | None = None,
        nearest: Prototypes | None = None,
        **terms: Mapping[str, Term],
    ) -> None:
        object.__setattr__(self, "terms", {name: dict(term) for name, term in terms.items()})
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "mix", mix)
        object.__setattr__(self, "nearest", nearest)
        self.__post_init__()

    def __post_init__(self) -> None:
        for name in self.terms:
            if name not in NAMES:
                raise ModelError(f"a model has no term {name!r}{nearest(name, NAMES)}")
        for name in self.mix.names if self.mix is not None else ():
            if name not in self.terms:
                raise ModelError(
                    f"the mix speaks of the term {name!r}, which this model lacks{nearest(name, self.terms)}"
                )

    def __getitem__(self, name: str) -> Any:
        return self.terms[name]

    def __contains__(self, name: str) -> bool:
        return name in self.terms

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by its full name, `term.layer.parameter`."""
        return {
            f"{name}.{layer}.{part}": value
            for name, layers in self.terms.items()
            for layer, term in layers.items()
            for part, value in term.parameters.items()
        }

    def with_parameters(self, values: Mapping[str, Tensor]) -> Model:
        """The same model with the named parameters replaced."""
        made = {
            name: {
                layer: term.with_parameters(
                    {
                        part: values[f"{name}.{layer}.{part}"]
                        for part in term.parameters
                        if f"{name}.{layer}.{part}" in values
                    }
                )
                for layer, term in layers.items()
            }
            for name, layers in self.terms.items()
        }
        return Model(spec=self.spec, mix=self.mix, nearest=self.nearest, **made)

    def only(self, name: str) -> Model:
        """The model with this term alone, in full."""
        return Model(self.spec, **{name: self.terms[name]})  # type: ignore[arg-type]  # a term's name is no field's

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be equal for two clients' models to stack."""
        return (
            self.spec,
            None if self.mix is None else self.mix.signature,
            None if self.nearest is None else self.nearest.signature,
            tuple(
                (name, layer, term.signature) for name, layers in self.terms.items() for layer, term in layers.items()
            ),
        )

    @classmethod
    def stack(cls, models: Sequence[Model], rank: int = 0) -> Model:
        """Models of equal signature along a new leading axis, ranks zero-padded."""
        first = models[0]
        made = {
            name: {
                layer: type(term).stack([model.terms[name][layer] for model in models], rank)
                for layer, term in layers.items()
            }
            for name, layers in first.terms.items()
        }
        mixes = [model.mix for model in models if model.mix is not None]
        points = [model.nearest for model in models if model.nearest is not None]
        return Model(
            spec=first.spec,
            mix=Mix.stack(mixes) if mixes else None,
            nearest=Prototypes.stack(points) if points else None,
            **made,
        )

    def unstack(self, index: int, like: Model) -> Model:
        """Client `index` of a stacked model, in the shapes that `like` had."""
        made = {
            name: {layer: term.unstack(index, like.terms[name][layer]) for layer, term in layers.items()}
            for name, layers in self.terms.items()
        }
        mix = None if self.mix is None or like.mix is None else self.mix.unstack(index, like.mix)
        points = None if self.nearest is None else self.nearest.unstack(index)
        return Model(spec=self.spec, mix=mix, nearest=points, **made)


def matching(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """The parameter names that any pattern names; a pattern that matches nothing raises ModelError."""
    found: set[str] = set()
    for pattern in patterns:
        hits = {name for name in names if fnmatchcase(name, pattern)}
        if not hits:
            raise ModelError(f"the training pattern {pattern!r} matches no parameter{nearest(pattern, names)}")
        found |= hits
    return found
