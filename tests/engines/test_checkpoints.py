"""Checkpoints: atomic, verified, and only what changed is written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.engines import checkpoints
from coterie.engines.checkpoints import CheckpointStore, append_lines, rewind
from coterie.errors import CheckpointError


def contents(store: CheckpointStore) -> dict[str, bytes]:
    return {name: store.get(name) for name in store.names()}


def opened(run: Path, round: int | None = None) -> tuple[int, dict[str, bytes]]:
    store = CheckpointStore(run)
    return store.open(round).round, contents(store)


def blobs(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints" / "blobs").iterdir()}


def referenced(run: Path) -> set[str]:
    manifests = [json.loads(path.read_text())["manifest"] for path in (run / "checkpoints").glob("round-*.json")]
    return {digest for manifest in manifests for digest, _ in manifest["blobs"].values()}


@contextmanager
def one_line(*parts: str) -> Iterator[None]:
    with pytest.raises(CheckpointError) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text
    assert all(part in text for part in parts), text


def two_rounds(run: Path) -> CheckpointStore:
    """Round 1: state, records/a; round 2: another state, the same records/a."""
    store = CheckpointStore(run)
    store.put("state", b"one")
    store.put("records/a", b"A" * 100)
    store.commit(1, {"offset": 10})
    store.put("state", b"two!")
    store.commit(2, {"offset": 20})
    return store


def blob_of(run: Path, round: int, name: str) -> Path:
    manifest = json.loads((run / "checkpoints" / f"round-{round:05d}.json").read_text())["manifest"]
    return run / "checkpoints" / "blobs" / str(manifest["blobs"][name][0])


def test_a_committed_round_is_found_by_another_process(tmp_path: Path) -> None:
    two_rounds(tmp_path)
    store = CheckpointStore(tmp_path)
    found = store.open()
    assert (found.round, found.metadata) == (2, {"offset": 20})
    assert contents(store) == {"state": b"two!", "records/a": b"A" * 100}
    assert store.rounds() == [1, 2] and store.open(1).metadata == {"offset": 10}
    assert contents(store)["state"] == b"one"


def test_staged_blobs_are_read_at_once_and_forgotten_without_a_commit(tmp_path: Path) -> None:
    store = two_rounds(tmp_path)
    store.put("state", b"three")
    store.put("new", b"n")
    store.delete("records/a")
    assert contents(store) == {"state": b"three", "new": b"n"}
    assert "new" in store and "records/a" not in store
    with pytest.raises(KeyError):
        store.get("records/a")
    assert opened(tmp_path) == (2, {"state": b"two!", "records/a": b"A" * 100})


def test_only_what_changed_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    for i in range(50):
        store.put(f"records/{i}", bytes([i]) * 1000)
    store.commit(1, {})
    written: list[int] = []
    real = os.write
    monkeypatch.setattr(
        checkpoints.os, "write", lambda handle, data: (written.append(len(data)), real(handle, data))[1]
    )
    store.put("records/7", b"new" * 500)
    store.put("records/8", bytes([8]) * 1000)
    store.commit(2, {})
    assert [size for size in written if size < 3000] == [1500]
    assert len(written) == 2  # the changed record and the manifest


def test_the_last_two_checkpoints_stay_and_no_other_content(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for number in range(1, 8):
        store.put("state", f"state {number}".encode())
        store.put(f"records/{number % 3}", f"record {number}".encode())
        store.commit(number, {})
        assert blobs(tmp_path) == referenced(tmp_path)
    assert store.rounds() == [6, 7]
    assert opened(tmp_path, 6)[1]["records/0"] == b"record 6"
    assert CheckpointStore(tmp_path).folder == tmp_path / "checkpoints"


def test_a_content_that_returns_survives_the_drop_of_its_first_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for number, state in enumerate([b"x", b"y", b"z", b"x", b"y", b"x", b"x"]):
        store.put("state", state)
        store.commit(number, {})
        assert store.get("state") == state and opened(tmp_path)[1] == {"state": state}


def test_one_content_under_two_names_is_stored_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.put("a", b"same")
    store.put("b", b"same")
    store.put("a", b"same")
    store.put("b", b"other")
    assert store.get("a") == b"same"
    store.put("b", b"same")
    store.delete("a")
    assert store.get("b") == b"same"
    store.commit(1, {})
    assert len(blobs(tmp_path)) == 1 and opened(tmp_path) == (1, {"b": b"same"})


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abc"), st.binary(max_size=3)),
        st.tuples(st.just("delete"), st.sampled_from("abc"), st.just(b"")),
        st.tuples(st.just("commit"), st.just(""), st.just(b"")),
        st.tuples(st.just("reopen"), st.just(""), st.just(b"")),
    ),
    max_size=25,
)


@given(steps)
@settings(max_examples=30, deadline=None)
def test_the_store_is_a_dict_that_goes_back_to_its_last_commit(
    tmp_path_factory: pytest.TempPathFactory, listed: list[tuple[str, str, bytes]]
) -> None:
    run = tmp_path_factory.mktemp("run")
    store = CheckpointStore(run)
    now: dict[str, bytes] = {}
    committed: list[dict[str, bytes]] = []
    for what, name, data in listed:
        if what == "put":
            store.put(name, data)
            now[name] = data
        elif what == "delete" and name in now:
            store.delete(name)
            del now[name]
        elif what == "commit":
            committed.append(dict(now))
            store.commit(len(committed), {})
        elif what == "reopen" and committed:
            store = CheckpointStore(run)
            assert store.open().round == len(committed)
            now = dict(committed[-1])
        assert contents(store) == now
    assert store.rounds() == list(range(1, len(committed) + 1))[-2:]
    if committed:
        assert opened(run)[1] == committed[-1]
        assert blobs(run) == referenced(run)
    shutil.rmtree(run)


def test_committing_the_same_round_again_replaces_it(tmp_path: Path) -> None:
    store = two_rounds(tmp_path)
    store.put("state", b"finished")
    store.commit(2, {"offset": 21})
    assert opened(tmp_path)[1]["state"] == b"finished" and store.rounds() == [1, 2]
    assert blobs(tmp_path) == referenced(tmp_path)
    with pytest.raises(ValueError, match="round 1 after round 2"):
        store.commit(1, {})


def test_after_going_back_newer_checkpoints_are_dropped(tmp_path: Path) -> None:
    two_rounds(tmp_path)
    store = CheckpointStore(tmp_path)
    store.open(1)
    assert store.rounds() == [1, 2]
    store.drop_newer()
    assert store.rounds() == [1] and opened(tmp_path)[1]["state"] == b"one"
    store.put("state", b"another two")
    store.commit(2, {})
    assert opened(tmp_path)[1]["state"] == b"another two" and opened(tmp_path, 1)[1]["state"] == b"one"


def test_a_commit_after_going_back_drops_newer_checkpoints_by_itself(tmp_path: Path) -> None:
    store = two_rounds(tmp_path)
    store.put("state", b"three")
    store.commit(3, {})
    store = CheckpointStore(tmp_path)
    store.open(2)
    store.commit(2, {"again": True})
    assert store.rounds() == [2] and store.open().metadata == {"again": True}


def test_a_folder_that_holds_a_run_is_not_written_by_another(tmp_path: Path) -> None:
    two_rounds(tmp_path)
    store = CheckpointStore(tmp_path)
    store.put("state", b"x")
    with one_line("holds a run already", "resume it"):
        store.commit(3, {})
    assert opened(tmp_path)[1]["state"] == b"two!"


def test_an_empty_folder_and_an_unknown_round_are_named(tmp_path: Path) -> None:
    with one_line("no checkpoint yet"):
        CheckpointStore(tmp_path).open()
    two_rounds(tmp_path)
    with one_line("no checkpoint of round 9", "1, 2"):
        CheckpointStore(tmp_path).open(9)


def test_a_store_without_a_run_folder_is_temporary() -> None:
    store = CheckpointStore(None)
    folder = store.folder
    store.put("a", b"x")
    store.commit(1, {})
    store.put("a", b"y")
    assert store.get("a") == b"y" and store.open().round == 1 and store.get("a") == b"x"
    store.close()
    assert not folder.exists()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_blob_is_named_with_the_round_to_resume_from(tmp_path: Path, harm: Callable[[Path], Any]) -> None:
    two_rounds(tmp_path)
    path = blob_of(tmp_path, 2, "state")
    harm(path)
    store = CheckpointStore(tmp_path)
    with one_line(str(path), "'state'", "resume from round 1 with --round 1"):
        store.open()
        store.get("state")
    assert opened(tmp_path, 1) == (1, {"state": b"one", "records/a": b"A" * 100})


@pytest.mark.parametrize("harm", [flip, truncate])
def test_damage_that_all_checkpoints_share_leaves_no_round_to_offer(
    tmp_path: Path, harm: Callable[[Path], Any]
) -> None:
    two_rounds(tmp_path)
    harm(blob_of(tmp_path, 2, "records/a"))
    store = CheckpointStore(tmp_path)
    with one_line("'records/a'", "no other checkpoint is intact"):
        store.open()
        store.get("records/a")


def test_a_flipped_bit_anywhere_in_a_manifest_is_noticed_and_the_older_round_offered(tmp_path: Path) -> None:
    two_rounds(tmp_path)
    path = tmp_path / "checkpoints" / "round-00002.json"
    good = path.read_bytes()
    for place in range(0, len(good), 3):
        bad = bytearray(good)
        bad[place] ^= 1 << (place % 8)
        path.write_bytes(bytes(bad))
        with one_line(str(path), "is damaged", "resume from round 1 with --round 1"):
            CheckpointStore(tmp_path).open()
    for length in (0, 1, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        with one_line(str(path), "is damaged", "--round 1"):
            CheckpointStore(tmp_path).open()
    assert opened(tmp_path, 1)[1]["state"] == b"one"
    path.write_bytes(good)
    assert opened(tmp_path) == (2, {"state": b"two!", "records/a": b"A" * 100})


def test_a_run_goes_on_from_an_older_round_past_a_damaged_manifest(tmp_path: Path) -> None:
    two_rounds(tmp_path)
    truncate(tmp_path / "checkpoints" / "round-00002.json")
    store = CheckpointStore(tmp_path)
    store.open(1)
    for number in (2, 3, 4):
        store.put("state", f"new {number}".encode())
        store.commit(number, {})
    assert store.rounds() == [3, 4] and opened(tmp_path)[1]["state"] == b"new 4"
    assert blobs(tmp_path) == referenced(tmp_path)


def test_a_damaged_content_is_healed_when_it_is_put_again(tmp_path: Path) -> None:
    store = two_rounds(tmp_path)
    flip(blob_of(tmp_path, 2, "records/a"))
    store.put("records/a", b"A" * 100)
    store.commit(3, {})
    assert opened(tmp_path)[1]["records/a"] == b"A" * 100
    assert opened(tmp_path, 2)[1]["records/a"] == b"A" * 100


def test_a_manifest_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_rounds(tmp_path)
    monkeypatch.setattr(checkpoints, "FORMAT", 2)
    with one_line("format 1", "not 2"):
        CheckpointStore(tmp_path).open()


def test_leftovers_of_killed_writes_are_removed(tmp_path: Path) -> None:
    two_rounds(tmp_path)
    folder = tmp_path / "checkpoints"
    left = [folder / "round-00003.tmp", folder / "staged" / "ab", folder / "blobs" / ("0" * 64)]
    for path in left:
        path.write_bytes(b"half")
    assert opened(tmp_path)[0] == 2
    assert not any(path.exists() for path in left)


def failing(real: Callable[..., Any], count: list[int], at: int, half: bool) -> Callable[..., Any]:
    """`real`, but the `at`-th of all calls so wrapped finds the disk full; a write may be half done."""

    def call(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == at:
            if half and real is WRITE:
                WRITE(args[0], bytes(args[1])[: len(args[1]) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    return call


WRITE = os.write


@pytest.mark.parametrize("half", [False, True])
def test_a_disk_that_is_full_at_any_moment_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    before = {"state": b"two!", "records/a": b"A" * 100}
    after = {"state": b"three", "records/b": b"B" * 200}

    def advance(store: CheckpointStore) -> None:
        store.put("state", after["state"])
        store.put("records/b", after["records/b"])
        if "records/a" in store:
            store.delete("records/a")
        store.commit(3, {"offset": 30})

    two_rounds(tmp_path / "start")
    failures = 0
    for at in range(1, 100):
        run = tmp_path / f"run-{at}"
        shutil.copytree(tmp_path / "start", run)
        store = CheckpointStore(run)
        store.open()
        count = [0]
        with monkeypatch.context() as patch:
            for name in ("open", "write", "fsync", "replace"):
                patch.setattr(checkpoints.os, name, failing(getattr(os, name), count, at, half))
            try:
                advance(store)
            except CheckpointError as error:
                failures += 1
                assert "\n" not in str(error) and "No space left on device" in str(error)
                named = 3 if opened_round(run) == 3 else 2
                assert f"the checkpoint of round {named} is intact; free space" in str(error)
            else:
                break
        found = opened(shutil.copytree(run, tmp_path / f"seen-{at}"))
        assert found in [(2, before), (3, after)]
        advance(store)  # the same process goes on once there is room
        assert opened(run) == (3, after) and blobs(run) == referenced(run)
    else:
        pytest.fail("never got through")
    assert failures == at - 1 >= 10


def test_a_first_commit_that_fails_at_any_moment_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(1, 100):
        run = tmp_path / f"run-{at}"
        store = CheckpointStore(run)
        count = [0]
        with monkeypatch.context() as patch:
            for name in ("open", "write", "fsync", "replace"):
                patch.setattr(checkpoints.os, name, failing(getattr(os, name), count, at, half=False))
            try:
                store.put("state", b"one")
                store.commit(0, {})
            except CheckpointError as error:
                assert "no checkpoint exists yet" in str(error) or "round 0 is intact" in str(error)
            else:
                break
        store.put("state", b"one")
        store.commit(0, {})
        assert opened(run) == (0, {"state": b"one"})
    assert at > 8


def opened_round(run: Path) -> int:
    return max(int(path.stem.removeprefix("round-")) for path in (run / "checkpoints").glob("round-*.json"))


def child(work: Callable[[], None]) -> int:
    """Runs `work` in a copy of this process that never comes back; its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def test_a_write_that_the_system_cuts_short_leaves_the_blob_as_it_was(tmp_path: Path) -> None:
    two_rounds(tmp_path)

    def work() -> None:
        store = CheckpointStore(tmp_path)
        store.open()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        store.put("small", b"s" * 4000)
        with one_line("File too large", "the checkpoint of round 2 is intact"):
            store.put("state", b"x" * 10000)
        assert store.get("state") == b"two!"
        store.commit(3, {})

    assert os.waitpid(child(work), 0)[1] == 0
    assert opened(tmp_path) == (3, {"state": b"two!", "records/a": b"A" * 100, "small": b"s" * 4000})


def record(i: int, number: int) -> bytes:
    return hashlib.sha256(b"%d %d" % (i, number)).digest() * 200


def expected(number: int) -> dict[str, bytes]:
    """What the checkpoint of a round must hold: each round writes a quarter of the records, and the state."""
    made = {f"records/{i}": record(i, past) for past in range(1, number + 1) for i in range(past % 4, 12, 4)}
    return made | {"state": b"%d" % number * 50}


def commit_for_ever(run: Path, pipe: int, seed: int) -> None:
    """Commits round after round, slowly around every rename, and says which ones are done."""
    dice = random.Random(seed)
    rename = os.replace

    def slowly(source: Path, target: Path) -> None:
        time.sleep(dice.random() * 0.004)
        rename(source, target)
        time.sleep(dice.random() * 0.004)

    os.replace = slowly  # type: ignore[assignment]
    store = CheckpointStore(run)
    number = store.open().round if store.rounds() else 0
    while True:
        number += 1
        for i in range(number % 4, 12, 4):
            store.put(f"records/{i}", record(i, number))
        store.put("state", b"%d" % number * 50)
        store.commit(number, {"number": number})
        os.write(pipe, b"%d\n" % number)


def test_a_run_killed_at_any_moment_goes_on_from_a_whole_round(tmp_path: Path) -> None:
    dice = random.Random(5)
    reached = inside = 0
    for attempt in range(10):
        reading, writing = os.pipe()
        pid = child(partial(commit_for_ever, tmp_path, writing, attempt))
        os.close(writing)
        with os.fdopen(reading) as said:
            said.readline()
            time.sleep(dice.random() * 0.15)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            done = [reached + 1, *map(int, said.read().split())]
        half_done = list((tmp_path / "checkpoints").glob("*.tmp")) or blobs(tmp_path) - referenced(tmp_path)
        inside += bool(half_done)
        number, found = opened(tmp_path)
        assert number >= max(done)
        assert found == expected(number)
        assert blobs(tmp_path) == referenced(tmp_path)
        reached = number
    assert inside  # at least one kill fell inside a commit


def test_records_live_on_disk_not_in_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    store = CheckpointStore(None)
    store.put("warm", os.urandom(2 << 20))
    start = resident()
    for i in range(100):
        store.put(f"records/{i}", os.urandom(2 << 20))
    assert len(store.get("records/50")) == 2 << 20
    store.commit(1, {})
    assert resident() - start < 24 << 20
    store.close()


def test_lines_are_appended_and_cut_back_to_what_a_checkpoint_recorded(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    offset = append_lines(path, '{"round":1}\n')
    assert append_lines(path, '{"round":2,"name":"é"}\n{"ro') > offset
    rewind(path, offset)
    assert path.read_text() == '{"round":1}\n' and append_lines(path, "") == offset
    rewind(path, offset)
    with one_line(str(path), "--round"):
        rewind(path, offset + 1)
    rewind(tmp_path / "absent.jsonl", 0)
    with one_line("cannot be written"):
        append_lines(tmp_path / "no" / "file", "x")


def test_unreadable_places_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with one_line("cannot be written", "no checkpoint exists yet"):
        CheckpointStore(tmp_path / "file")
    store = CheckpointStore(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with one_line("cannot be read"):
        store.open()


def test_a_commit_takes_little_memory_for_names_that_stay_as_they_were(tmp_path: Path) -> None:
    store, names = CheckpointStore(tmp_path), 3000
    for number in range(names):
        store.put(f"records/{number:05d}", b"the same for all")
    store.commit(1, {})
    tracemalloc.start()
    try:
        store.put("records/00007", b"another")
        store.commit(2, {})
        first = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    manifest = (tmp_path / "checkpoints" / "round-00002.json").stat().st_size
    assert manifest > 80 * names
    assert first < manifest + 150 * names  # one more dict of names, and a piece of the text
