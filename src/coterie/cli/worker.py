"""A run as a worker of a comparison: the command line, which ends when the process that started it does."""

from __future__ import annotations

import os
import threading

from coterie.cli.main import main

ABANDONED = 1


def _end_with_starter() -> None:
    """Waits for the end of standard input, a pipe whose other end the starter holds, and ends this process at once:
    a run is safe against that at any moment. os.read, since a buffered reader would block a normal exit."""
    while os.read(0, 1):
        pass
    os._exit(ABANDONED)


if __name__ == "__main__":
    threading.Thread(target=_end_with_starter, daemon=True).start()
    main()
