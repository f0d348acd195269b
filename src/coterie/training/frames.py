"""What the processes of a pool say to each other: pickled objects, their tensors beside them as bytes.

Between a process and the workers that it started itself, over pipes that nobody else holds: pickle is safe there, and
nothing of it is stored. A tensor arrives with the layout that it had, since the order of a sum may depend on that.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from typing import IO, Any

import torch
from torch import Tensor

_LENGTH = 8


def write_frame(pipe: IO[bytes], data: bytes) -> None:
    """One message, after its length."""
    pipe.write(len(data).to_bytes(_LENGTH, "little"))
    pipe.write(data)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes:
    """The next message; raises EOFError when the other end has closed, or closes in the middle of it."""
    length = int.from_bytes(_exactly(pipe, _LENGTH), "little")
    return _exactly(pipe, length)


def pack(tree: Any, kept: Mapping[int, int] | None = None, known: set[int] | None = None) -> bytes:
    """Any picklable object as bytes.

    kept: id -> token of tensors that the receiver keeps once it has them; known: the tokens that it has, to which those
    sent now are added. The identity of tensors within the object, and of those kept, is preserved.
    """
    body = io.BytesIO()
    writer = _Writer(body, kept or {}, set() if known is None else known)
    writer.dump(tree)
    return pickle.dumps((body.getvalue(), writer.tensors, writer.fresh, writer.modules), protocol=5)


def unpack(data: bytes, shelf: dict[int, Tensor] | None = None) -> Any:
    """The object; shelf: the tensors kept so far by token, to which new ones are added.

    Raises:
        Exception: whatever a class that cannot be found or made raises.
    """
    body, stored, fresh, modules = pickle.loads(data)
    held = {} if shelf is None else shelf
    tensors = [_tensor(*one) for one in stored]
    held.update((token, tensors[place]) for token, place in fresh.items())
    for name, file in modules.items():
        _load_module(name, file)
    return _Reader(io.BytesIO(body), tensors, held).load()


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
        raise EOFError("the other end has closed")
    return data


class _Writer(pickle.Pickler):
    """tensors: dtype, size, stride and bytes of each; fresh: token -> place of those to be kept; modules: name -> file
    of those that hold a class and that no import finds."""

    def __init__(self, file: io.BytesIO, kept: Mapping[int, int], known: set[int]) -> None:
        super().__init__(file, protocol=5)
        self.kept, self.known = kept, known
        self.tensors: list[tuple[torch.dtype, torch.Size, tuple[int, ...], bytes]] = []
        self.fresh: dict[int, int] = {}
        self.modules: dict[str, str] = {}
        self._places: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if not isinstance(obj, Tensor):
            return None
        token = self.kept.get(id(obj))
        if token is None:
            return "here", self._place(obj)
        if token not in self.known:
            self.fresh[token] = self._place(obj)
            self.known.add(token)
        return "kept", token

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            module = sys.modules.get(obj.__module__)
            file = getattr(module, "__file__", None)
            if file is not None and "." not in obj.__module__ and PathFinder.find_spec(obj.__module__) is None:
                self.modules[obj.__module__] = file
        return NotImplemented

    def _place(self, tensor: Tensor) -> int:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self.tensors)
            self._alive.append(tensor)  # lest its id be another's
            dense = tensor.detach().cpu().clone()  # of a view only what it shows, in the same order in memory
            flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
            self.tensors.append((dense.dtype, dense.size(), dense.stride(), flat.numpy().tobytes()))
        return self._places[id(tensor)]


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor], shelf: Mapping[int, Tensor]) -> None:
        super().__init__(file)
        self.tensors, self.shelf = tensors, shelf

    def persistent_load(self, pid: tuple[str, int]) -> Tensor:
        kind, number = pid
        return self.tensors[number] if kind == "here" else self.shelf[number]


def _tensor(dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], data: bytes) -> Tensor:
    made = torch.empty_strided(size, stride, dtype=dtype)
    if data:
        flat = made.as_strided((made.numel(),), (1,)).view(torch.uint8)
        flat.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return made


def _load_module(name: str, file: str) -> None:
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
