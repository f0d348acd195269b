"""What travels between the processes of a pool arrives as it was, tensors in their own layout."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from training.small import CLASSES, choices, sequences, texts

from coterie.experiments.methods import method_class
from coterie.training.frames import pack, read_frame, unpack, write_frame

ODD = {
    "whole": torch.arange(6.0).reshape(2, 3),
    "turned": torch.arange(6.0).reshape(2, 3).mT,
    "slice": torch.arange(24.0, dtype=torch.float64).reshape(4, 6)[1:3, ::2],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "half": torch.randn(5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "truth": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
    "nothing": torch.empty(0, 4),
    "number": torch.tensor(3, dtype=torch.int64),
}


@pytest.mark.parametrize("name", list(ODD))
def test_a_tensor_keeps_its_bits_and_dtype(name: str) -> None:
    sent = ODD[name]
    got = unpack(pack({"a": sent}))["a"]
    assert got.dtype == sent.dtype and torch.equal(got, sent)


@pytest.mark.parametrize("name", ["whole", "turned", "half", "number"])
def test_a_dense_tensor_keeps_its_strides(name: str) -> None:
    assert unpack(pack(ODD[name])).stride() == ODD[name].stride()


def test_of_a_view_only_what_it_shows_travels() -> None:
    many = torch.zeros(100_000)
    assert len(pack(many[:10])) < 2000


def test_one_tensor_in_two_places_arrives_as_one() -> None:
    shared = torch.ones(3)
    one, other, third = unpack(pack([shared, shared, torch.ones(3)]))
    assert one is other and third is not one


@pytest.mark.parametrize("data", [texts(9), sequences(7), choices(6)], ids=["texts", "sequences", "choices"])
def test_a_data_set_gives_the_same_batches(data) -> None:
    got = unpack(pack(data))
    assert len(got) == len(data) and torch.equal(got.lengths, data.lengths)
    assert torch.equal(got.labels, data.labels) if hasattr(data, "labels") else True
    taken = got.select([2, 0])
    assert torch.equal(taken.lengths, data.select([2, 0]).lengths)


def test_what_is_kept_travels_once_and_stays_one_object() -> None:
    data = texts(400)
    kept = {id(tensor): token for token, tensor in enumerate([data.ids, data.offsets, data.stored_labels, data.rows])}
    known: set[int] = set()
    shelf: dict[int, torch.Tensor] = {}
    first, second = (pack(data.select(range(n)), kept, known) for n in (5, 7))
    assert known == {0, 1, 2}  # rows are each selection's own
    assert len(second) < len(first) / 5
    a, b = unpack(first, shelf), unpack(second, shelf)
    assert a.ids is b.ids and torch.equal(a.ids, data.ids) and len(b) == 7 and a.num_classes == CLASSES


def test_frames_arrive_one_by_one_and_a_torn_one_is_told() -> None:
    pipe = io.BytesIO()
    write_frame(pipe, b"one")
    write_frame(pipe, b"")
    write_frame(pipe, b"three")
    pipe.seek(0)
    assert [read_frame(pipe) for _ in range(3)] == [b"one", b"", b"three"]
    with pytest.raises(EOFError):
        read_frame(pipe)
    with pytest.raises(EOFError):
        read_frame(io.BytesIO(pipe.getvalue()[:9]))


def test_a_class_of_a_file_that_no_import_finds_is_loaded_from_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "from dataclasses import dataclass\nfrom coterie.algorithms.fedit import FedIT\n\n\n"
        "@dataclass(frozen=True)\nclass Own(FedIT):\n    pass\n\n\n@dataclass\nclass Note:\n    text: str\n"
    )
    (tmp_path / "own_way.py").write_text(source, encoding="utf-8")
    kind = method_class(f"{tmp_path / 'own_way.py'}:Own")
    data = pack(sys.modules[kind.__module__].Note("kept"))
    monkeypatch.delitem(sys.modules, kind.__module__)
    assert unpack(data).text == "kept"
    assert kind.__module__ in sys.modules
