"""The shape of a message as JSON text, with its tensors and keys taken out in the order in which they occur.

None, bool, int, finite float and str stand for themselves; everything else is a list that opens with a tag:
`["l", ...]` list, `["u", ...]` tuple, `["d", key, value, ...]` dict in its own order, `["m", class, ...]`
message, `["t", i]` tensor, `["c", i]` complex tensor (stored as pairs of reals), `["k", i]` key,
`["f", text]` a float that JSON lacks. The text is `[version, classes, root]`, each class
once, with its fields: `[name, field, ...]`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie.errors import WireError
from coterie.maths.keys import Key
from coterie.protocol.messages import message_class, message_name, rebuild
from coterie.protocol.terms import Dense

VERSION = 1
INT_BITS = 4096
"""Longest whole number that may travel; Python itself refuses to read much longer ones from text."""

DEPTH = 100
"""Deepest nesting of containers, so that whatever is written can be read: reading recurses further."""

Path = tuple["Path | None", object]
"""Where a value stands: (the path of its container, its own name there); None for the message itself."""


@dataclasses.dataclass(frozen=True)
class Flat:
    """A message taken apart: structure as ASCII text, tensors as given, seeds of keys (64 bit each)."""

    text: str
    tensors: list[Tensor]
    seeds: list[int]


def flatten(message: Any, dtypes: Mapping[torch.dtype, str], dense: bool) -> Flat:
    """Takes a message apart; raises WireError with path and type for what cannot travel.

    `dtypes` holds the real dtypes that the container knows; `dense` lets `Dense` terms pass (storage only).
    """
    writer = _Writer(dtypes, dense)
    try:
        root = writer.node(message, None)
    except RecursionError:
        raise _too_deep() from None
    text = json.dumps([VERSION, writer.classes, root], separators=(",", ":"), allow_nan=False)
    return Flat(text, writer.tensors, writer.seeds)


def unflatten(text: str, tensors: Sequence[Tensor], seeds: Sequence[int]) -> Any:
    """The reverse of `flatten`: raises WireError, or ValueError, TypeError, LookupError or RecursionError."""
    version, classes, root = json.loads(text, parse_constant=_no_constant)
    if version != VERSION:
        raise WireError(f"a message of format {version!r}, not {VERSION}: use one version of coterie everywhere")
    reader = _Reader(classes, tensors, seeds)
    message = reader.node(root)
    if reader.tensors or reader.seeds:
        raise WireError("holds tensors or keys that its structure does not mention")
    return message


def unflatten_lazily(text: str, read: Callable[[int], Tensor], seeds: Sequence[int]) -> Any:
    """As `unflatten` of text written here, but every dict is `Unread`, and `read` gives a tensor by its number."""
    _, classes, root = json.loads(text)
    return _LazyReader(classes, read, seeds).node(root)


class Unread(Mapping[Any, Any]):
    """A dict of a stored message: its keys are known, its values are read when they are asked for, each time anew."""

    def __init__(self, nodes: Mapping[Any, Any], build: Callable[[Any], Any]) -> None:
        self._nodes = nodes
        self._build = build

    def __getitem__(self, key: Any) -> Any:
        return self._build(self._nodes[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def __or__(self, other: Mapping[Any, Any]) -> dict[Any, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[Any, Any]) -> dict[Any, Any]:
        return {**other, **self}


class _Writer:
    def __init__(self, dtypes: Mapping[torch.dtype, str], dense: bool) -> None:
        self.dtypes = dtypes
        self.dense = dense
        self.tensors: list[Tensor] = []
        self.seeds: list[int] = []
        self.classes: list[list[str]] = []
        self.known: dict[type, int] = {}
        self.depth = 0

    def node(self, value: Any, path: Path | None) -> Any:
        kind = type(value)
        if value is None or kind is str or kind is bool:
            return value
        if kind is int:
            if value.bit_length() > INT_BITS:
                raise _unfit(path, f"a whole number (int) of {value.bit_length()} bits; the limit is {INT_BITS}")
            return value
        if kind is float:
            return value if math.isfinite(value) else ["f", repr(value)]
        if isinstance(value, Tensor):
            return self.tensor(value, path)
        if kind is Key:
            return self.key(value, path)
        if self.depth == DEPTH:
            raise _too_deep()
        self.depth += 1
        made = self.container(value, path)
        self.depth -= 1
        return made

    def container(self, value: Any, path: Path | None) -> Any:
        kind = type(value)
        if kind is list or kind is tuple or kind is torch.Size:
            return ["l" if kind is list else "u", *(self.node(one, (path, i)) for i, one in enumerate(value))]
        if isinstance(value, Mapping):
            return self.pairs(value, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.message(value, path)
        if isinstance(value, np.generic) and type(value.item()) in (bool, int, float):
            return self.node(value.item(), path)
        raise _unfit(path, _refusal(value))

    def tensor(self, value: Tensor, path: Path | None) -> list[Any]:
        if value.layout is not torch.strided or value.device.type == "meta":
            raise _unfit(path, f"a {value.layout} Tensor on {value.device} cannot travel; make it dense")
        tag, real = ("c", value.dtype.to_real()) if value.is_complex() else ("t", value.dtype)
        if real not in self.dtypes:
            raise _unfit(path, f"a Tensor of {value.dtype} cannot travel; convert it first")
        value = value.detach()
        self.tensors.append(torch.view_as_real(value.resolve_conj()) if tag == "c" else value)
        return [tag, len(self.tensors) - 1]

    def key(self, value: Key, path: Path | None) -> list[Any]:
        if type(value.seed) is not int or not 0 <= value.seed < 1 << 64:
            raise _unfit(path, f"a Key with seed {value.seed!r} cannot travel; a seed has 64 bits, unsigned")
        self.seeds.append(value.seed)
        return ["k", len(self.seeds) - 1]

    def pairs(self, value: Mapping[Any, Any], path: Path | None) -> list[Any]:
        made: list[Any] = ["d"]
        for key, item in value.items():
            if not _may_be_key(key):
                kind = type(key).__name__
                raise _unfit((path, key), f"a dict key of type {kind} cannot travel; use str, int or tuple")
            made.append(self.node(key, (path, "key")))
            made.append(self.node(item, (path, key)))
        return made

    def message(self, value: Any, path: Path | None) -> list[Any]:
        kind = type(value)
        if kind is Dense and not self.dense:
            raise _unfit(path, "a dense matrix (Dense) may not travel; send low-rank factors")
        if kind not in self.known:
            try:
                name = message_name(kind)
            except WireError as error:
                raise _unfit(path, str(error)) from None
            self.known[kind] = len(self.classes)
            self.classes.append([name, *(field.name for field in dataclasses.fields(kind))])
        index = self.known[kind]
        _, *fields = self.classes[index]
        return ["m", index, *(self.node(getattr(value, name), (path, name)) for name in fields)]


class _Reader:
    def __init__(self, classes: Sequence[Sequence[str]], tensors: Sequence[Tensor], seeds: Sequence[int]) -> None:
        self.classes = [(message_class(name), fields) for name, *fields in classes]
        # Popped when used: each may occur once, so that no two parts of a message share storage.
        self.tensors = dict(enumerate(tensors))
        self.seeds = dict(enumerate(seeds))
        self.makers: dict[str, Callable[[list[Any]], Any]] = {
            "l": lambda items: [self.node(one) for one in items],
            "u": lambda items: tuple(self.node(one) for one in items),
            "d": self.pairs,
            "m": self.message,
            "t": lambda items: self.tensors.pop(_only(items)),
            "c": lambda items: torch.view_as_complex(self.tensors.pop(_only(items))),
            "k": lambda items: Key(self.seeds.pop(_only(items))),
            "f": lambda items: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[_only(items)],
        }

    def node(self, node: Any) -> Any:
        if type(node) is not list:
            if type(node) is dict:
                raise ValueError("a JSON object in the structure")
            return node
        tag, *items = node
        return self.makers[tag](items)

    def pairs(self, items: list[Any]) -> dict[Any, Any]:
        keys = [self.node(one) for one in items[::2]]
        made = dict(zip(keys, (self.node(one) for one in items[1::2]), strict=True))
        if len(made) != len(keys):
            raise ValueError("a dict with a key that occurs twice")
        return made

    def message(self, items: list[Any]) -> Any:
        index, *values = items
        kind, fields = self.classes[index]
        return rebuild(kind, dict(zip(fields, (self.node(one) for one in values), strict=True)))


class _LazyReader(_Reader):
    def __init__(self, classes: Sequence[Sequence[str]], read: Callable[[int], Tensor], seeds: Sequence[int]) -> None:
        super().__init__(classes, (), seeds)
        self.makers |= {
            "d": lambda items: Unread(dict(zip(map(self.node, items[::2]), items[1::2], strict=True)), self.node),
            "t": lambda items: read(_only(items)),
            "c": lambda items: torch.view_as_complex(read(_only(items))),
            "k": lambda items: Key(seeds[_only(items)]),
        }


def _may_be_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_may_be_key(part) for part in key)
    return key is None or type(key) in (str, int, bool, float, Key)


def _only(items: list[Any]) -> Any:
    (item,) = items
    return item


def _no_constant(name: str) -> Any:
    raise ValueError(f"the constant {name}")


def _unfit(path: Path | None, reason: str) -> WireError:
    pieces: list[str] = []
    while path is not None:
        path, name = path
        pieces.append(str(name))
    where = ".".join(reversed(pieces)) or "the message itself"
    return WireError(f"{where}: {reason}")


def _too_deep() -> WireError:
    return WireError(f"the message itself: it contains itself, or is nested too deep (over {DEPTH} levels)")


def _refusal(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, nn.Module):
        return f"a module ({name}) cannot travel; send its tensors"
    if isinstance(value, np.ndarray):
        return f"a numpy array ({name}) cannot travel; send torch.from_numpy of it"
    if isinstance(value, set | frozenset):
        return f"a {name} has no order and cannot travel; send a sorted list or tuple"
    if isinstance(value, ModuleType | type) or callable(value):
        return f"code ({name}) cannot travel; send the data that it needs"
    return f"{name} cannot travel; send tensors, keys, strings, numbers, lists, tuples, dicts or messages"
