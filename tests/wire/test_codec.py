"""Messages to bytes and back."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import pickle
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from coterie.errors import ModelError, WireError
from coterie.maths.keys import Key
from coterie.protocol import BaseLog, Card, Dense, Layer, LowRank, Model, Once, SiteRecord, message
from coterie.wire import codec, structure
from coterie.wire.codec import Size, decode, digest, encode, size

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = sorted([*codec.CODES, torch.complex32, torch.complex64, torch.complex128], key=str)


@message
class Parcel:
    """Whatever a test sends."""

    value: Any
    note: str = ""


@message
class Picky:
    """A message that looks at its own value."""

    value: Any

    def __post_init__(self) -> None:
        if self.value == 13:
            raise ModelError("13 is not a value")


def same(a: Any, b: Any) -> bool:
    """Equality of messages: types, order, bits of tensors and floats."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and bits(a) == bits(b)
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(a == b)


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    raw = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.uint8) % 2
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def adapter(layers: int = 24, rank: int = 8, width: int = 384) -> dict[str, LowRank]:
    names = [f"encoder.layer.{i // 2}.attention.self.{'query' if i % 2 else 'value'}" for i in range(layers)]
    return {n: LowRank(torch.randn(width, rank), torch.randn(rank, width), 2.0) for n in names}


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**4096) + 1, 2**4096 - 1)
    | st.integers()
    | st.floats()
    | st.text()
    | st.builds(Key, st.integers(0, 2**64 - 1))
)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
tensors = st.builds(tensor_of, st.sampled_from(DTYPES), shapes)
hashable = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=3)) | st.none()
messages = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.builds(Parcel, inner, st.text(max_size=4))
        | st.builds(Once, inner)
    ),
    max_leaves=12,
)


@given(messages)
@settings(max_examples=300, deadline=None)
def test_a_message_comes_back_as_it_was_and_its_size_was_known(sent: Any) -> None:
    data = encode(sent)
    assert same(decode(data), sent)
    assert size(sent).total == len(data)
    assert encode(decode(data)) == data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (2, 3)])
def test_every_dtype_and_shape_travels(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = tensor_of(dtype, shape)
    data = encode([sent, torch.ones(3)])
    assert same(decode(data)[0], sent)
    assert size([sent, torch.ones(3)]) == Size(sent.nbytes + 12, len(data) - sent.nbytes - 12)


def test_size_is_exact_where_many_dtypes_change_the_order_of_layout() -> None:
    sent = {i: tensor_of(dtype, (i % 7, 11 * i)) for i, dtype in enumerate(DTYPES * 3)} | {"keys": [Key(5)] * 12}
    assert size(sent).total == len(encode(sent))


@pytest.mark.parametrize(
    "sent",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0)[::3],
        torch.ones(1).expand(4, 5),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        nn.Parameter(torch.randn(2, 2)),
        torch.randn(2, requires_grad=True) * 2,
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "negative view", "parameter", "with a graph"],
)
def test_a_tensor_of_any_layout_travels_as_its_values(sent: Tensor) -> None:
    back = decode(encode({"x": sent}))["x"]
    assert torch.equal(back, sent.detach())
    assert type(back) is Tensor and back.is_contiguous() and not back.requires_grad
    assert size({"x": sent}).payload == sent.numel() * sent.itemsize


def test_shared_storage_is_sent_twice_and_arrives_apart() -> None:
    base = torch.zeros(6)
    sent = Parcel([base, base, base[2:], base.view(2, 3)])
    back = decode(encode(sent)).value
    back[0].fill_(1.0)
    assert [float(one.sum()) for one in back] == [6.0, 0.0, 0.0, 0.0]
    assert size(sent).payload == 4 * (6 + 6 + 4 + 6)
    back[1] += 1  # arrives writable
    assert float(base.sum()) == 0.0


def test_payload_is_tensor_bytes_and_eight_for_every_key() -> None:
    sent = {
        "a": torch.zeros(10, dtype=torch.bfloat16),
        "k": Key(2**64 - 1),
        "n": 5,
        "again": [Key(0), Key(1)],
    }
    assert size(sent).payload == 20 + 3 * 8
    assert size({"n": 5, "s": "text"}).payload == 0
    assert size(None).payload == 0
    grown = size(sent | {"s": "x" * 800})
    assert grown.payload == 44 and grown.overhead >= size(sent).overhead + 800


def test_the_low_rank_formula_is_the_payload() -> None:
    assert size(adapter(24, 8, 384)).payload == 24 * 8 * (384 + 384) * 4


def test_numbers_are_exact_and_keep_their_type() -> None:
    sent = [
        0.1,
        -0.0,
        5e-324,
        1.7976931348623157e308,
        math.nan,
        math.inf,
        -math.inf,
        1.0,
        1,
        True,
        2**80,
        -(2**63),
    ]
    assert same(decode(encode(sent)), sent)
    assert decode(encode([np.float32(0.1), np.int64(7), np.bool_(True)])) == [float(np.float32(0.1)), 7, True]


def test_dict_keys_keep_type_and_order() -> None:
    sent = {2: "b", 1: "a", "1": "c", (0, "x"): "d", None: "e", Key(9): "f", 1.5: "g"}
    back = decode(encode(sent))
    assert list(back.items()) == list(sent.items())
    assert [type(key) for key in back] == [type(key) for key in sent]
    assert encode({"a": 1, "b": 2}) != encode({"b": 2, "a": 1})


def test_messages_of_the_protocol_travel() -> None:
    term = LowRank(torch.randn(3, 2), torch.randn(2, 4), 0.5, torch.randn(2))
    card = Card("site-1", 4, 100, 2.0, {"q": Layer(3, 4, inner=2)}, group="b")
    log = BaseLog().add({"q": term}).add({"q": term})
    sent = {
        "model": Model(spec="small", lora={"q": term}),
        "card": card,
        "base": log,
        "site": SiteRecord(held=("a",)),
    }
    back = decode(encode(sent))
    assert same(back, sent)
    assert back["base"].version == 2 and torch.equal(back["model"]["lora"]["q"].product(), term.product())


def test_equal_messages_have_equal_bytes_and_digests() -> None:
    def made() -> Parcel:
        return Parcel({"x": torch.arange(5), "k": Key(3), "inner": [Parcel(1), Once(torch.ones(2, 2))]}, "note")

    assert encode(made()) == encode(made())
    assert digest(made()) == digest(made()) and len(digest(made())) == 64
    assert digest(made()) != digest(dataclasses.replace(made(), note="other"))
    assert digest([torch.ones(4)]) != digest([torch.ones(2, 2)])


def test_any_reader_of_safetensors_sees_the_tensors(tmp_path: Any) -> None:
    file = tmp_path / "message.safetensors"
    file.write_bytes(encode(Parcel(torch.arange(3.0))))
    with safe_open(file, framework="pt") as opened:
        assert torch.equal(opened.get_tensor("0"), torch.arange(3.0))
        assert list(json.loads(opened.metadata()["coterie"])[1][0])[1:] == ["value", "note"]


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Undeclared:
    x: int = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda: 1, "function"),
        (len, "builtin_function_or_method"),
        (int, "type"),
        (math, "module"),
        (nn.Linear(2, 2), "Linear"),
        ({1, 2}, "set"),
        (frozenset(), "frozenset"),
        (np.zeros(2), "ndarray"),
        (b"bytes", "bytes"),
        (1j, "complex"),
        (Colour.RED, "Colour"),
        (Undeclared(), "Undeclared"),
        (Point(1, 2), "Point"),
        (object(), "object"),
        (np.longdouble(1), "longdouble"),
        (Dense(torch.eye(2)), "Dense"),
        (torch.eye(2).to_sparse(), "Tensor"),
        (torch.empty(2, device="meta"), "Tensor"),
        (torch.empty(2, dtype=torch.bits8), "Tensor"),
        (Key(-1), "Key"),
        (Key(2**64), "Key"),
        (2**5000, "int"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_what_cannot_travel_is_refused_with_path_and_type(value: Any, named: str) -> None:
    for attempt in (encode, size):
        with pytest.raises(WireError) as caught:
            attempt(Parcel({"layers": [torch.ones(1), {"q.v": value}]}))
        text = str(caught.value)
        assert text.startswith("value.layers.1.q.v: ") and named in text and "\n" not in text
        with pytest.raises(WireError, match="the message itself"):
            attempt(value)


def test_a_dict_key_that_cannot_travel_is_refused() -> None:
    for key in (b"x", frozenset(), (1, b"x"), Colour.RED):
        with pytest.raises(WireError, match="a dict key of type"):
            encode(Parcel({key: 1}))


def test_a_message_that_contains_itself_or_is_endlessly_deep_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for sent in (loop, deep):
        with pytest.raises(WireError, match="nested too deep"):
            encode(sent)


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, Parcel], ids=["list", "tuple", "dict", "message"]
)
def test_whatever_is_shallow_enough_to_be_written_can_be_read(wrap: Any) -> None:
    sent: Any = 1
    for _ in range(structure.DEPTH):
        sent = wrap(sent)
    assert same(decode(encode(sent)), sent)
    with pytest.raises(WireError, match="nested too deep"):
        encode(wrap(sent))


def test_the_server_may_store_what_it_may_not_send() -> None:
    sent = Parcel({"w": Dense(torch.eye(3))})
    assert same(decode(encode(sent, dense=True)), sent)
    assert size(sent, dense=True).total == len(encode(sent, dense=True))


def test_foreign_bytes_are_refused_in_one_line() -> None:
    plain = save({"0": torch.ones(2)})
    other = save({"0": torch.ones(2)}, metadata={"format": "pt"})
    for data in (b"", b"\0" * 8, b"hello", pickle.dumps([1]), plain, other, bytes(range(256)) * 4):
        with pytest.raises(WireError) as caught:
            decode(data)
        assert "\n" not in str(caught.value) and "message" in str(caught.value)


def container(text: str, tensors: dict[str, Tensor] | None = None) -> bytes:
    return save(tensors or {}, metadata={"coterie": text})


ONE = {"0": torch.ones(2)}


@pytest.mark.parametrize(
    ("text", "tensors"),
    [
        ("", {}),
        ("[]", {}),
        ("[1,[]]", {}),
        ("[2,[],null]", {}),
        ('[1,[],{"a":1}]', {}),
        ("[1,[],[]]", {}),
        ('[1,[],["x"]]', {}),
        ('[1,[],["t",0]]', {}),
        ('[1,[],["t",0,0]]', ONE),
        ('[1,[],["l",["t",0],["t",0]]]', ONE),
        ("[1,[],null]", ONE),
        ('[1,[],["c",0]]', {"0": torch.ones(3)}),
        ('[1,[],["k",0]]', {"keys": torch.ones(2)}),
        ('[1,[],["k",0]]', {"keys": torch.ones(2, dtype=torch.int64)}),
        ('[1,[],["f","0"]]', {}),
        ("[1,[],NaN]", {}),
        ('[1,[],["d",1]]', {}),
        ('[1,[],["d",1,2,1,3]]', {}),
        ('[1,[],["d",["l"],2]]', {}),
        ('[1,[["builtins:eval","x"]],["m",0,"1"]]', {}),
        ('[1,[["os:system","x"]],["m",0,"true"]]', {}),
        ("[1,[],[" * 5000, {}),
        ("[1,[]," + "[" * 100_000 + "]" * 100_000 + "]", {}),
        ("[1,[]," + '["l",' * 5000 + "1" + "]" * 5000 + "]", {}),
        ("[1,[]," + "9" * 5000 + "]", {}),
        ("[1,[],null]", {"1": torch.ones(1)}),
    ],
)
def test_a_container_with_an_impossible_structure_is_refused(text: str, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(WireError) as caught:
        decode(container(text, tensors))
    assert "\n" not in str(caught.value)


def test_an_unknown_class_and_other_fields_are_named() -> None:
    good = encode(Parcel(1))
    with pytest.raises(WireError, match=r"unknown message class '.*:Parsel'"):
        decode(good.replace(b"Parcel", b"Parsel"))
    with pytest.raises(WireError, match=r"fields .*walue.* where .*value.* are expected"):
        decode(good.replace(b"value", b"walue"))


def test_a_class_that_rejects_its_values_is_a_wire_error() -> None:
    assert decode(encode(Picky(12))).value == 12
    good = encode(Picky(12))
    with pytest.raises(WireError, match="13 is not a value"):
        decode(good.replace(b",12]", b",13]"))


SAMPLE = encode(
    Parcel(
        {
            1: Model(lora={"q": LowRank(torch.randn(3, 2), torch.randn(2, 3), 0.5)}),
            ("a", 2): [Key(7), None, True, 1.5, math.inf, "text"],
            "b": (torch.ones(2, dtype=torch.bool), torch.ones(3, dtype=torch.bfloat16), torch.empty(0)),
        }
    )
)
HEADER = 8 + int.from_bytes(SAMPLE[:8], "little")


def either_way(data: bytes) -> None:
    try:
        decode(data)
    except WireError as error:
        assert "\n" not in str(error)


@given(st.integers(0, len(SAMPLE) - 1))
@settings(max_examples=200, deadline=None)
def test_truncated_bytes_are_refused(length: int) -> None:
    with pytest.raises(WireError):
        decode(SAMPLE[:length])


@given(st.lists(st.tuples(st.integers(0, HEADER - 1), st.integers(1, 255)), min_size=1, max_size=3))
@settings(max_examples=600, deadline=None)
def test_flipped_bytes_are_refused_or_read(flips: list[tuple[int, int]]) -> None:
    data = bytearray(SAMPLE)
    for place, mask in flips:
        data[place] ^= mask
    either_way(bytes(data))


def test_every_single_bit_flip_is_refused_or_read() -> None:
    for place in range(len(SAMPLE)):
        data = bytearray(SAMPLE)
        data[place] ^= 1 << (place % 8)
        either_way(bytes(data))


@given(st.binary(max_size=200), st.integers(0, len(SAMPLE)))
@settings(max_examples=300, deadline=None)
def test_inserted_bytes_are_refused_or_read(junk: bytes, place: int) -> None:
    either_way(junk)
    either_way(SAMPLE[:place] + junk + SAMPLE[place:])


def test_a_truth_value_of_any_byte_reads_as_a_truth_value() -> None:
    data = bytearray(encode(torch.ones(3, dtype=torch.bool)))
    data[-1] = 200
    assert int(decode(bytes(data)).sum()) == 3


def test_a_structure_above_the_containers_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "HEADER_LIMIT", 1000)
    with pytest.raises(WireError, match="send numbers as tensors"):
        encode(list(range(1000)))


def test_bytes_of_any_kind_are_read() -> None:
    data = encode(Parcel(torch.ones(2)))
    assert all(same(decode(kind(data)), Parcel(torch.ones(2))) for kind in (bytes, bytearray, memoryview))


def test_a_plain_safetensors_reader_finds_as_many_bytes_as_the_payload() -> None:
    sent = adapter(4)
    assert sum(tensor.nbytes for tensor in load(encode(sent)).values()) == size(sent).payload
