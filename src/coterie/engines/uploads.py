"""Where a round's uploads wait for the others: in memory as far as they fit there, beyond that on disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from coterie.errors import RunError
from coterie.wire.codec import encode, opened, size


class Waiting:
    """The uploads of one round, between their arrival and the new state.

    folder: where those are written that do not fit into `memory` bytes, and removed from after the round. It holds
    nothing else, and what a killed run left there is worthless. None: all stay in memory.
    """

    def __init__(self, folder: Path | None = None, memory: int = 0) -> None:
        self.folder = folder
        self.memory = memory
        self._held = 0
        self._written = 0
        self.clear()

    def kept(self, payload: Any) -> Any:
        """The same payload: as it is, or with dicts (`Unread`) that read from disk what is asked of them.

        The two give the same result to the bit. Raises RunError where the disk refuses.
        """
        if self.folder is None:
            return payload
        amount = size(payload).total
        if self._held + amount <= self.memory:
            self._held += amount
            return payload
        path = self.folder / f"{self._written:06d}.safetensors"
        try:
            self.folder.mkdir(exist_ok=True)
            path.write_bytes(encode(payload))
        except OSError as error:
            way = "free space, or raise execution.upload_memory"
            raise RunError(f"{path}: an upload cannot be written ({error.strerror}); {way}, then resume") from error
        self._written += 1
        return opened(path)

    def clear(self) -> None:
        """Forgets the round; payloads that `kept` gave must not be used any more."""
        self._held = self._written = 0
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
