"""What travels: frozen dataclasses of tensors, strings, numbers, lists and dicts; never callables or modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import torch
from torch import Tensor

from coterie.errors import WireError
from coterie.maths.keys import Key

if TYPE_CHECKING:
    from coterie.protocol.parties import Card
    from coterie.protocol.penalties import Penalty
    from coterie.protocol.terms import Model

T = TypeVar("T")
BLOCK = 2**17
"""Entries that `weighted_sum` casts to fp64 at a time: they then stay in a core's cache until they are added."""

_classes: dict[str, type] = {}
_known_fields: dict[type, tuple[str, ...] | None] = {}


@dataclass_transform(frozen_default=True)
def message(cls: type[T]) -> type[T]:
    """A frozen dataclass that may travel and be stored; only classes so declared are ever rebuilt from bytes."""
    made = dataclass(frozen=True, eq=False)(cls)
    name = f"{cls.__module__}:{cls.__qualname__}"
    _classes[name] = made
    return made


def message_name(cls: type) -> str:
    """The name under which a message class is written; raises WireError for a class that is not one."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _classes.get(name) is not cls:
        raise WireError(f"{cls.__qualname__} cannot travel: declare it with @message")
    return name


def message_class(name: str) -> type:
    """The class of that name; raises WireError when no such message class is known here."""
    if name not in _classes:
        raise WireError(f"unknown message class {name!r}: import the module that defines the method first")
    return _classes[name]


def rebuild(cls: type[T], fields: Mapping[str, Any]) -> T:
    """A message from its field values, past a custom __init__ but through __post_init__."""
    known = set(_field_names(cls) or ())
    if set(fields) != known:
        raise WireError(f"{cls.__name__}: fields {sorted(fields)} where {sorted(known)} are expected")
    return _made(cls, fields)


def map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same message with every tensor replaced."""
    return map_leaves(tree, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The same message with every leaf (whatever is no container) replaced."""
    return _walk(tree, (), function)


def map_nodes(tree: Any, kind: type[T], function: Callable[[T], Any]) -> Any:
    """The same message with every part that is of this message class replaced."""
    return _walk(tree, (kind,), function)


def _walk(tree: Any, stop: tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    kind = type(tree)
    if stop and isinstance(tree, stop):
        return function(tree)
    if kind is Tensor or kind is Key:  # by far the most frequent leaves
        return tree if stop else function(tree)
    names = _field_names(kind)
    if names is not None:
        return _made(kind, {name: _walk(getattr(tree, name), stop, function) for name in names})
    if isinstance(tree, Mapping):
        return {key: _walk(value, stop, function) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_walk(value, stop, function) for value in tree)
    if isinstance(tree, list):
        return [_walk(value, stop, function) for value in tree]
    return tree if stop else function(tree)


def _field_names(kind: type) -> tuple[str, ...] | None:
    """The field names of a dataclass, None for other types; a Key is a leaf."""
    if kind not in _known_fields:
        compound = dataclasses.is_dataclass(kind) and not issubclass(kind, Key)
        _known_fields[kind] = tuple(field.name for field in dataclasses.fields(kind)) if compound else None
    return _known_fields[kind]


def _made(cls: type[T], fields: Mapping[str, Any]) -> T:
    """An instance with these field values, past a custom __init__ but through __post_init__."""
    made = cls.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    post = getattr(made, "__post_init__", None)
    if post is not None:
        post()
    return made


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted path."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not isinstance(tree, Key):
        for f in dataclasses.fields(tree):
            yield from leaves(getattr(tree, f.name), f"{path}.{f.name}" if path else f.name)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}.{index}" if path else str(index))
    else:
        yield path, tree


def copied(tree: T) -> T:
    """A message that shares no storage with the original and carries no gradient, laid out as if read from bytes.

    Layout matters: the same numbers in another alignment or stride may be summed in another order.
    """
    made: T = map_tensors(tree, lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format))
    return made


@message
class Once:
    """In a download: sent only to a client that does not hold this content, booked as set-up, unwrapped on arrival."""

    value: Any


@message
class Held:
    """Where a Once stood in a download: the hash of content that the client holds by now."""

    content: str


@dataclass(frozen=True)
class Upload:
    """What a client returns. `diagnostics` never leave the process: they reach `measures` in simulation alone.

    `head_group`: the group that this client chose among its `Algorithm.head_choices`. It travels with the payload. The
    head that it trained goes into that group's mean, and it uses that group's head until it chooses again.
    """

    payload: Any
    diagnostics: Any = None
    head_group: str | None = None


@dataclass(frozen=True)
class Seen:
    """What simulation knows of a client that answered: weight, diagnostics, its last Fit's model, penalties on that."""

    weight: float
    model: Model | None
    diagnostics: Any
    penalties: tuple[Penalty, ...] = ()


@dataclass(frozen=True)
class Uploaded:
    """One accepted upload with the weight that the experiment's policy gives it; weights sum to one.

    head_group: the group that the client chose with it; None where it chose none.
    """

    card: Card
    payload: Any
    weight: float
    head_group: str | None = None


class Uploads:
    """The uploads of those who answered, in id order."""

    def __init__(self, entries: Mapping[str, tuple[Card, Any, float]] | list[Uploaded]) -> None:
        if isinstance(entries, list):
            listed = entries
        else:
            listed = [Uploaded(card, payload, weight) for card, payload, weight in entries.values()]
        total = sum(entry.weight for entry in listed)
        if any(entry.weight < 0 for entry in listed) or (listed and total <= 0):
            raise ValueError(f"weights must be non-negative with a positive sum, not {[e.weight for e in listed]}")
        ordered = sorted(listed, key=lambda entry: entry.card.id)
        self.entries = tuple(dataclasses.replace(entry, weight=entry.weight / total) for entry in ordered)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Uploaded]:
        return iter(self.entries)

    def items(self) -> Iterator[tuple[Card, Any, float]]:
        """(card, payload, weight) in id order."""
        return ((entry.card, entry.payload, entry.weight) for entry in self.entries)

    def mean(self, pick: Callable[[Any], Any] = lambda payload: payload) -> Any:
        """The weighted mean of a tensor, or of dicts of tensors key by key; summed in fp64, cast back.

        A key that only some have, as layers may be, is averaged over those, with weights renormalised over them.
        """
        values = [(entry.weight, pick(entry.payload)) for entry in self.entries]
        if not isinstance(values[0][1], Mapping):
            return weighted_sum(values)
        made = {}
        for key in dict.fromkeys(key for _, value in values for key in value):
            held = [(weight, value[key]) for weight, value in values if key in value]
            total = sum(weight for weight, _ in held) if len(held) < len(values) else 1.0
            if total > 0:
                made[key] = weighted_sum([(weight / total, one) for weight, one in held])
        return made

    def where(self, test: Callable[[Uploaded], bool]) -> Uploads:
        """Those that pass the test, with renormalised weights."""
        kept = [entry for entry in self.entries if test(entry)]
        return self if len(kept) == len(self.entries) else Uploads(kept)

    def each(self, pick: Callable[[Any], Any]) -> Uploads:
        """The same uploads with a part of each payload, or what is made of it, in its place."""
        return Uploads([dataclasses.replace(entry, payload=pick(entry.payload)) for entry in self.entries])

    def uniform(self) -> Uploads:
        """The same uploads, equally weighted."""
        return Uploads([dataclasses.replace(entry, weight=1.0) for entry in self.entries])


def weighted_sum(values: list[tuple[float, Any]], dtype: torch.dtype | None = None) -> Any:
    """sum w_i x_i of tensors, or of dicts of tensors with equal keys.

    Accumulated in fp64; in the dtype of the first one, or in `dtype`.
    """
    first = values[0][1]
    if isinstance(first, Mapping):
        return {key: weighted_sum([(weight, value[key]) for weight, value in values], dtype) for key in first}
    weights = torch.tensor([weight for weight, _ in values], dtype=torch.float64, device=first.device)
    whole = [value for _, value in values]
    width = max(1, BLOCK // 4)
    if first.numel() <= width:
        total = _combined(whole, weights)
    else:
        split = [torch.split(value.reshape(-1), width) for value in whole]
        total = torch.cat([_combined(list(pieces), weights) for pieces in zip(*split, strict=True)])
    return total.view(first.shape).to(dtype or first.dtype)


def _combined(pieces: list[Tensor], weights: Tensor) -> Tensor:
    """sum w_i x_i, flat, in fp64: some x_i at a time are gathered, cast and added while they are in cache."""
    width = pieces[0].numel()
    height = min(len(pieces), max(1, BLOCK // max(1, width)))
    total, block = weights.new_zeros(width), weights.new_empty(height, width)
    for top, some in zip(range(0, len(pieces), height), torch.split(weights, height), strict=True):
        rows = block[: some.numel()]
        rows.copy_(torch.stack(pieces[top : top + height]).view(rows.shape))
        total.addmv_(rows.mT, some)
    return total
