"""The base's log: patches are carried on as they are and stored once, and nothing is lost by it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from coterie.algorithms import FedRACLoRA, FLoRA
from coterie.engines.base_versions import base_of, carried, extends, store_state, stored_state
from coterie.engines.checkpoints import CheckpointStore
from coterie.engines.sites import Volatile
from coterie.errors import CheckpointError
from coterie.protocol import BaseLog, LowRank, copied
from coterie.wire.codec import decode, encode
from engines.world import world

METHODS = [pytest.param(FLoRA, id="flora"), pytest.param(FedRACLoRA, id="fed-rac-lora")]


class Counting(Volatile):
    """A store that notes what is put."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[str] = []

    def put(self, name: str, data: bytes) -> None:
        self.puts.append(name)
        super().put(name, data)


@pytest.mark.parametrize("made", METHODS)
def test_every_patch_is_stored_once_and_comes_back_to_the_bit(made: type) -> None:
    store = Counting()
    run = world(made(), ranks=(4, 4, 4), rounds=4)
    for played in run.rounds(run.begin()):
        state = played.progress.state
        bare = store_state(store, state)
        assert base_of(bare).version == 0 and base_of(state).version == played.progress.round
        assert encode(stored_state(store, decode(encode(bare)))) == encode(state)
    assert store.puts == [f"base/{version:05d}" for version in range(4)]


@pytest.mark.parametrize("made", METHODS)
def test_what_a_checkpoint_writes_does_not_grow_with_the_rounds_before_it(made: type, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    run = world(made(), ranks=(4, 4, 4), rounds=6)
    written = []
    for played in run.rounds(run.begin()):
        before = {path.name for path in store.folder.joinpath("blobs").iterdir()}
        store.put("progress", encode(store_state(store, played.progress.state)))
        store.commit(played.progress.round, {})
        new = [path for path in store.folder.joinpath("blobs").iterdir() if path.name not in before]
        written.append(sum(path.stat().st_size for path in new))
    assert max(written[1:]) < 1.2 * min(written[1:])
    again = CheckpointStore(tmp_path)
    again.open(5)
    assert base_of(stored_state(again, decode(again.get("progress")))).version == 5


def test_a_damaged_patch_is_told(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    state = replace(FLoRA().start(None, None), base=BaseLog().add({"w": LowRank(torch.ones(2, 1), torch.ones(1, 2))}))  # type: ignore[arg-type]
    store.put("progress", encode(store_state(store, state)))
    store.commit(1, {})
    blob = store.open().blobs["base/00000"]
    path = tmp_path / "checkpoints/blobs" / blob.sha256
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CheckpointError, match="base/00000"):
        stored_state(store, decode(store.get("progress")))


@pytest.mark.parametrize("strict", [False, True])
def test_old_patches_are_taken_over_and_new_ones_are_the_engines_own(strict: bool) -> None:
    run = world(FLoRA(), rounds=3, strict=strict)
    logs = [base_of(played.progress.state) for played in run.rounds(run.begin())]
    for earlier, later in pairwise(logs):
        assert all(one is same for one, same in zip(earlier.patches, later.patches, strict=False))
        assert extends(later, earlier) and not extends(earlier, later)
    own = {"w": LowRank(torch.ones(2, 1), torch.ones(1, 2))}
    state = replace(FLoRA().start(None, None), base=logs[-1].add(own))  # type: ignore[arg-type]
    made = carried(state, logs[-1], copied)
    assert made.base.patches[:3] == logs[-1].patches
    own["w"].B.zero_()
    assert float(made.base.patches[-1]["w"].B.sum()) == 2.0
