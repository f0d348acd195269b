"""Activations kept example by example: in memory up to a budget, and on disk up to another, where other runs find them.

What is kept is a cache: losing any of it costs time and changes no result. On disk it lies in shards that arrive whole,
by a rename, in one folder for each kind of activations; where a new shard finds no room, the kinds that were not used
for longest make it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SHARD = 1 << 24
"""Bytes that wait in memory before they are written."""

_LOCK_SECONDS = 60.0
_Name = tuple[str, bytes]


@dataclass(frozen=True)
class _Span:
    """Rows of a shard's states."""

    states: Tensor
    start: int
    stop: int


class LowerStore:
    """States (T, d) of any dtype, on the CPU, by the kind that they are of and a key of 16 bytes for the example.

    memory, disk: bytes. What is in memory goes to disk as well. At most `SHARD` bytes more wait to be written. A disk
    that is full or cannot be written, and a shard that is damaged, are as if they were not there.
    """

    def __init__(self, folder: Path, memory: int, disk: int) -> None:
        self.folder, self.memory, self.disk = folder, memory, disk
        self._held: dict[_Name, Tensor] = {}
        self._held_bytes = 0
        self._waiting: dict[_Name, Tensor] = {}
        self._waiting_bytes = 0
        self._spans: dict[_Name, _Span] = {}
        self._opened: dict[str, set[str]] = {}
        self._changed: dict[str, int] = {}
        self._full = disk <= 0

    def get(self, kind: str, key: bytes) -> Tensor | None:
        """The states, which are not to be changed; None where they are not known."""
        name = (kind, key)
        states = self._held.get(name, self._waiting.get(name))
        if states is not None:
            return states
        if name not in self._spans and self.disk > 0:
            self._look_again(kind)
        span = self._spans.get(name)
        return None if span is None else span.states[span.start : span.stop]

    def put(self, kind: str, key: bytes, states: Tensor) -> None:
        """Keep states where there is room for them."""
        size = states.nbytes
        if self._held_bytes + size <= self.memory:
            self._held[kind, key] = states
            self._held_bytes += size
        if not self._full:
            self._waiting[kind, key] = states
            self._waiting_bytes += size
            self.flush(SHARD)

    def flush(self, at_least: int = 1) -> None:
        """Write what waits, if it is so many bytes."""
        if self._waiting_bytes < at_least:
            return
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        for kind in dict.fromkeys(kind for kind, _ in waiting):
            self._write(kind, {key: states for (own, key), states in waiting.items() if own == kind})

    def _write(self, kind: str, parts: dict[bytes, Tensor]) -> None:
        tensors = {
            "keys": torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).view(len(parts), -1),
            "stops": torch.tensor([len(states) for states in parts.values()]).cumsum(0),
            "states": torch.cat(list(parts.values())),
        }
        checksum = _checksum(tensors)
        try:
            (self.folder / kind).mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self.folder / ".lock", timeout=_LOCK_SECONDS):
                descriptor, name = tempfile.mkstemp(prefix=".tmp-", dir=self.folder / kind)
                os.close(descriptor)
                try:
                    save_file(tensors, name, metadata={"checksum": checksum})
                    if not self._make_room(Path(name).stat().st_size, kind):
                        self._full = True
                        return
                    os.replace(name, self.folder / kind / f"{checksum}.safetensors")
                finally:
                    Path(name).unlink(missing_ok=True)
        except (OSError, SafetensorError, filelock.Timeout):
            self._full = True
            return
        self._opened.setdefault(kind, set()).add(f"{checksum}.safetensors")
        self._index(kind, self.folder / kind / f"{checksum}.safetensors")

    def _make_room(self, size: int, kind: str) -> bool:
        """Whether there is room for so many bytes, after kinds that this store does not use have gone."""
        sizes: dict[str, int] = {}
        for place in self.folder.glob("*/*.safetensors"):
            sizes[place.parent.name] = sizes.get(place.parent.name, 0) + place.stat().st_size
        others = [other for other in sizes if other != kind and other not in self._opened]
        others.sort(key=lambda other: (self.folder / other).stat().st_mtime_ns, reverse=True)
        while sum(sizes.values()) + size > self.disk and others:
            oldest = others.pop()
            for place in (self.folder / oldest).iterdir():
                place.unlink(missing_ok=True)
            (self.folder / oldest).rmdir()
            del sizes[oldest]
        return sum(sizes.values()) + size <= self.disk

    def _look_again(self, kind: str) -> None:
        """Open the shards of this kind that have come since."""
        folder = self.folder / kind
        with suppress(OSError):
            if kind not in self._changed:
                os.utime(folder)  # it is in use
            changed = folder.stat().st_mtime_ns
            if self._changed.get(kind) == changed:
                return
            self._changed[kind] = changed
            opened = self._opened.setdefault(kind, set())
            for place in sorted(folder.glob("*.safetensors")):
                if place.name not in opened:
                    opened.add(place.name)
                    self._index(kind, place)

    def _index(self, kind: str, place: Path) -> None:
        tensors = _read(place)
        if tensors is None:
            return
        start = 0
        for key, stop in zip(tensors["keys"].numpy(), tensors["stops"].tolist(), strict=True):
            self._spans[kind, key.tobytes()] = _Span(tensors["states"], start, stop)
            start = stop


def _read(place: Path) -> dict[str, Tensor] | None:
    """The tensors of a shard, mapped from its file; None where it is gone or cannot be trusted."""
    try:
        with safe_open(place, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in ("keys", "stops", "states")}
            checksum = (file.metadata() or {}).get("checksum")
    except (OSError, SafetensorError):
        return None
    return tensors if checksum == _checksum(tensors) else None


def _checksum(tensors: dict[str, Tensor]) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for name, value in sorted(tensors.items()):
        hashed.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        hashed.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
