"""A store of activations keeps to its budgets, and whatever it loses is as if it had never been there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coterie.maths.keys import root_key
from coterie.training import lower_store
from coterie.training.lower_store import LowerStore

ROWS = 4
EACH = ROWS * 8 * 4  # bytes of the states of one example


def states(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return root_key(3).fold(number).normal((ROWS, 8)).to(dtype)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def size(folder: Path) -> int:
    return sum(place.stat().st_size for place in folder.rglob("*") if place.is_file())


def holds(store: LowerStore, numbers: range, kind: str = "kind") -> list[int]:
    found = []
    for number in numbers:
        held = store.get(kind, key(number))
        if held is not None:
            assert torch.equal(held, states(number))
            found.append(number)
    return found


def filled(folder: Path, numbers: range, memory: int, disk: int, kind: str = "kind") -> LowerStore:
    store = LowerStore(folder, memory, disk)
    for number in numbers:
        store.put(kind, key(number), states(number))
    store.flush()
    return store


def test_memory_holds_what_fits_and_the_disk_the_rest(tmp_path: Path) -> None:
    store = filled(tmp_path, range(20), 5 * EACH + 1, 1 << 20)
    assert len(store._held) == 5 and not store._waiting
    assert holds(store, range(25)) == list(range(20))


def test_without_a_disk_no_more_than_the_memory_is_kept_and_nothing_is_written(tmp_path: Path) -> None:
    store = filled(tmp_path / "none", range(20), 5 * EACH, 0)
    assert holds(store, range(20)) == list(range(5)) and not (tmp_path / "none").exists()


def test_the_disk_keeps_to_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_store, "SHARD", 4 * EACH)
    store = filled(tmp_path, range(40), 0, 4000)
    found = holds(store, range(40))
    assert size(tmp_path) <= 4000 and 8 <= len(found) < 40 and len(found) % 4 == 0
    assert not list(tmp_path.rglob(".tmp-*")) and not store._waiting


def test_another_store_finds_what_is_on_disk_also_what_comes_later(tmp_path: Path) -> None:
    first = filled(tmp_path, range(6), 0, 1 << 20)
    other = LowerStore(tmp_path, 0, 1 << 20)
    assert holds(other, range(9)) == list(range(6)) and holds(other, range(9), "another kind") == []
    for number in (6, 7):
        first.put("kind", key(number), states(number))
    first.flush()
    assert holds(other, range(9)) == list(range(8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_states_come_back_with_their_bits_whatever_their_dtype_and_length(tmp_path: Path, dtype: torch.dtype) -> None:
    store = LowerStore(tmp_path, 0, 1 << 20)
    given = {key(number): states(number, dtype)[: 1 + number % ROWS] for number in range(7)}
    for name, own in given.items():
        store.put("kind", name, own)
    store.flush()
    for one in (store, LowerStore(tmp_path, 0, 1 << 20)):
        for name, own in given.items():
            found = one.get("kind", name)
            assert found is not None and found.dtype == dtype and torch.equal(found, own)


def test_kinds_unused_for_longest_make_room(tmp_path: Path) -> None:
    each = size_of_one(tmp_path / "probe")
    folder = tmp_path / "store"
    for number, kind in enumerate(["oldest", "older", "old"]):
        filled(folder, range(8), 0, 3 * each, kind)
        os.utime(folder / kind, (number + 1, number + 1))
    assert holds(LowerStore(folder, 0, 3 * each), range(8), "oldest") == list(range(8))  # which is to use it
    filled(folder, range(8), 0, 3 * each, "new")
    assert sorted(place.name for place in folder.iterdir() if place.is_dir()) == ["new", "old", "oldest"]
    assert size(folder) <= 3 * each


def size_of_one(folder: Path) -> int:
    """Bytes of eight examples on disk."""
    filled(folder, range(8), 0, 1 << 20)
    return size(folder)


def test_a_kind_in_use_makes_no_room(tmp_path: Path) -> None:
    each = size_of_one(tmp_path / "probe")
    store = filled(tmp_path / "store", range(8), 0, each + 1, "one")
    for number in range(8):
        store.put("two", key(number), states(number))
    store.flush()
    assert holds(store, range(8), "one") == list(range(8)) and holds(store, range(8), "two") == []


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "empty"])
def test_a_damaged_shard_is_as_if_it_were_not_there(tmp_path: Path, damage: str) -> None:
    filled(tmp_path, range(6), 0, 1 << 20)
    (shard,) = tmp_path.rglob("*.safetensors")
    data = bytearray(shard.read_bytes())
    if damage == "gone":
        shard.unlink()
    else:
        data[-1] ^= 1
        shard.write_bytes({"cut": data[:-5], "changed": data, "empty": b""}[damage])
    assert holds(LowerStore(tmp_path, 0, 1 << 20), range(6)) == []


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    place = tmp_path / "a file"
    place.write_text("in the way")
    store = filled(place / "below", range(6), 2 * EACH, 1 << 20)
    assert holds(store, range(6)) == [0, 1]
