"""What simulated sites keep between rounds, held by the run's store rather than in memory."""

from __future__ import annotations

from typing import Protocol

from coterie.protocol import Memory, SiteRecord, copied
from coterie.wire.codec import decode, encode


class Store(Protocol):
    """Named blobs: staged by `put`, durable with the run's next checkpoint."""

    def put(self, name: str, data: bytes) -> None:
        """Stages a blob."""

    def get(self, name: str) -> bytes:
        """The blob as last put; KeyError when there is none."""

    def __contains__(self, name: object) -> bool: ...


class Volatile:
    """A store in memory, for runs that keep nothing."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        self._blobs[name] = data

    def get(self, name: str) -> bytes:
        return self._blobs[name]

    def __contains__(self, name: object) -> bool:
        return name in self._blobs


class Draft:
    """What a round under way writes, over a store that it does not touch until the round is played."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._blobs: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        self._blobs[name] = data

    def get(self, name: str) -> bytes:
        return self._blobs[name] if name in self._blobs else self._store.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._blobs or name in self._store

    def settle(self) -> None:
        """Hands everything on to the store."""
        for name, data in self._blobs.items():
            self._store.put(name, data)
        self._blobs.clear()


def load_record(store: Store, client: str) -> SiteRecord:
    """What this site has kept; an empty record before its first round."""
    name = f"records/{client}"
    if name not in store:
        return SiteRecord()
    record = decode(store.get(name))
    assert isinstance(record, SiteRecord)
    return record


def save_record(store: Store, client: str, record: SiteRecord) -> None:
    """Stages what this site keeps from now on."""
    store.put(f"records/{client}", encode(record))


def memory_of(record: SiteRecord, read_only: bool = False) -> Memory:
    """A transaction over the site's own values."""
    return Memory(record.memory, copied, read_only)
