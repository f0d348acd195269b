"""Messages to bytes and back: safetensors with the structure as JSON in its metadata, never pickle.

Tensors are named by their place in the message ("0", "1", ...); keys are one int64 tensor, "keys", of 8 bytes
each. Reading builds only tensors, plain values and classes declared with `@message`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import TensorSpec, deserialize, serialize
from torch import Tensor

from coterie.errors import WireError
from coterie.wire.structure import flatten, unflatten, unflatten_lazily

FIELD = "coterie"
HEADER_LIMIT = 100_000_000
"""What safetensors reads at most as a header, bytes."""

CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""The real dtypes that travel, with their names in the container; complex ones travel as pairs of reals."""

_DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Size:
    """Bytes of a message: tensors and keys (8 each) are `payload`, everything else is `overhead`."""

    payload: int
    overhead: int

    @property
    def total(self) -> int:
        """All bytes, the length of the encoded message."""
        return self.payload + self.overhead

    def __add__(self, other: Size) -> Size:
        return Size(self.payload + other.payload, self.overhead + other.overhead)


class _Parts(NamedTuple):
    """What goes into the container: structure text, and tensors by name."""

    text: str
    tensors: dict[str, Tensor]


def encode(message: Any, *, dense: bool = False) -> bytes:
    """The bytes of a message; equal messages (dict order included) give equal bytes.

    Tensors may be of any device, stride and storage, with or without gradient. `dense` is for what the server
    stores and never sends: it lets `Dense` terms pass. Raises WireError with path and type otherwise.
    """
    text, tensors = _parts(message, dense)
    plain = {name: _plain(tensor) for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in plain.items()
    }
    # `plain` keeps the memory behind the pointers alive until the bytes are written.
    data = bytes(serialize(specs, {FIELD: text}))
    header = int.from_bytes(data[:8], "little")
    if header > HEADER_LIMIT:
        raise WireError(f"a message with {header} bytes of structure (limit {HEADER_LIMIT}): send numbers as tensors")
    return data


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The message in these bytes, its tensors on the CPU, each with storage of its own.

    Raises WireError, in one line, for bytes that are truncated, corrupted, foreign or of an unknown class;
    damage that leaves a well-formed message is not noticed here. Executes nothing but `__post_init__` of
    message classes.
    """
    raw = bytes(data)
    try:
        stored = dict(deserialize(raw))  # type: ignore[no-untyped-call]
        length = int.from_bytes(raw[:8], "little")
        metadata = json.loads(raw[8 : 8 + length]).get("__metadata__") or {}
        if FIELD not in metadata:
            raise WireError("the bytes are a safetensors file, but not a coterie message")
        seeds = _seeds(stored.pop("keys")) if "keys" in stored else []
        tensors = [_tensor(stored.pop(str(index))) for index in range(len(stored))]
        return unflatten(metadata[FIELD], tensors, seeds)
    except WireError:
        raise
    except Exception as error:  # whatever a reader trips over, the bytes are at fault
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise WireError(
            f"{len(raw)} bytes that are not a coterie message ({type(error).__name__}: {reason})"
        ) from error


def opened(path: Path) -> Any:
    """The message in a file of `encode`'s bytes, of which so far only the structure is read; see `Unread`.

    The file has to stay until all is read that is wanted. Tensors are those of `decode`, to the bit and in their
    alignment; those that stand in no dict are read at once. Raises WireError for a file that cannot be read or is cut.
    """
    header = json.loads(_read(path, 8, length := int.from_bytes(_read(path, 0, 8), "little")))
    text = header.pop("__metadata__")[FIELD]
    # As tuples they take a third of the memory, which all uploads of a round need at one time.
    places = {name: (one["dtype"], tuple(one["shape"]), *one["data_offsets"]) for name, one in header.items()}

    def stored(name: str) -> dict[str, Any]:
        dtype, shape, start, end = places[name]
        return {"dtype": dtype, "shape": shape, "data": _read(path, 8 + length + start, end - start)}

    seeds = _seeds(stored("keys")) if "keys" in places else []
    return unflatten_lazily(text, lambda index: _tensor(stored(str(index))), seeds)


def size(message: Any, *, dense: bool = False) -> Size:
    """Exactly the bytes that `encode` would write, without copying a tensor; raises WireError as it does."""
    text, tensors = _parts(message, dense)
    header = len('{"__metadata__":{"":""}}') + len(FIELD) + len(text) + text.count('"') + text.count("\\")
    offset = 0
    for name in sorted(tensors, key=lambda name: (_order()[tensors[name].dtype], name)):
        tensor = tensors[name]
        end = offset + prod(tensor.shape) * tensor.itemsize
        shape = ",".join(map(str, tensor.shape))
        entry = f',"{name}":{{"dtype":"{CODES[tensor.dtype]}","shape":[{shape}],"data_offsets":[{offset},{end}]}}'
        header += len(entry)
        offset = end
    padded = (header + 7) // 8 * 8
    return Size(payload=offset, overhead=8 + padded)


def digest(message: Any, *, dense: bool = False) -> str:
    """A name for the content of a message: sha256 of its bytes, hex; `dense` as in `encode`."""
    return hashlib.sha256(encode(message, dense=dense)).hexdigest()


def _parts(message: Any, dense: bool) -> _Parts:
    flat = flatten(message, CODES, dense)
    tensors = {str(index): tensor for index, tensor in enumerate(flat.tensors)}
    if flat.seeds:
        signed = [seed - (1 << 64) if seed >> 63 else seed for seed in flat.seeds]
        tensors["keys"] = torch.tensor(signed, dtype=torch.int64)
    return _Parts(flat.text, tensors)


def _plain(tensor: Tensor) -> Tensor:
    """The same values on the CPU, row by row in memory."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.cpu().contiguous()


def _tensor(stored: dict[str, Any]) -> Tensor:
    dtype, shape, data = _DTYPES[stored["dtype"]], stored["shape"], stored["data"]
    if not data:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool:  # any byte may arrive, only 0 and 1 are truth values
        return (torch.frombuffer(data, dtype=torch.uint8) != 0).reshape(shape)
    # A copy lies as torch aligns its own: sums over tensors aligned otherwise may differ in their last bits.
    return torch.frombuffer(data, dtype=dtype).reshape(shape).clone()


def _read(path: Path, start: int, length: int) -> bytearray:
    data = bytearray(length)
    try:
        with path.open("rb") as file:
            file.seek(start)
            found = file.readinto(data)
    except OSError as error:
        raise WireError(f"{path}: cannot be read ({error.strerror}); nothing else may touch a run's folder") from error
    if found < length:
        raise WireError(f"{path}: is cut short; nothing else may touch a run's folder")
    return data


def _seeds(stored: dict[str, Any]) -> list[int]:
    signed = _tensor(stored)
    if signed.dtype != torch.int64 or signed.dim() != 1:
        raise ValueError(f"keys of {signed.dtype} and shape {tuple(signed.shape)}")
    return [seed % (1 << 64) for seed in signed.tolist()]


@cache
def _order() -> dict[torch.dtype, int]:
    """The order in which the container lays out dtypes, learnt from the library; names decide ties."""
    specs = {
        code: TensorSpec(dtype=str(dtype).removeprefix("torch."), shape=[0], data_ptr=0, data_len=0)
        for dtype, code in CODES.items()
    }
    data = bytes(serialize(specs))
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {_DTYPES[code]: place for place, code in enumerate(header)}
