"""A site's memory is a transaction."""

from __future__ import annotations

import pytest
import torch

from coterie.protocol import Memory, copied


def fresh(read_only: bool = False) -> Memory:
    return Memory({"x": torch.ones(2)}, copied, read_only)


def test_reads_are_copies() -> None:
    memory = fresh()
    memory["x"].zero_()
    assert memory["x"].tolist() == [1.0, 1.0]


def test_writes_are_copies_and_wait_for_the_commit() -> None:
    committed = {"x": torch.ones(2)}
    memory, value = Memory(committed, copied), torch.full((2,), 5.0)
    memory["x"] = value
    value.zero_()
    assert memory["x"].tolist() == [5.0, 5.0] and memory.changed
    assert committed["x"].tolist() == [1.0, 1.0]
    assert memory.commit()["x"].tolist() == [5.0, 5.0]


def test_deleted_values_are_gone_until_written_again() -> None:
    memory = fresh()
    del memory["x"]
    assert "x" not in memory and memory.get("x") is None and memory.commit() == {}
    memory["x"] = torch.zeros(1)
    assert list(memory) == ["x"] and len(memory) == 1


def test_a_read_only_memory_refuses_writes() -> None:
    memory = fresh(read_only=True)
    with pytest.raises(TypeError, match="read-only"):
        memory["x"] = torch.zeros(1)
    with pytest.raises(TypeError, match="read-only"):
        del memory["x"]
