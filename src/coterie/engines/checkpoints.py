"""Checkpoints on disk: atomic, verified, and only what changed is written.

    <run>/checkpoints/blobs/<sha256>       one file for each content, written once, never changed
    <run>/checkpoints/staged/              blobs put since the last commit; worthless after a crash
    <run>/checkpoints/round-00012.json     the manifest: which name has which content, written last

A checkpoint exists from the moment when its manifest has its name. Until then, whatever fails or is killed,
the one before it stays whole. The manifest lists every name, about 100 bytes each, written piece by piece: fine for
10,000 clients.

A run folder belongs to one process at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import CheckpointError

FORMAT = 1
SYNCS = 16
"""Files waited for at once: a disk that takes milliseconds for each takes hardly more for many together."""

_LISTED, _PIECE = 256, 2**17  # names of a manifest that are made text at a time, and bytes that are written at once
_QUEUED = 512  # files handed to the waiting threads at a time, each of which costs memory
_NAME = re.compile(r"round-(\d+)\.json")
_NEXT = "free space or mend the folder, then resume the run"


@dataclass(frozen=True, slots=True)
class Blob:
    """A content: its sha256 and its length in bytes, in one piece, since a run has one for each site."""

    packed: bytes

    @classmethod
    def of(cls, sha256: str, size: int) -> Blob:
        """From the hash in hex, and the length."""
        return cls(bytes.fromhex(sha256) + size.to_bytes(8))

    @property
    def sha256(self) -> str:
        """In hex."""
        return self.packed[:32].hex()

    @property
    def size(self) -> int:
        """In bytes."""
        return int.from_bytes(self.packed[32:])


@dataclass(frozen=True)
class Checkpoint:
    """A committed round: the metadata given at the commit, and the content of every name."""

    round: int
    metadata: dict[str, Any]
    blobs: dict[str, Blob]


class CheckpointStore:
    """Named blobs of bytes: staged by `put`, durable from the next `commit`. Sites' records live here too.

    `run` is the run's folder, or None for a temporary one that goes with the store; the last `keep`
    checkpoints stay. Memory holds names and hashes, once for all checkpoints, never contents. When the disk refuses:
    CheckpointError.
    """

    def __init__(self, run: Path | str | None, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, not {keep}")
        self.keep = keep
        self._temporary = tempfile.TemporaryDirectory(prefix="coterie-") if run is None else None
        self.folder = Path(self._temporary.name if self._temporary else str(run)) / "checkpoints"
        self._current: Checkpoint | None = None
        self._kept: dict[int, dict[str, Blob]] = {}
        self._staged: dict[str, Blob] = {}
        self._uses: Counter[str] = Counter()
        self._deleted: set[str] = set()
        with self._writing(self.folder):
            self._blobs.mkdir(parents=True, exist_ok=True)
            self._waiting.mkdir(exist_ok=True)

    def put(self, name: str, data: bytes) -> None:
        """Stages `data` under `name`; on failure the name keeps what it had."""
        blob = Blob.of(hashlib.sha256(data).hexdigest(), len(data))
        path = self._waiting / blob.sha256
        if blob.sha256 not in self._uses and not _holds(self._blobs / blob.sha256, data):
            with self._writing(path):
                _write(path, [data])
        self._uses[blob.sha256] += 1  # before the old content goes, which may be the same
        self._unstage(name)
        self._deleted.discard(name)
        self._staged[name] = blob

    def get(self, name: str) -> bytes:
        """What was last put under `name`, checked against its hash; KeyError when there is none."""
        if name in self._staged:
            blob = self._staged[name]
        elif self._current is None or name in self._deleted:
            raise KeyError(name)
        else:
            blob = self._current.blobs[name]
        path = self._path(blob.sha256)
        damage = _damage(path, blob)
        if isinstance(damage, bytes):
            return damage
        suspect = self._current.round if self._current is not None and name not in self._staged else None
        raise CheckpointError(f"{path}: {name!r} {damage}; {self._way_out(suspect)}")

    def delete(self, name: str) -> None:
        """Removes `name` from the next checkpoint on; KeyError when there is none."""
        if name not in self:
            raise KeyError(name)
        self._unstage(name)
        self._deleted.add(name)

    def names(self) -> list[str]:
        """All names, staged ones too, sorted."""
        return sorted(self._next())

    def __contains__(self, name: object) -> bool:
        committed = self._current is not None and name in self._current.blobs and name not in self._deleted
        return name in self._staged or committed

    def rounds(self) -> list[int]:
        """The rounds that have a manifest on disk, ascending; damaged ones too."""
        try:
            found = [_NAME.fullmatch(entry.name) for entry in os.scandir(self.folder)]
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be read ({error.strerror})") from error
        return sorted(int(match[1]) for match in found if match)

    def open(self, round: int | None = None) -> Checkpoint:
        """Goes back to the newest checkpoint, or to that of `round`; what was staged is forgotten.

        Removes what killed writes left. Contents are checked when read, here only for their length.
        """
        rounds = self.rounds()
        if not rounds:
            raise CheckpointError(f"{self.folder}: holds no checkpoint yet; start the run again")
        number = rounds[-1] if round is None else round
        if number not in rounds:
            known = ", ".join(map(str, rounds))
            raise CheckpointError(f"{self.folder}: no checkpoint of round {number}; there are those of {known}")
        opened = self._read(number)
        for name, blob in opened.blobs.items():
            path = self._blobs / blob.sha256
            size = _size(path)
            if size != blob.size:
                reason = "is missing" if size is None else f"has {size} bytes where {blob.size} are expected"
                raise CheckpointError(f"{path}: {name!r} {reason}; {self._way_out(number)}")
        self._current = opened
        self._kept = {}
        unknown = False
        for other in rounds:
            try:
                kept = opened if other == number else self._read(other)
            except CheckpointError:
                unknown = True
            else:
                self._kept[other] = _sharing(kept.blobs, opened.blobs)
        self._forget_staged()
        self._sweep(blobs=not unknown)
        return opened

    def commit(self, round: int, metadata: Mapping[str, Any]) -> None:
        """Makes what is staged durable as the checkpoint of `round`, then drops what is too old.

        metadata: JSON-able. Checkpoints newer than the opened one are dropped first; they are of another
        course of the run. When this raises, the last checkpoint is whole, and committing again is possible.
        """
        if self._current is None and self.rounds():
            raise CheckpointError(f"{self.folder}: holds a run already; resume it or choose another folder")
        if self._current is not None and round < self._current.round:
            raise ValueError(f"round {round} after round {self._current.round}")
        made = Checkpoint(round, dict(metadata), self._next())
        self.drop_newer()
        path = self._manifest(round)
        with self._writing(path):
            waiting = [digest for digest in sorted(self._uses) if (self._waiting / digest).exists()]
            with ThreadPoolExecutor(SYNCS) as pool:
                for start in range(0, len(waiting), _QUEUED):
                    list(pool.map(self._sync, [self._waiting / digest for digest in waiting[start : start + _QUEUED]]))
            for digest in waiting:
                os.replace(self._waiting / digest, self._blobs / digest)
            self._sync(self._blobs)
            _write(path.with_suffix(".tmp"), _manifest(made))
            self._sync(path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
        self._current = made
        replaced = self._kept.get(round, {})
        self._kept[round] = made.blobs
        self._forget_staged()
        with self._writing(path):
            self._sync(self.folder)
        self._prune([replaced])

    def drop_newer(self) -> None:
        """Drops checkpoints newer than the opened one: call it before other files of the run are rewound."""
        if self._current is None:
            return
        with self._writing(self.folder):
            for number in self.rounds():
                if number > self._current.round:
                    self._manifest(number).unlink()
                    self._kept.pop(number, None)
            self._sync(self.folder)

    def close(self) -> None:
        """Removes a temporary store; another one keeps all that was committed."""
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def _blobs(self) -> Path:
        return self.folder / "blobs"

    @property
    def _waiting(self) -> Path:
        return self.folder / "staged"

    def _manifest(self, number: int) -> Path:
        return self.folder / f"round-{number:05d}.json"

    def _path(self, digest: str) -> Path:
        waiting = self._waiting / digest
        return waiting if digest in self._uses and waiting.exists() else self._blobs / digest

    def _next(self) -> dict[str, Blob]:
        committed = {} if self._current is None else self._current.blobs
        return {name: blob for name, blob in committed.items() if name not in self._deleted} | self._staged

    def _unstage(self, name: str) -> None:
        blob = self._staged.pop(name, None)
        if blob is None:
            return
        self._uses[blob.sha256] -= 1
        if not self._uses[blob.sha256]:
            del self._uses[blob.sha256]
            _remove(self._waiting / blob.sha256)

    def _forget_staged(self) -> None:
        self._staged.clear()
        self._uses.clear()
        self._deleted.clear()

    def _read(self, number: int) -> Checkpoint:
        path = self._manifest(number)
        try:
            return _manifest_of(path.read_bytes(), number)
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
        except ValueError as error:
            reason = f"is damaged ({error})"
        raise CheckpointError(f"{path}: {reason}; {self._way_out(number)}")

    def _way_out(self, damaged: int | None) -> str:
        """What to do about a damaged checkpoint: the newest other one whose every content is whole."""
        for number in reversed(self.rounds()):
            if number == damaged:
                continue
            try:
                other = _manifest_of(self._manifest(number).read_bytes(), number)
            except (OSError, ValueError):
                continue
            if all(isinstance(_damage(self._blobs / b.sha256, b), bytes) for b in other.blobs.values()):
                return f"resume from round {number} with --round {number}"
        return "no other checkpoint is intact: restore the folder from a copy, or start the run again"

    def _prune(self, gone: list[dict[str, Blob]]) -> None:
        """Drops all checkpoints before the last `keep`, then contents that no kept one names.

        gone: what a checkpoint named that was replaced. The commit stands by now: what cannot be removed is left to the
        next `open`.
        """
        gone += [self._kept.pop(number) for number in sorted(self._kept)[: -self.keep]]
        kept = list(self._kept.values())
        candidates = {blob.packed for blobs in gone for name, blob in blobs.items() if kept[0].get(name) is not blob}
        for blobs in kept:
            candidates.difference_update(blob.packed for blob in blobs.values())
        with contextlib.suppress(CheckpointError):
            for number in self.rounds():
                if number < min(self._kept):
                    _remove(self._manifest(number))
        for packed in candidates:
            _remove(self._blobs / Blob(packed).sha256)

    def _sweep(self, blobs: bool) -> None:
        """Removes what killed writes left, and contents that nobody names if all manifests could be read."""
        leftovers = [*self._waiting.iterdir(), *self.folder.glob("*.tmp")]
        if blobs:
            named = {blob.sha256 for kept in self._kept.values() for blob in kept.values()}
            leftovers += [path for path in self._blobs.iterdir() if path.name not in named]
        for path in leftovers:
            _remove(path)

    def _sync(self, path: Path) -> None:
        """Waits until a file, or the names in a folder, are on disk; a temporary store need not survive."""
        if self._temporary is None and not (os.name == "nt" and path.is_dir()):
            handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kept = "no checkpoint exists yet"
            if self._current is not None:
                kept = f"the checkpoint of round {self._current.round} is intact"
            raise CheckpointError(f"{path}: cannot be written ({error.strerror}); {kept}; {_NEXT}") from error


def append_lines(path: Path, lines: str) -> int:
    """Appends text to a file of JSON lines; returns its length in bytes, the offset for a checkpoint."""
    try:
        with path.open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
            return file.tell()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror}); {_NEXT}") from error


def rewind(path: Path, offset: int) -> None:
    """Cuts a file of JSON lines back to the length that a checkpoint recorded; a missing file is empty."""
    size = _size(path) or 0
    if size < offset:
        reason = f"has {size} bytes where the checkpoint recorded {offset}"
        raise CheckpointError(f"{path}: {reason}; resume from an earlier round with --round")
    if size > offset:
        try:
            os.truncate(path, offset)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be cut back to {offset} bytes ({error.strerror})") from error


def _manifest(checkpoint: Checkpoint) -> Iterator[bytes]:
    """{"sha256": ..., "manifest": {...}}: JSON with the checksum of the inner object's bytes, which are made twice."""
    digest = hashlib.sha256()
    for piece in _inner(checkpoint):
        digest.update(piece)
    pending = b'{"sha256":"%s","manifest":' % digest.hexdigest().encode()
    for piece in _inner(checkpoint):
        pending += piece
        if len(pending) >= _PIECE:
            yield pending
            pending = b""
    yield pending + b"}\n"


def _inner(checkpoint: Checkpoint) -> Iterator[bytes]:
    """The inner object, some names at a time: for 10,000 clients it is a megabyte, and several while it is made."""
    head = {"format": FORMAT, "round": checkpoint.round, "metadata": checkpoint.metadata, "blobs": {}}
    yield json.dumps(head, separators=(",", ":"))[:-2].encode()
    names = sorted(checkpoint.blobs)
    for start in range(0, len(names), _LISTED):
        listed = {name: checkpoint.blobs[name] for name in names[start : start + _LISTED]}
        some = json.dumps({name: [b.sha256, b.size] for name, b in listed.items()}, separators=(",", ":"))
        yield (("," if start else "") + some[1:-1]).encode()
    yield b"}}"


def _manifest_of(data: bytes, number: int) -> Checkpoint:
    match = re.fullmatch(rb'\{"sha256":"([0-9a-f]{64})","manifest":(.*)\}\n', data, re.DOTALL)
    if match is None or hashlib.sha256(match[2]).hexdigest() != match[1].decode():
        raise ValueError("its checksum does not match")
    inner = json.loads(match[2])
    if inner["format"] != FORMAT or inner["round"] != number:
        raise ValueError(f"of format {inner['format']} and round {inner['round']}, not {FORMAT} and {number}")
    listed = inner["blobs"].items()
    if not all(isinstance(size, int) and 0 <= size < 2**63 for _, (_, size) in listed):
        raise ValueError("it lists a content without a length")
    blobs = {sys.intern(name): Blob.of(*pair) for name, pair in listed}
    return Checkpoint(number, inner["metadata"], blobs)


def _sharing(blobs: dict[str, Blob], known: dict[str, Blob]) -> dict[str, Blob]:
    """The same with the objects that are known where they are equal, so that they are held once."""
    return {name: known[name] if known.get(name) == blob else blob for name, blob in blobs.items()}


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
    try:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(handle, rest) :]
    except OSError:
        _remove(path)
        raise
    finally:
        os.close(handle)


def _damage(path: Path, blob: Blob) -> bytes | str:
    """The content when it is whole, or what is wrong with the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if len(data) != blob.size:
        return f"has {len(data)} bytes where {blob.size} are expected"
    return data if hashlib.sha256(data).hexdigest() == blob.sha256 else "is damaged (its checksum does not match)"


def _holds(path: Path, data: bytes) -> bool:
    try:
        return _size(path) == len(data) and path.read_bytes() == data
    except OSError:
        return False


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
