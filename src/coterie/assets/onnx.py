"""What a network in the ONNX format holds: its weights and how it multiplies by them; no library is needed for that.

The format is that of Protocol Buffers (onnx/onnx.proto): fields of a number, a wire type and a value, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_GRAPH, _NODE, _INITIALIZER = 7, 1, 5  # ModelProto.graph; GraphProto.node and .initializer
_INPUT, _OUTPUT, _OP = 1, 2, 4  # NodeProto
_DIMS, _DTYPE, _FLOATS, _NAME, _RAW = 1, 2, 4, 8, 9  # TensorProto
_FLOAT = 1  # TensorProto.DataType


@dataclass(frozen=True)
class Node:
    """One operation, and the names of the values that it takes and gives."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def read_graph(content: bytes) -> tuple[list[Node], dict[str, np.ndarray]]:
    """The operations in their order, and the float32 weights by name, which are views of `content`.

    Raises:
        ValueError: bytes that are no such file.
    """
    nodes: list[Node] = []
    weights: dict[str, np.ndarray] = {}
    for number, graph in _fields(memoryview(content)):
        if number != _GRAPH or not isinstance(graph, memoryview):
            continue
        for part, value in _fields(graph):
            if part == _NODE and isinstance(value, memoryview):
                nodes.append(_node(value))
            elif part == _INITIALIZER and isinstance(value, memoryview):
                weights |= _weight(value)
    if not nodes:
        raise ValueError("no graph of operations")
    return nodes, weights


def _node(content: memoryview) -> Node:
    found: dict[int, list[str]] = {_INPUT: [], _OUTPUT: [], _OP: []}
    for number, value in _fields(content):
        if number in found and isinstance(value, memoryview):
            found[number].append(bytes(value).decode())
    return Node("".join(found[_OP]), tuple(found[_INPUT]), tuple(found[_OUTPUT]))


def _weight(content: memoryview) -> dict[str, np.ndarray]:
    """The tensor by its name; nothing of another type than float32."""
    dims: list[int] = []
    name, dtype, raw = "", 0, memoryview(b"")
    for number, value in _fields(content):
        if isinstance(value, int):
            if number == _DIMS:
                dims.append(value)
            elif number == _DTYPE:
                dtype = value
        elif number == _DIMS:
            dims += _varints(value)
        elif number == _NAME:
            name = bytes(value).decode()
        elif number in (_RAW, _FLOATS):
            raw = value
    if dtype != _FLOAT:
        return {}
    if len(raw) != 4 * math.prod(dims):
        raise ValueError(f"{name} has {len(raw)} bytes for the shape {dims}")
    return {name: np.frombuffer(raw, "<f4").reshape(dims)}


def _fields(content: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Each field's number, and its value: a whole number, or bytes."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        number, kind = key >> 3, key & 7
        if kind == 0:
            whole, place = _varint(content, place)
            yield number, whole
            continue
        size, start = _varint(content, place) if kind == 2 else ({1: 8, 5: 4}.get(kind, 0), place)
        place = start + size
        if kind not in (1, 2, 5) or place > len(content):
            raise ValueError("not the wire format of Protocol Buffers")
        held = content[start:place]
        yield number, held if kind == 2 else int.from_bytes(held, "little")


def _varints(content: memoryview) -> list[int]:
    found, place = [], 0
    while place < len(content):
        value, place = _varint(content, place)
        found.append(value)
    return found


def _varint(content: memoryview, place: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and the place behind it."""
    value = shift = 0
    while place < len(content) and shift < 64:
        byte = content[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
    raise ValueError("a number without an end")
