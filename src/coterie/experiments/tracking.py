"""TensorBoard and MLflow: what a run records, as curves beside those of other runs.

A writer is handed the lines of metrics.jsonl and timing.jsonl, round by round; nothing that it does changes what is
computed. When a run goes on after it was broken off, its writers first get all rounds that its records hold:
TensorBoard's event files are written anew, and of MLflow's metrics, which cannot be taken back, what is missing is
added. So every round is there once, however often a run is killed. A writer that fails in the middle of a run costs a
note and is tried again in the same way at the end, and by `coterie resume RUN`.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml

from coterie.errors import ConfigError, RunError
from coterie.experiments.config import Config, dump
from coterie.experiments.folders import SUMMARY, json_text, read_lines, versions, write_whole
from coterie.experiments.observers import About, Observer

TENSORBOARD = "tensorboard"
"""The folder of event files in a run's folder."""

MLFLOW = "mlflow.json"
"""The file in a run's folder that says which run of which MLflow server it is."""

REPORT = "report.html"
BY_CLIENT = ("accuracy", "losses", "score", "steps")
"""Names under which a line holds a value for each client; a number may have such a name as well."""

METRICS_AT_ONCE, PARAMS_AT_ONCE, LONGEST_PARAM = 1000, 100, 6000
"""What MLflow takes in one request, and the longest value of a parameter."""


@dataclass(frozen=True)
class Row:
    """A round: when it was played (Unix time in seconds), its numbers by tag, and clients' values by tag."""

    step: int
    time: float
    scalars: dict[str, float]
    clients: dict[str, list[float]]


class Writer(Protocol):
    """Where rounds go. Any method may raise whatever the library behind it raises."""

    name: str

    def begin(self, about: About, rows: Sequence[Row]) -> None:
        """Opens the run; `rows` are all rounds played so far, some or all of which it may have already."""

    def write(self, rows: Sequence[Row]) -> None:
        """Adds rounds, so that they can be seen at once."""

    def end(self, folder: Path) -> None:
        """Closes the run; when it is finished, its summary is in the folder."""


def tracked(config: Config, watcher: Observer) -> Observer:
    """The watcher, with what `tracking` asks for beside it; itself when it asks for nothing.

    Raises:
        ConfigError: a package that is missing, or an MLflow server that does not answer.
    """
    writers: list[Writer] = []
    if config.tracking.tensorboard:
        writers.append(TensorBoard(config))
    if config.tracking.mlflow is not None:
        writers.append(MLflow(config, config.tracking.mlflow))
    return Tracking(watcher, writers) if writers else watcher


class Tracking:
    """An observer that hands rounds on to writers, and everything to another observer."""

    def __init__(self, watcher: Observer, writers: Sequence[Writer]) -> None:
        self._watcher = watcher
        self._writers = list(writers)
        self._failed: set[str] = set()

    def begin(self, about: About) -> None:
        self._about = about
        rows = rows_of(about.folder)
        for writer in self._writers:
            try:
                writer.begin(about, rows)
            except Exception as error:
                raise RunError(f"tracking: {writer.name} cannot be written ({said(error)})") from error
        self._watcher.begin(about)

    def round(self, metrics: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        row = row_of(metrics, seconds, time.time())
        for writer in self._writers:
            if writer.name not in self._failed:
                with self._noting(writer, "tried again after the last round"):
                    writer.write([row])
        self._watcher.round(metrics, seconds)

    def note(self, text: str) -> None:
        self._watcher.note(text)

    def end(self) -> None:
        folder = self._about.folder
        for writer in self._writers:
            with self._noting(writer, f"coterie resume {folder} tries again"):
                if writer.name in self._failed:
                    writer.begin(self._about, rows_of(folder))
                writer.end(folder)
        self._watcher.end()

    @contextmanager
    def _noting(self, writer: Writer, then: str) -> Iterator[None]:
        """Whatever a tracking library raises is no reason to stop training."""
        try:
            yield
        except Exception as error:
            self._failed.add(writer.name)
            self._watcher.note(f"tracking: {writer.name} failed ({said(error)}); {then}")


class TensorBoard:
    """Event files in the folder `tensorboard` of a run: scalars, clients' values as histograms, settings as text."""

    name = "TensorBoard"

    def __init__(self, config: Config) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tracking.tensorboard", "false", error) from error
        self._open: Callable[..., Any] = SummaryWriter
        self._config = config

    def begin(self, about: About, rows: Sequence[Row]) -> None:
        place = about.folder / TENSORBOARD
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = self._open(str(place))
        self._writer.add_text("config", _block("yaml", yaml.safe_dump(dump(self._config), sort_keys=False)), 0)
        self.write(rows)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for tag, value in row.scalars.items():
                self._writer.add_scalar(tag, value, row.step, walltime=row.time)
            for tag, values in row.clients.items():
                self._writer.add_histogram(tag, np.array(values), row.step, walltime=row.time)
        self._writer.flush()

    def end(self, folder: Path) -> None:
        if (folder / SUMMARY).is_file():
            summary = (folder / SUMMARY).read_text(encoding="utf-8")
            self._writer.add_text("summary", _block("json", summary), json.loads(summary)["rounds"])
        self._writer.close()


class MLflow:
    """A run of an MLflow experiment: metrics, settings as parameters, summary.json and the report as artefacts.

    uri: of a tracking server, or a folder. Clients' values are not written one by one; means and the worst are metrics.
    """

    name = "MLflow"

    def __init__(self, config: Config, uri: str) -> None:
        # Read by MLflow when it is imported: no reports about its use, and no minutes of waiting for a server that is
        # not there. A folder, which newer releases refuse by default, is all that mlflow-skinny can write by itself.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        if "://" not in uri or uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise _missing("tracking.mlflow", "null", error) from error
        self._config, self._uri = config, uri
        self._held: dict[str, set[int]] | None = None
        try:
            self._client = MlflowClient(tracking_uri=uri)
            self._experiment = self._experiment_id(config.tracking.experiment)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"tracking.mlflow: {uri} cannot be used ({said(error)}); start the server, or name another or a folder "
                "(a database needs the whole package mlflow), or set tracking.mlflow=null"
            ) from error

    def begin(self, about: About, rows: Sequence[Row]) -> None:
        self._run = self._known(about.folder) or self._created(about)
        self._client.update_run(self._run, status="RUNNING")
        self._held = None
        self._log_params()
        self.write(rows)

    def write(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        held = self._held if self._held is not None else self._history()
        self._held = None  # until this is written: a failure leaves open how much of it was
        made = [
            Metric(tag, value, int(1000 * row.time), row.step)
            for row in rows
            for tag, value in _legal(row.scalars).items()
            if row.step not in held.get(tag, ())
        ]
        for part in _parts(made, METRICS_AT_ONCE):
            self._client.log_batch(self._run, metrics=part)
        for metric in made:
            held.setdefault(metric.key, set()).add(metric.step)
        self._held = held

    def end(self, folder: Path) -> None:
        finished = (folder / SUMMARY).is_file()
        for name in (SUMMARY, REPORT):
            if finished and (folder / name).is_file():
                self._client.log_artifact(self._run, str(folder / name))
        self._client.set_terminated(self._run, status="FINISHED" if finished else "KILLED")

    def _experiment_id(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run of a comparison may have made it meanwhile
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise ConfigError(f"tracking.experiment: {name!r} is deleted at {self._uri}; restore it or name another")
        return str(found.experiment_id)

    def _known(self, folder: Path) -> str | None:
        """The id of the MLflow run that this run's folder names, if it is still there."""
        from mlflow.exceptions import MlflowException

        if not (folder / MLFLOW).is_file():
            return None
        noted = json.loads((folder / MLFLOW).read_text(encoding="utf-8"))
        if noted["uri"] != self._uri:
            return None
        try:
            info = self._client.get_run(noted["run"]).info
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return str(info.run_id) if info.lifecycle_stage == "active" else None

    def _created(self, about: About) -> str:
        config = self._config
        tags = {
            "coterie.version": versions()["coterie"],
            "coterie.method": config.method,
            "coterie.title": about.title,
            "coterie.seed": str(config.seed),
        }
        made = str(self._client.create_run(self._experiment, run_name=about.folder.name, tags=tags).info.run_id)
        write_whole(about.folder / MLFLOW, json_text({"uri": self._uri, "run": made}) + "\n")
        return made

    def _log_params(self) -> None:
        from mlflow.entities import Param

        there = self._client.get_run(self._run).data.params
        given = {key: value[:LONGEST_PARAM] for key, value in params(dump(self._config)).items()}
        missing = [Param(key, value) for key, value in _legal(given).items() if key not in there]
        for part in _parts(missing, PARAMS_AT_ONCE):
            self._client.log_batch(self._run, params=part)

    def _history(self) -> dict[str, set[int]]:
        """The steps that the server has, by metric."""
        keys = self._client.get_run(self._run).data.metrics
        return {key: {one.step for one in self._client.get_metric_history(self._run, key)} for key in keys}


def row_of(metrics: Mapping[str, Any], seconds: Mapping[str, float], when: float) -> Row:
    """A line of metrics.jsonl and one of timing.jsonl as tags: global/pooled/score, personal/mean, bytes/up, ...

    bytes are of whole messages up and down, evaluation apart; clients/* counts those who answered, failed or were late.
    """
    scalars, clients = {}, {}
    for path, value in _walk(metrics, ()):
        tag = "/".join(path)
        if isinstance(value, list):
            clients[tag] = value
        else:
            scalars[tag] = value
    for way in ("up", "down"):
        sizes = [ways[way] for kind, ways in metrics["bytes"].items() if kind != "evaluation" and way in ways]
        scalars[f"bytes/{way}"] = float(sum(size["payload"] + size["overhead"] for size in sizes))
    for name in ("answered", "failed", "late"):
        scalars[f"clients/{name}"] = float(len(metrics[name]))
    scalars |= {f"seconds/{name}": float(value) for name, value in seconds.items()}
    return Row(int(metrics["round"]), when, scalars, clients)


def rows_of(folder: Path) -> list[Row]:
    """All rounds of a run's records, the last one played when its line was written, the others as long before as they
    took."""
    place = folder / "metrics.jsonl"
    when = place.stat().st_mtime if place.is_file() else 0.0
    timing = {line["round"]: line["seconds"] for line in read_lines(folder / "timing.jsonl")}
    rows: list[Row] = []
    for metrics in reversed(read_lines(place)):
        seconds = timing.get(metrics["round"], {})
        rows.append(row_of(metrics, seconds, when))
        when -= sum(seconds.values())
    return rows[::-1]


def params(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Settings by dotted name, as text: words and numbers as they are, lists as JSON."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= params(value, f"{before}{name}.")
        else:
            found[before + name] = value if isinstance(value, str) else json.dumps(value)
    return found


def grounded_uri(uri: str) -> str:
    """A folder, or the file of an SQLite store, by its absolute path; any other address as it is."""
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    if "://" in uri or uri.partition(":")[0] in ("databricks", "databricks-uc", "uc"):
        return uri
    return str(Path(uri.removeprefix("file:")).expanduser().absolute())


def said(error: Exception) -> str:
    """The first line of what a library says, or the kind of its error."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float | list[float]]]:
    """Every number of a line with its path, and of clients' losses and scores all values together.

    The level `clients` is left out of paths, and so are sizes of data sets, which do not change.
    """
    if isinstance(value, Mapping):
        for name, part in value.items():
            if name in BY_CLIENT and isinstance(part, Mapping):
                known = [float(one) for one in part.values() if _is_number(one)]
                if name in ("losses", "score") and known:
                    yield (*path, name), known
            elif name not in ("round", "bytes", "examples"):
                yield from _walk(part, path if name == "clients" else (*path, name))
    elif _is_number(value):
        yield path, float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _legal(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with names that MLflow takes."""
    return {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in values.items()}


def _parts(values: Sequence[Any], size: int) -> Iterator[list[Any]]:
    left = iter(values)
    while part := list(islice(left, size)):
        yield part


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _missing(setting: str, off: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{setting} needs a package that is not installed ({said(error)}); pip install 'coterie[tracking]', or set "
        f"{setting}={off}"
    )
