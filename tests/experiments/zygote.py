"""A process for the resume tests: it imports everything once, then forks runs and kills them.

Every line of stdin is a JSON object: config (a mapping), runs, a mapping from folders to attempts, and environment,
which is taken over. An attempt is {"after": seconds} (killed then), {"at": event} (the run kills itself at that event)
or {} (plays to the end); it starts the run or resumes it. Prints for each line a JSON mapping from folders to how each
attempt ended: an exit code, or minus the signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import coterie.engines.checkpoints as checkpoints
import coterie.experiments.runs as runs
from coterie.experiments.build import build
from coterie.experiments.config import parse
from coterie.experiments.folders import UPLOADS
from coterie.training.asks import Plan


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(event: str) -> None:
    """Makes this process kill itself, without any warning, at the first such event."""
    replace, append, write = os.replace, checkpoints.append_lines, checkpoints._write
    write_bytes = Path.write_bytes

    def before_manifest(source: Any, target: Any) -> None:
        if Path(target).name.startswith("round-"):
            die()
        replace(source, target)

    def after_manifest(source: Any, target: Any) -> None:
        replace(source, target)
        if Path(target).name.startswith("round-"):
            die()

    def after_first_blob(source: Any, target: Any) -> None:
        replace(source, target)
        if Path(target).parent.name == "blobs":
            die()

    def half_a_line(path: Path, lines: str) -> int:
        if path.name == "metrics.jsonl":
            append(path, lines[: len(lines) // 2])
            die()
        return append(path, lines)

    def half_a_blob(path: Path, pieces: Iterable[bytes]) -> None:
        data = b"".join(pieces)
        if len(data) > 4096:
            write(path, [data[: len(data) // 2]])
            die()
        write(path, [data])

    def half_an_upload(path: Path, data: bytes) -> int:
        if path.parent.name == UPLOADS:
            write(path, [data[: len(data) // 2]])
            die()
        return write_bytes(path, data)

    if event == "half a line":
        runs.append_lines = half_a_line
    elif event == "half a blob":
        checkpoints._write = half_a_blob
    elif event == "half an upload":
        Path.write_bytes = half_an_upload  # type: ignore[assignment, method-assign]
    elif event == "adapters":
        runs.summarise = die
    else:
        os.replace = {  # type: ignore[assignment]
            "before the manifest": before_manifest,
            "after the manifest": after_manifest,
            "between blobs": after_first_blob,
        }[event]


def attempt(config: dict[str, Any], folder: Path, how: dict[str, Any]) -> int:
    """Forks one attempt and waits for its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if "at" in how:
                arm(how["at"])
            if (folder / "config.yaml").is_file():
                runs.resume(folder)
            else:
                runs.run(config, folder)
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(code)
    if "after" in how:
        time.sleep(how["after"])
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def prepare(config: dict[str, Any]) -> None:
    """Imports what the attempts then need not."""
    build(parse(config), Plan())
    if config.get("tracking"):
        import mlflow  # noqa: F401
        import torch.utils.tensorboard  # noqa: F401


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        os.environ.update(asked["environment"])
        prepare(asked["config"])
        ended = {
            folder: [attempt(asked["config"], Path(folder), how) for how in attempts]
            for folder, attempts in asked["runs"].items()
        }
        print(json.dumps(ended), flush=True)
