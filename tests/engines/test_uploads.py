"""Uploads that wait on disk, and layers worked on at once: no bit changes, and memory does not follow the cohort."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.algorithms import FedIT
from coterie.engines.in_process import InProcess, Played
from coterie.engines.uploads import Waiting
from coterie.errors import RunError, WireError
from coterie.protocol import LowRank
from coterie.training.asks import Plan
from coterie.wire.codec import encode, opened
from engines.test_in_process import EVERY, engine
from engines.world import play, world


class Noting(Waiting):
    """Remembers what files there were before each round's end."""

    seen = 0

    def clear(self) -> None:
        if self.folder is not None and self.folder.exists():
            self.seen += len(list(self.folder.iterdir()))
        super().clear()


def result(run: InProcess, played: list[Played]) -> tuple[Any, bytes, list[Any]]:
    """All that may not change: metrics, the last state with the heads, what travelled."""
    return [p.metrics for p in played], encode(played[-1].progress, dense=True), run.ledger.rows()


@pytest.mark.parametrize("made", EVERY)
def test_uploads_on_disk_and_layers_worked_on_at_once_change_no_bit(made: Any, tmp_path: Path) -> None:
    run = engine(made, strict=True, plan=Plan(workers=3))
    run.waiting = waiting = Noting(tmp_path / "uploads")
    held = engine(made, strict=True)
    assert result(run, play(run)) == result(held, play(held))
    assert not waiting.folder or not waiting.folder.exists()
    if any(row["direction"] == "up" and row["kind"] == "message" for row in run.ledger.rows()):
        assert waiting.seen >= 3


def test_only_what_does_not_fit_into_memory_waits_on_disk(tmp_path: Path) -> None:
    payload = {"layer": LowRank(torch.ones(64, 4), torch.ones(4, 64), 2.0)}
    amount = len(encode(payload))
    waiting = Waiting(tmp_path / "uploads", memory=2 * amount)
    held = [waiting.kept(payload) for _ in range(5)]
    assert [one is payload for one in held] == [True, True, False, False, False]
    assert len(list((tmp_path / "uploads").iterdir())) == 3
    waiting.clear()
    assert waiting.kept(payload) is payload and not (tmp_path / "uploads").exists()


def test_a_dict_that_waits_on_disk_is_joined_with_others_like_any(tmp_path: Path) -> None:
    payload = {"a": 1, "b": 2.5}
    found = Waiting(tmp_path / "uploads").kept(payload)
    assert found is not payload
    assert found | {"a": 2} == {**payload, "a": 2} and {"a": 2, "c": 3} | found == {"c": 3, **payload}


def test_a_folder_that_a_killed_run_left_is_emptied(tmp_path: Path) -> None:
    left = tmp_path / "uploads" / "000000.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"half an upl")
    Waiting(tmp_path / "uploads")
    assert not left.parent.exists()


def test_a_round_that_breaks_off_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world(FedIT())
    run.waiting = Waiting(tmp_path / "uploads")
    progress = run.begin()

    def failing(*_: Any) -> Any:
        assert (tmp_path / "uploads").exists()
        raise RunError("no")

    monkeypatch.setattr(FedIT, "aggregate", failing)
    with pytest.raises(RunError, match="no"):
        run.play(progress)
    assert not (tmp_path / "uploads").exists()


def test_a_disk_that_refuses_ends_the_round_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = world(FedIT())
    run.waiting = Waiting(tmp_path / "uploads")
    progress = run.begin()
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match=r"000000.*No space left.*execution.upload_memory") as told:
        run.play(progress)
    assert "\n" not in str(told.value)


def test_what_is_read_from_disk_is_a_copy_of_each_value_in_dicts_of_the_same_order(tmp_path: Path) -> None:
    payload = {
        "z": {2: torch.arange(6.0).reshape(2, 3), (1, "a"): torch.tensor(True)},
        "a": [LowRank(torch.ones(2, 1), torch.zeros(1, 3), 0.5), torch.empty(0, 4), None, "text", float("inf")],
        "c": torch.tensor([1 + 2j, 3 - 1j]),
    }
    (tmp_path / "one").write_bytes(encode(payload))
    found = opened(tmp_path / "one")
    assert encode(found) == encode(payload)
    assert list(found) == ["z", "a", "c"] and list(found["z"]) == [2, (1, "a")]
    found["z"][2].zero_()
    assert torch.equal(found["z"][2], payload["z"][2])
    with pytest.raises(KeyError):
        found["b"]


def test_a_file_that_is_cut_or_gone_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_bytes(encode({"x": torch.ones(1000)}))
    found = opened(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WireError, match="one: is cut short"):
        found["x"]
    path.unlink()
    with pytest.raises(WireError, match=r"one: cannot be read \(No such file"):
        found["x"]


MEASURED = """
import json, sys, torch
from pathlib import Path
from coterie.algorithms import FedIT
from coterie.engines.uploads import Waiting
from coterie.maths.keys import root_key
from coterie.protocol import Card, Federation, Layer, LowRank, Server, Uploads
from coterie.protocol.messages import Uploaded

torch.set_num_threads(1)
LAYERS = {f"layer{i}": Layer(1024, 1024) for i in range(96)}
SERVER = Server((), lambda purpose: root_key(0).fold(purpose), 1, "main")


def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024


def after(count, waiting):
    cards = [Card(f"c{i:03d}", 8, 1, 2.0, LAYERS) for i in range(count)]
    state = FedIT().start(Federation(tuple(cards), 1), SERVER)
    made = []
    for i, card in enumerate(cards):
        upload = {name: LowRank(torch.full((1024, 8), 1.0 + i), torch.full((8, 1024), 0.5), 2.0) for name in LAYERS}
        made.append(Uploaded(card, waiting.kept(upload), 1.0))
    FedIT().aggregate(state, Uploads(made), SERVER)
    return peak()


disk = Waiting(Path(sys.argv[1]))
print(json.dumps([after(2, disk), after(8, disk), after(40, disk), after(40, Waiting())]))
"""


def test_memory_grows_with_a_layer_of_all_uploads_and_not_with_the_uploads(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "uploads")]
    _, few, many, held = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    # An upload is 6 MiB: 192 MiB more are uploaded by 40 than by 8, of which one layer is 2 and the structure of all 3.
    # The rest is what the allocator keeps, of which up to 18 have been seen.
    assert many - few < 48
    assert held - many > 120
