"""A run's folder: who may write in it, what stands in its config.yaml, and its append-only records."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import filelock
import yaml

from coterie.errors import CheckpointError, ConfigError, RunError
from coterie.experiments.config import RECORDED, Config, dump, parse, read_mapping
from coterie.training.asks import Plan

CONFIG, PARTITION, SUMMARY = "config.yaml", "partition.json", "summary.json"
ADAPTERS, UPLOADS = "adapters", "uploads"
RECORDS = ("metrics.jsonl", "timing.jsonl", "ledger.jsonl")
"""One JSON object a line: of a round (a pure function of the configuration), its seconds, and every message."""


def claim(folder: Path) -> None:
    """Makes the folder of a new run. Hidden files do not count: a run that was killed as it began leaves such.

    Raises:
        ConfigError: a folder that is not empty, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        empty = all(entry.name.startswith(".") for entry in folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder}: the run folder cannot be made ({error.strerror or error})") from error
    if not empty:
        way = f"coterie resume {folder}, or " if (folder / CONFIG).exists() else ""
        raise ConfigError(f"{folder} is not empty; {way}choose another folder with --folder")


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Holds the folder; a second process that wants it is refused with a RunError."""
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise RunError(f"{folder}: another process is at work on this run") from error
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror or error})") from error
    try:
        yield
    finally:
        lock.release()


def write_config(folder: Path, config: Config, plan: Plan, extra: Mapping[str, Any]) -> None:
    """config.yaml: the resolved settings, and what was recorded of this run. It can itself be run again."""
    recorded = {"versions": versions(), "plan": asdict(plan), **extra}
    text = yaml.safe_dump({**dump(config), RECORDED: recorded}, sort_keys=False, allow_unicode=True)
    write_whole(folder / CONFIG, text)


def read_config(folder: Path) -> tuple[Config, dict[str, Any]]:
    """The settings of a run and what was recorded of it.

    Raises:
        ConfigError: no run in that folder, or a config.yaml that is damaged.
    """
    place = folder / CONFIG
    if not place.is_file():
        raise ConfigError(f"{folder}: there is no run here (no {CONFIG})")
    config = parse(read_mapping(place))
    recorded = yaml.safe_load(place.read_text(encoding="utf-8")).get(RECORDED)
    if not isinstance(recorded, dict) or "plan" not in recorded:
        raise ConfigError(f"{place}: the section {RECORDED!r} is missing; a run's own file is needed to resume it")
    return config, recorded


def read_plan(recorded: Mapping[str, Any]) -> Plan:
    """The execution plan that was recorded; raises ConfigError when it is damaged."""
    try:
        return Plan(**recorded["plan"])
    except TypeError as error:
        raise ConfigError(f"{RECORDED}.plan in {CONFIG}: {error}") from error


def versions() -> dict[str, str]:
    """What the results of a run depend on besides its settings."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("coterie", "torch", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def write_whole(place: Path, text: str) -> None:
    """Writes a file that is there as a whole or not at all; raises CheckpointError when it cannot be written."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{place.name}-", dir=place.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, place)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be written ({error.strerror or error})") from error


def json_text(value: Any) -> str:
    """JSON on one line; numbers that are not finite, which JSON lacks, become null."""
    return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


def read_lines(place: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, up to the first line that is not whole; none where there is no file."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError):
        for line in place.read_text(encoding="utf-8").splitlines():
            found.append(json.loads(line))
    return found
