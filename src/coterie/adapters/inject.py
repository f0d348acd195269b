"""Wrapper modules around the linear layers of a frozen network, which add a stack of clients' terms in one pass.

A layer may be of any make that maps (..., d_in) to (..., d_out), a quantised one too: its weights are not looked at.
A stack of S clients runs as one batch of S * b rows, client after client. Where a term acts, the batch is seen as
(S, N, d), so that one batched product serves all clients; everywhere else the network does not know of clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from coterie.adapters.frozen import is_plain, packed_of, unfuse
from coterie.adapters.packed import unpack
from coterie.adapters.places import Places
from coterie.errors import ModelError
from coterie.maths.products import by_adapted, by_few
from coterie.protocol import Bottleneck, InnerCore, LowRank, Mix, Model, Routed, Term

M = TypeVar("M", bound=nn.Module)
Dropout = Callable[[str, Tensor], Tensor]
"""(term name, input (S, N, d)) -> the input with some entries dropped, in its dtype."""


@dataclass
class Usage:
    """How much the passes inside a binding use routed experts, summed over the positions that count.

    tokens (S, N): 1 where a position of the coming pass holds a token, else 0. Of the last pass, by term and
    layer: sums (S, M) of the routing weights, and counts (S,) of the positions, which are examples where a layer sees
    those in place of tokens.
    """

    tokens: Tensor
    sums: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    counts: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def note(self, name: str, layer: str, p: Tensor) -> None:
        """Routing weights p (S, N, M) of one layer; the sum has one order whatever S is."""
        counting = self.tokens if self.tokens.shape == p.shape[:2] else self.tokens.new_ones(p.shape[:2])
        counting = counting.to(p.dtype)
        self.sums[name, layer] = (p * counting.unsqueeze(-1)).sum(dim=1)
        self.counts[name, layer] = counting.sum(dim=1)


@dataclass
class Binding:
    """What the wrappers of one network compute with during a forward pass; all of them hold the same object.

    terms: (term name, stacked term) by layer; head: stacked parameters by name, None for the network's own; kept: the
    places of each client at which the output layer computes, None for all; seen: the input of the head or output
    layer that ran last, kept while bound; mix, shares: how two terms share each input, and the share (S * b,) that
    every row of the batch has of a term by its name; usage: where routing weights are noted, None for nowhere.
    places: the positions that the pass of a network that packs computes; everywhere: whether that must be all.
    """

    size: int = 1
    terms: dict[str, list[tuple[str, Term]]] = field(default_factory=dict)
    head: Mapping[str, Tensor] | None = None
    dropout: Dropout | None = None
    kept: Sequence[Tensor] | None = None
    active: bool = False
    seen: Tensor | None = None
    mix: Mix | None = None
    shares: Mapping[str, Tensor] = field(default_factory=dict)
    usage: Usage | None = None
    places: Places | None = None
    everywhere: bool = False

    def share(self, name: str, rows: Tensor) -> Tensor | None:
        """The shares of a term at every row (S, N, d), as (S, N, 1); None where it acts in full."""
        if name not in self.shares:
            return None
        shares = self.shares[name]
        count = rows.shape[0] * rows.shape[1]
        return shares.repeat_interleave(count // len(shares)).view(rows.shape[0], -1, 1)


class AdaptedLinear(nn.Module):
    """A linear-like layer of the base, untouched, plus the terms bound to it."""

    def __init__(self, name: str, base: nn.Module, binding: Binding) -> None:
        super().__init__()
        self.name, self.base, self.binding = name, base, binding

    @property
    def weight(self) -> Tensor:
        """The base layer's own weight, for networks that look at its dtype."""
        return cast(Tensor, self.base.weight)

    @property
    def bias(self) -> Tensor | None:
        """The base layer's own bias."""
        return cast(Tensor | None, self.base.bias)

    def forward(self, x: Tensor) -> Tensor:
        binding = self.binding
        terms = binding.terms.get(self.name)
        if not terms:
            return cast(Tensor, self.base(x))
        alone = self._alone(x, terms)
        if alone is not None:
            return alone
        y = self._base(x, [term for _, term in terms if isinstance(term, InnerCore)])
        terms = [(name, term) for name, term in terms if not isinstance(term, InnerCore)]
        rows = x.reshape(binding.size, -1, x.shape[-1])
        total = y.reshape(binding.size, -1, y.shape[-1])
        for name, term in terms:
            if isinstance(term, Bottleneck):
                total = total + term.apply(total)
                continue
            seen = rows if binding.dropout is None else binding.dropout(name, rows)
            if binding.usage is not None and isinstance(term, Routed):
                made, p = term.routed(rows.to(total.dtype), seen.to(total.dtype))
                binding.usage.note(name, self.name, p)
                total = total + made
                continue
            total = _added(total, term, seen, binding.share(name, rows), rows)
        return total.reshape(y.shape)

    def _alone(self, x: Tensor, terms: Sequence[tuple[str, Term]]) -> Tensor | None:
        """The whole layer in one go, where its only term is a pair that acts in full; else None."""
        binding, (name, term) = self.binding, terms[0]
        factors = term.low_rank() if len(terms) == 1 else None
        if factors is None or binding.dropout is not None or name in binding.shares:
            return None
        if not is_plain(self.base) or x.dtype != self.weight.dtype:
            return None
        rows = x.reshape(binding.size, -1, x.shape[-1])
        A, B = factors.A.to(x.dtype), _scaled(factors, x.dtype)
        y = by_adapted(rows, self.weight, self.bias, A, B, packed_of(self.base))
        return y.view(*x.shape[:-1], y.shape[-1])

    def _base(self, x: Tensor, cores: Sequence[InnerCore]) -> Tensor:
        """What the base layer makes of x, with cores between its factors."""
        if not cores:
            return cast(Tensor, self.base(x))
        through = getattr(self.base, "through", None)  # of a factored layer
        if through is None:
            raise ModelError(f"layer {self.name} holds no factors for a core to stand between")

        def inside(z: Tensor) -> Tensor:
            rows = z.reshape(self.binding.size, -1, z.shape[-1])
            for core in cores:
                rows = core.inside(rows)
            return rows.reshape(z.shape)

        return cast(Tensor, through(x, inside))


class HeadLinear(nn.Module):
    """A linear layer of the head: computed from the bound stack of weights, in their dtype, or by the base's own."""

    def __init__(self, name: str, base: nn.Linear, binding: Binding) -> None:
        super().__init__()
        self.name, self.base, self.binding = name, base, binding

    @property
    def weight(self) -> Tensor:
        """The base layer's own weight."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        """The base layer's own bias."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        binding = self.binding
        if binding.active:
            binding.seen = x
        if binding.head is None:
            return cast(Tensor, self.base(x))
        weight, bias = binding.head[f"{self.name}.weight"], binding.head.get(f"{self.name}.bias")
        rows = x.reshape(binding.size, -1, x.shape[-1]).to(weight.dtype)
        y = rows @ weight.mT
        if bias is not None:
            y = y + bias.unsqueeze(-2)
        return y.reshape(*x.shape[:-1], weight.shape[-2])


class OutputLayer(nn.Module):
    """The output layer of a language model, untouched, computed only at the places that are kept.

    Each client has a product of its own: then its bits do not depend on its company, and it is large enough alone.
    """

    def __init__(self, base: nn.Module, binding: Binding) -> None:
        super().__init__()
        self.base, self.binding = base, binding

    @property
    def weight(self) -> Tensor:
        """The base layer's own weight."""
        return cast(Tensor, self.base.weight)

    @property
    def bias(self) -> Tensor | None:
        """The base layer's own bias."""
        return cast(Tensor | None, self.base.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(S * b, L, d) -> (m, V), the kept places of all clients one after another; (S * b, L, V) without any."""
        binding = self.binding
        if binding.kept is None:
            return cast(Tensor, self.base(x))
        rows = x.reshape(binding.size, -1, x.shape[-1])
        seen = [client[places] for client, places in zip(rows, binding.kept, strict=True)]
        binding.seen = _joined(seen)
        return _joined([self.base(part) for part in seen])


@dataclass(frozen=True)
class Slots:
    """The places of a network where terms and heads go, by the layers' names, in network order.

    output: the output layer of a language model, None for other networks.
    """

    layers: dict[str, AdaptedLinear]
    heads: dict[str, HeadLinear]
    output: OutputLayer | None
    binding: Binding

    @contextmanager
    def bound(
        self, size: int, model: Model | None, head: Mapping[str, Tensor] | None, dropout: Dropout | None = None
    ) -> Iterator[Binding]:
        """For forward passes inside: a stacked model (terms with leading axis `size`), a stacked head, dropout.

        head: parameter name -> (size, ...); None leaves the network's own head.

        Raises:
            ModelError: the model has a term for a layer, or the head a parameter, that this network lacks.
        """
        terms: dict[str, list[tuple[str, Term]]] = {}
        for name, layers in {} if model is None else model.terms.items():
            for layer, term in layers.items():
                terms.setdefault(layer, []).append((name, term))
        unknown = sorted(set(terms) - set(self.layers))
        if unknown:
            raise ModelError(f"the model has a term for {unknown[0]!r}, which is no adapted layer of this base")
        if head is not None and set(head) != self.head_names:
            odd = sorted(set(head) ^ self.head_names)
            raise ModelError(f"the head does not fit this base: {odd[0]!r} is on one side only")
        binding = self.binding
        binding.size, binding.terms, binding.head, binding.dropout = size, terms, head, dropout
        binding.active, binding.mix = True, None if model is None else model.mix
        try:
            yield binding
        finally:
            binding.size, binding.terms, binding.head, binding.dropout = 1, {}, None, None
            binding.active, binding.seen, binding.mix, binding.shares = False, None, None, {}
            binding.usage, binding.places = None, None

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """For forward passes inside: all blocks compute all positions, padding too, and hand on states (b, L, d)."""
        before, self.binding.everywhere = self.binding.everywhere, True
        try:
            yield
        finally:
            self.binding.everywhere = before

    @contextmanager
    def keeping(self, places: Sequence[Tensor] | None) -> Iterator[None]:
        """For forward passes inside: logits (m, V) only at the places of each client, in a row; None: everywhere.

        places: (mᵢ,) int64 for each client of the stack, into its own batch seen as (b * L,).
        """
        self.binding.kept = places
        try:
            yield
        finally:
            self.binding.kept = None

    @cached_property
    def head_names(self) -> set[str]:
        """The names of all head parameters."""
        weights = {f"{layer}.weight" for layer in self.heads}
        return weights | {f"{layer}.bias" for layer, place in self.heads.items() if place.bias is not None}


def inject(network: nn.Module, layers: Iterable[str], head: Iterable[str], output: str | None = None) -> Slots:
    """Put wrappers in the place of the named modules: `layers` (linear-like), `head` (nn.Linear) and `output`.

    Raises:
        ModelError: a head module that is no nn.Linear.
    """
    binding = Binding()
    last = None if output is None else OutputLayer(network.get_submodule(output), binding)
    slots = Slots({}, {}, last, binding)
    if output is not None and last is not None:
        _replace(network, output, last)
    for name in layers:
        wrapper = AdaptedLinear(name, network.get_submodule(name), binding)
        slots.layers[name] = _replace(network, name, wrapper)
    for name in head:
        module = network.get_submodule(name)
        if not isinstance(module, nn.Linear):
            raise ModelError(f"head layer {name} is a {type(module).__name__}; only nn.Linear heads can be trained")
        slots.heads[name] = _replace(network, name, HeadLinear(name, module, binding))
    return slots


def eject(network: nn.Module) -> None:
    """Put the original modules back, the very objects that `inject` replaced; they compute all positions again."""
    unpack(network)
    unfuse(network)
    for name, module in list(network.named_modules()):
        if isinstance(module, AdaptedLinear | HeadLinear | OutputLayer):
            _replace(network, name, module.base)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _replace(network: nn.Module, name: str, module: M) -> M:
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, module)
    return module


def _added(total: Tensor, term: Term, x: Tensor, share: Tensor | None = None, whole: Tensor | None = None) -> Tensor:
    """total + what the term makes of x, or the share of it; of low-rank factors, as part of their second product.

    x: what dropout left of the layer's input; whole: that input, where it is another.
    """
    x = x.to(total.dtype)
    factors = term.low_rank() if share is None else None
    if factors is None:
        made = term.apply_dropped(x if whole is None else whole.to(total.dtype), x)
        return total + (made if share is None else share.to(total.dtype) * made)
    return torch.baddbmm(total, by_few(x, factors.A.to(x.dtype)), _scaled(factors, x.dtype).mT)


def _scaled(factors: LowRank, dtype: torch.dtype) -> Tensor:
    """s B (S, d_out, r), in this dtype."""
    scale = factors.scale.reshape(-1, 1, 1) if isinstance(factors.scale, Tensor) else factors.scale
    return (factors.left * scale).to(dtype)
