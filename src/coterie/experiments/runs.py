"""Runs: `run` starts one in a folder of its own, `resume` goes on where a run was broken off.

After a round its lines are appended to metrics.jsonl, timing.jsonl and ledger.jsonl; then a checkpoint is committed
that knows the lengths of these files. So a run that was killed at any moment continues from its last checkpoint and
ends with the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from coterie.engines.base_versions import store_state, stored_state
from coterie.engines.checkpoints import CheckpointStore, append_lines, rewind
from coterie.engines.in_process import InProcess, Played, Progress
from coterie.engines.uploads import Waiting
from coterie.errors import CheckpointError, DataError, ModelError, RunError, WireError
from coterie.experiments.adapters import write_adapters
from coterie.experiments.build import Built, build
from coterie.experiments.config import Config, PartSection, TaskSection, load, parse
from coterie.experiments.folders import (
    ADAPTERS,
    CONFIG,
    PARTITION,
    RECORDS,
    SUMMARY,
    UPLOADS,
    alone_in,
    claim,
    json_text,
    read_config,
    read_lines,
    read_plan,
    versions,
    write_config,
    write_whole,
)
from coterie.experiments.methods import short_name
from coterie.experiments.observers import About, Observer, Silent
from coterie.experiments.summary import summarise
from coterie.experiments.tracking import grounded_uri, tracked
from coterie.wire.codec import decode, encode
from coterie.wire.ledger import Ledger, to_jsonl

MIB = 2**20

SomeTask = TypeVar("SomeTask", TaskSection, PartSection)


@dataclass(frozen=True)
class RunResult:
    """A finished run; `summary` is the content of its summary.json, `resumed_finished` that nothing was left to do."""

    folder: Path
    config: Config
    summary: dict[str, Any]
    resumed_finished: bool = False

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one for each round."""
        return read_lines(self.folder / "metrics.jsonl")


def run(
    config: Config | Mapping[str, Any] | str | Path,
    folder: str | Path | None = None,
    observer: Observer | None = None,
) -> RunResult:
    """Plays a whole run in a new folder, by default runs/<name>-<method>-seed<seed>.

    Raises:
        ConfigError, DataError, ModelError: before anything is written, for what cannot be meant.
        RunError, CheckpointError: when the run breaks off; what was computed is kept, and `resume` goes on.
    """
    settings = grounded(_settled(config))
    place = Path(folder) if folder is not None else default_folder(settings)
    watcher = tracked(settings, observer or Silent())
    claim(place)
    with alone_in(place):
        try:
            built = build(settings)
            write_config(place, settings, built.plan, {"base": built.base.digest, **_clients_digests(built)})
            write_whole(place / PARTITION, json_text(built.partition) + "\n")
        except BaseException:
            _vacate(place)
            raise
        return _play(place, settings, built, watcher)


def resume(folder: str | Path, observer: Observer | None = None, round: int | None = None) -> RunResult:
    """Goes on with a run from its last checkpoint (or that of `round`), on the plan that it began with.

    Raises:
        ConfigError: no run in that folder.
        DataError, ModelError: data or base model are no longer those that the run began with.
        CheckpointError: a checkpoint that cannot be trusted.
        RunError: another process is at work on it, or too few clients answer.
    """
    place = Path(folder)
    settings, recorded = read_config(place)
    with alone_in(place):
        if round is None and (place / SUMMARY).is_file():
            summary = json.loads((place / SUMMARY).read_text(encoding="utf-8"))
            _hand_on(place, settings, summary)
            return RunResult(place, settings, summary, True)
        watcher = tracked(settings, observer or Silent())
        changed = [name for name, value in versions().items() if recorded.get("versions", {}).get(name) != value]
        if changed:
            watcher.note(f"{', '.join(changed)} changed since this run began; its last bits may differ")
        built = build(settings, read_plan(recorded))
        _check_unchanged(place, built, recorded)
        return _play(place, settings, built, watcher, round)


def default_folder(config: Config) -> Path:
    """runs/<name>-<method>-seed<seed>."""
    return Path("runs") / f"{config.name}-{short_name(config.method)}-seed{config.seed}"


def grounded(config: Config) -> Config:
    """The same settings with absolute paths, so that a run can be resumed from any working folder."""
    task = _grounded_task(config.task)
    for several in ("parts", "zero_shot"):
        if (sections := getattr(task, several)) is not None:
            task = task.model_copy(update={several: [_grounded_task(part) for part in sections]})
    model, method = config.model, config.method
    if Path(model.base).expanduser().is_dir():
        model = model.model_copy(update={"base": _absolute(model.base)})
    path, _, kind = method.rpartition(":")
    if path.endswith(".py"):
        method = f"{_absolute(path)}:{kind}"
    tracking = config.tracking
    if tracking.mlflow is not None:
        tracking = tracking.model_copy(update={"mlflow": grounded_uri(tracking.mlflow)})
    clients, compression = config.clients, config.compression
    if clients.bases is not None:
        bases = [_absolute(base) if Path(base).expanduser().is_dir() else base for base in clients.bases]
        clients = clients.model_copy(update={"bases": bases})
    if compression.text is not None and Path(compression.text).expanduser().is_file():
        compression = compression.model_copy(update={"text": _absolute(compression.text)})
    changed = {"task": task, "model": model, "method": method, "tracking": tracking}
    return config.model_copy(update=changed | {"clients": clients, "compression": compression})


def load_checkpoint(store: CheckpointStore, round: int | None = None) -> tuple[Progress | None, Ledger, dict[str, int]]:
    """Where a run stands: progress (None before the first checkpoint), ledger, and the lengths of its records.

    Raises:
        CheckpointError: a checkpoint that is damaged, or none of that round.
    """
    if round is None and not store.rounds():
        return None, Ledger(), {}
    opened = store.open(round)
    try:
        progress = decode(store.get("progress"))
        if isinstance(progress, Progress):
            progress = replace(progress, state=stored_state(store, progress.state))
    except WireError as error:
        raise CheckpointError(f"the checkpoint of round {opened.round} cannot be read: {error}") from error
    if not isinstance(progress, Progress):
        raise CheckpointError(f"the checkpoint holds a {type(progress).__name__} where the progress should be")
    return progress, Ledger.from_state(json.loads(store.get("ledger"))), dict(opened.metadata["lengths"])


def _settled(config: Config | Mapping[str, Any] | str | Path) -> Config:
    if isinstance(config, Config):
        return config
    return parse(config) if isinstance(config, Mapping) else load(config)


def _play(place: Path, config: Config, built: Built, watcher: Observer, round: int | None = None) -> RunResult:
    """All rounds that are left, the adapters, the summary."""
    store = CheckpointStore(place)
    progress, ledger, lengths = load_checkpoint(store, round)
    (place / SUMMARY).unlink(missing_ok=True)  # of a run that goes back: only now is it sure that there is a way
    store.drop_newer()
    for name in RECORDS:
        rewind(place / name, lengths.get(name, 0))
    waiting = Waiting(place / UPLOADS, config.execution.upload_memory * MIB)
    engine = InProcess(built.setting, built.executor, store, ledger, waiting)
    if progress is None:
        progress = engine.begin()
    watcher.begin(About(place, built.setting.algorithm.traits.title, progress.round + 1, len(engine.schedule)))
    try:
        for played in engine.rounds(progress):
            progress = played.progress
            lengths = _record(place, played, ledger)
            if progress.finished or progress.round % config.checkpoint.every == 0:
                bare = replace(progress, state=store_state(store, progress.state))
                store.put("progress", encode(bare, dense=True))
                store.put("ledger", ledger.state_text().encode())
                store.commit(progress.round, {"lengths": lengths})
            watcher.round(played.metrics, played.seconds)
        told = write_adapters(engine, progress, built.places, built.task.label_names, place / ADAPTERS)
        if told is not None:
            watcher.note(told)
        metrics, timing = read_lines(place / "metrics.jsonl"), read_lines(place / "timing.jsonl")
        summary = summarise(config, built, metrics, timing, ledger)
        write_whole(place / SUMMARY, json.dumps(json.loads(json_text(summary)), indent=1) + "\n")
    except RunError as error:
        raise RunError(f"{error} (what was computed is kept: coterie resume {place})") from error
    finally:
        built.executor.close()
        watcher.end()
    return RunResult(place, config, summary)


def _hand_on(place: Path, config: Config, summary: Mapping[str, Any]) -> None:
    """Gives TensorBoard and MLflow what they lack of a finished run, such as one that broke off at its very end."""
    rest = tracked(config, Silent())
    rest.begin(About(place, summary["title"], summary["rounds"] + 1, summary["rounds"]))
    rest.end()


def _record(place: Path, played: Played, ledger: Ledger) -> dict[str, int]:
    """Adds a round to the records; returns their lengths in bytes, all of which are on the disk by then."""
    lines = {
        "metrics.jsonl": json_text(played.metrics) + "\n",
        "timing.jsonl": json_text({"round": played.progress.round, "seconds": played.seconds}) + "\n",
        "ledger.jsonl": to_jsonl(ledger.drain()),
    }
    return {name: append_lines(place / name, text) for name, text in lines.items()}


def _clients_digests(built: Built) -> dict[str, dict[str, str]]:
    """Hashes of the base models that only clients have, as they are recorded; nothing where there is none."""
    bases = {spec: base.digest for spec, base in built.executor.bases.items() if base is not built.base}
    return {"bases": bases} if bases else {}


def _check_unchanged(place: Path, built: Built, recorded: Mapping[str, Any]) -> None:
    if recorded.get("base", built.base.digest) != built.base.digest:
        raise ModelError(f"{place}: the base model is no longer the one that this run began with; put it back")
    now = _clients_digests(built).get("bases", {})
    changed = [spec for spec, digest in recorded.get("bases", now).items() if now.get(spec) != digest]
    if changed:
        raise ModelError(f"{place}: the clients' base model {changed[0]} is no longer what it was; put it back")
    text = json_text(built.partition) + "\n"
    if not (place / PARTITION).is_file():
        write_whole(place / PARTITION, text)
    elif (place / PARTITION).read_text(encoding="utf-8") != text:
        raise DataError(
            f"{place}: the data or their partition are no longer those of {PARTITION}; put the data back as they were"
        )


def _vacate(place: Path) -> None:
    """Removes what a run that never began has made."""
    for name in (CONFIG, PARTITION, ".lock"):
        (place / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        place.rmdir()


def _grounded_task(task: SomeTask) -> SomeTask:
    paths = {name: _absolute(path) for name in ("path", "test_path") if (path := getattr(task, name))}
    return task.model_copy(update=paths)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
