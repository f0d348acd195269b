"""Base models that several processes hold in one piece of memory.

The weights lie in one file that every process maps privately: pages are shared until a process patches a layer, which
then has pages of its own. A tensor keeps its layout and its place relative to the processor's vectors, so that every
process computes the very same bits. The rest of a base, small, is pickled for processes that this one starts itself.
"""

from __future__ import annotations

import importlib
import mmap
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from coterie.models.loading import Base

ALIGN = 64
"""Bytes of the widest vector that a processor loads: where in one a tensor begins may decide the order of sums."""

_WEIGHTS, _BASES = "weights.bin", "bases.pickle"
_MEMORY = Path("/dev/shm")
_CAPTURING = "transformers.utils.output_capturing"


@dataclass(frozen=True)
class _Place:
    """Where in the file a tensor lies."""

    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


def share(bases: Mapping[str, Base]) -> TemporaryDirectory[str]:
    """Writes the bases, tokenisers apart, for `opened`; this process' own weights become a view of the same file.

    In memory where the system offers a file system there with room for it, else in the folder for temporary files.
    Gives the folder, which goes when it is closed.
    """
    size = sum(value.nbytes + ALIGN for base in bases.values() for value in base.network.state_dict().values())
    room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * size
    folder = TemporaryDirectory(prefix="coterie-pool-", dir=_MEMORY if room else None, ignore_cleanup_errors=True)
    place = Path(folder.name)
    for base in bases.values():
        _forget_capturing(base.network)
    with (place / _BASES).open("wb") as file, (place / _WEIGHTS).open("wb") as weights:
        writer = _Writer(file, weights)
        writer.dump({name: replace(base, tokenizer=None) for name, base in bases.items()})
        weights.write(b"\0")  # an empty file cannot be mapped
    mapped = _mapped(place)
    for base in bases.values():
        for tensor in (*base.network.parameters(), *base.network.buffers()):
            found = writer.places.get(_named(tensor.data))
            if found is not None:
                tensor.data = _view(mapped, found)
    return folder


def opened(folder: Path) -> dict[str, Base]:
    """The bases that `share` wrote, without tokenisers."""
    with (folder / _BASES).open("rb") as file:
        bases: dict[str, Base] = _Reader(file, _mapped(folder)).load()
    for base in bases.values():
        _allow_capturing(base.network)
    return bases


def _forget_capturing(network: nn.Module) -> None:
    """Take off the hooks by which transformers notes hidden states: no pickle takes them, and it puts them on again."""
    for module in network.modules():
        for number, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__module__", None) == _CAPTURING:
                del module._forward_hooks[number]
        vars(module).pop("_output_capturing_hooks_installed", None)


def _allow_capturing(network: nn.Module) -> None:
    """Note which of their hidden states networks of transformers may be asked for, as it does where one is made."""
    try:
        registry = importlib.import_module(_CAPTURING)._CAN_RECORD_REGISTRY
    except (ImportError, AttributeError):  # of another version of transformers, which may not need it
        return
    classes = {type(module) for module in network.modules() if hasattr(module, "_can_record_outputs")}
    dict.update(registry, {str(kind): kind._can_record_outputs for kind in classes})  # type: ignore[attr-defined]


class _Writer(pickle.Pickler):
    def __init__(self, file: BinaryIO, weights: BinaryIO) -> None:
        super().__init__(file, protocol=5)
        self.weights = weights
        self.places: dict[tuple[Any, ...], _Place] = {}
        self._alive: list[Tensor] = []

    def persistent_id(self, obj: Any) -> _Place | None:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.device.type != "cpu":
            return None
        name = _named(obj)
        if name not in self.places:
            # A tensor that is some view of another's memory is stored with whatever lies between its elements.
            extent = 1 + sum((n - 1) * step for n, step in zip(obj.size(), obj.stride(), strict=True))
            count = extent if obj.numel() else 0
            gap = (obj.data_ptr() - self.weights.tell()) % ALIGN
            self.weights.write(b"\0" * gap)
            self.places[name] = _Place(self.weights.tell(), obj.dtype, tuple(obj.size()), obj.stride())
            self.weights.write(obj.detach().as_strided((count,), (1,)).view(torch.uint8).numpy().data)
            self._alive.append(obj)  # lest its memory be another's
        return self.places[name]


class _Reader(pickle.Unpickler):
    def __init__(self, file: BinaryIO, mapped: mmap.mmap) -> None:
        super().__init__(file)
        self.mapped = mapped

    def persistent_load(self, pid: _Place) -> Tensor:
        return _view(self.mapped, pid)


def _mapped(folder: Path) -> mmap.mmap:
    with (folder / _WEIGHTS).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _view(mapped: mmap.mmap, place: _Place) -> Tensor:
    if 0 in place.size:
        return torch.empty_strided(place.size, place.stride, dtype=place.dtype)
    extent = 1 + sum((n - 1) * step for n, step in zip(place.size, place.stride, strict=True))
    flat = torch.frombuffer(mapped, dtype=place.dtype, count=extent, offset=place.offset)
    return flat.as_strided(place.size, place.stride)


def _named(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.size()), tensor.stride()
