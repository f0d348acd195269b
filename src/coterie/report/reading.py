"""Run folders as a report reads them: whatever is there, and what is missing said in a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from coterie.errors import ConfigError, RunError

CONFIG, SUMMARY, PARTITION, COMPARISON = "config.yaml", "summary.json", "partition.json", "comparison.json"
METRICS, TIMING, LEDGER = "metrics.jsonl", "timing.jsonl", "ledger.jsonl"

MOST = 1e100
"""Numbers from here on are damage, or have no meaning that a figure could show."""

MOST_LEDGER = 40_000_000
"""Bytes of a ledger.jsonl above which a report does not go through its single messages."""


@dataclass(frozen=True)
class Run:
    """One run folder. `metrics` and `timing` are the readable lines, rounds ascending; `summary` is empty until the
    run is finished, `partition` where there is none. `gaps` say what could not be read."""

    folder: Path
    method: str
    title: str
    seed: int
    config: Mapping[str, Any]
    recorded: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]
    timing: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    partition: Mapping[str, Any]
    gaps: tuple[str, ...]

    @property
    def finished(self) -> bool:
        """Whether its summary is there."""
        return bool(self.summary)

    @property
    def rounds(self) -> int:
        """The last round of which there is a line."""
        return int(self.metrics[-1]["round"])


@dataclass(frozen=True)
class Found:
    """What the named places hold. `comparison` is the content of comparison.json where one comparison was named and
    nothing else; `notes` say what was left out."""

    runs: tuple[Run, ...]
    comparison: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def at(record: Any, *path: str) -> Any:
    """The value at a path of keys; None where it ends early."""
    for key in path:
        if not isinstance(record, Mapping):
            return None
        record = record.get(key)
    return record


def number(value: Any) -> float | None:
    """A number that can be drawn, finite and below `MOST`; None for anything else."""
    whole = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST
    return float(value) if whole else None


def texts(value: Any) -> list[str]:
    """The items of a list as text; none of anything else."""
    return [str(one) for one in value] if isinstance(value, list) else []


def mapping(value: Any) -> Mapping[str, Any]:
    """The mapping itself; an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def collect(places: Sequence[Path]) -> Found:
    """The runs of run folders, of comparisons, and of folders that hold runs, each once, in this order.

    Raises:
        ConfigError: a place that is no such folder, or a config.yaml that cannot be read.
        RunError: no run has played a round.
    """
    folders: dict[Path, Path] = {}
    stored: Mapping[str, Any] = {}
    notes: list[str] = []
    for place in places:
        for folder in _run_folders(place):
            folders.setdefault(folder.resolve(), folder)
        if len(places) == 1 and (place / COMPARISON).is_file():
            stored, gap = _json(place / COMPARISON)
            notes += gap
    runs = []
    for folder in folders.values():
        run = read_run(folder)
        if run.metrics:
            runs.append(run)
        else:
            notes += [*run.gaps, f"{folder}: no round has been played, so it is left out"]
    if not runs:
        raise RunError(f"{', '.join(map(str, places))}: no round has been played, so there is nothing to report yet")
    order = list(mapping(stored.get("methods")))
    runs.sort(key=lambda run: order.index(run.method) if run.method in order else len(order))
    return Found(tuple(runs), stored, tuple(notes))


def read_run(folder: Path) -> Run:
    """One run; raises ConfigError where its config.yaml is missing or cannot be read."""
    config = _config(folder)
    metrics, missing = _lines(folder / METRICS)
    timing, late = _lines(folder / TIMING)
    gaps = missing + late
    summary: Mapping[str, Any] = {}
    partition: Mapping[str, Any] = {}
    if (folder / SUMMARY).is_file():
        summary, gap = _json(folder / SUMMARY)
        gaps += gap
    if (folder / PARTITION).is_file():
        partition, gap = _json(folder / PARTITION)
        gaps += gap
    method = str(config["method"])
    seed = config.get("seed")
    return Run(
        folder=folder,
        method=method,
        title=str(summary.get("title") or _title(method)),
        seed=seed if isinstance(seed, int) else 0,
        config={key: value for key, value in config.items() if key != "recorded"},
        recorded=mapping(config.get("recorded")),
        metrics=tuple(metrics),
        timing=tuple(timing),
        summary=summary,
        partition=partition,
        gaps=tuple(gaps),
    )


def client_ranks(run: Run) -> dict[str, int]:
    """The rank of every client, by id; before a run is finished, as its settings deal them out."""
    told = {name: at(facts, "rank") for name, facts in mapping(run.summary.get("clients")).items()}
    if told:
        return {name: rank for name, rank in told.items() if isinstance(rank, int)}
    section = mapping(run.config.get("clients"))
    count = section.get("count")
    count = count if isinstance(count, int) else len(mapping(at(run.metrics[-1], "personal", "clients", "accuracy")))
    ids, given = section.get("ids"), section.get("ranks")
    names = ids if isinstance(ids, list) else [f"{n:0{max(2, len(str(count - 1)))}d}" for n in range(count)]
    ranks = given if isinstance(given, list) else [given]
    dealt = {str(name): ranks[place % len(ranks)] for place, name in enumerate(names) if ranks}
    return {name: rank for name, rank in dealt.items() if isinstance(rank, int)}


def sent_by_client(run: Run) -> dict[str, dict[str, int]] | None:
    """{client: {"up": bytes, "down": bytes}} over the run, evaluation apart; None without a ledger that can be read
    in passing."""
    place = run.folder / LEDGER
    if not place.is_file() or place.stat().st_size > MOST_LEDGER:
        return None
    sent: dict[str, dict[str, int]] = {}
    for row in _lines(place)[0]:
        way, client = row.get("direction"), row.get("client")
        if row.get("kind") == "evaluation" or way not in ("up", "down"):
            continue
        amount = (number(row.get("payload")) or 0) + (number(row.get("overhead")) or 0)
        held = sent.setdefault(str(client), {"up": 0, "down": 0})
        held[way] += int(amount)
    return sent


def shown(folder: Path) -> str:
    """A path as a report writes it: inside of the home folder from ~ on, so that a page names nobody."""
    home, text = str(Path.home()), str(folder)
    return f"~{text[len(home) :]}" if home != "/" and (text == home or text.startswith(f"{home}/")) else text


def _run_folders(place: Path) -> list[Path]:
    """The folder itself when it is a run's, else those directly in it, in order of name."""
    if (place / CONFIG).is_file():
        return [place]
    if not place.is_dir():
        raise ConfigError(f"{place}: there is no such folder; name a run's folder, such as runs/demo-fedit-seed0")
    inside = sorted(folder for folder in place.iterdir() if (folder / CONFIG).is_file())
    if not inside:
        raise ConfigError(f"{place}: there is no run here (no {CONFIG}), nor in the folders inside")
    return inside


def _config(folder: Path) -> Mapping[str, Any]:
    place = folder / CONFIG
    try:
        content = yaml.safe_load(place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{place}{line}: not YAML; put a run's own file back") from error
    if not isinstance(content, dict) or not isinstance(content.get("method"), str):
        raise ConfigError(f"{place}: names no method, so it is not the file of a run")
    return content


def _json(place: Path) -> tuple[dict[str, Any], list[str]]:
    """A JSON file's mapping, and what is wrong with it."""
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}, [f"{shown(place)} cannot be read; what it would tell is missing"]
    if not isinstance(content, dict):
        return {}, [f"{shown(place)} holds no mapping; what it would tell is missing"]
    return content, []


def _lines(place: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects of a JSON-lines file, of metrics and timing by round; damaged lines are left out and told."""
    found: list[dict[str, Any]] = []
    damaged: list[int] = []
    try:
        texts = place.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [], []
    for place_in, text in enumerate(texts, 1):
        try:
            row = json.loads(text)
        except ValueError:
            damaged.append(place_in)
            continue
        if isinstance(row, dict) and type(row.get("round")) is int and 0 <= row["round"] < 10**9:
            found.append(row)
        else:
            damaged.append(place_in)
    found.sort(key=lambda row: row["round"])
    return found, [_damaged(place, damaged)] if damaged else []


def _damaged(place: Path, lines: Iterable[int]) -> str:
    listed = list(lines)
    told = ", ".join(map(str, listed[:5])) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
    return f"{shown(place)}: line{'s' if len(listed) > 1 else ''} {told} damaged and left out, of sums too"


def _title(method: str) -> str:
    """What a method calls itself, as far as that is known without a summary."""
    path, colon, kind = method.rpartition(":")
    if colon:
        return kind or path
    from coterie.algorithms import METHODS

    return METHODS[method].traits.title if method in METHODS else method
