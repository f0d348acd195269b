"""What TensorBoard and MLflow are given is what the records hold, each round once, and costs the run nothing."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from experiments.forking import played
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from coterie.errors import ConfigError, RunError
from coterie.experiments import tracking
from coterie.experiments.config import dump, parse
from coterie.experiments.folders import json_text, read_lines
from coterie.experiments.observers import About, Silent
from coterie.experiments.runs import grounded, resume, run
from coterie.experiments.tracking import MLflow, Row, Tracking, grounded_uri, params, row_of, rows_of, tracked

LINE: dict[str, Any] = {
    "round": 3,
    "phase": "main",
    "cohort": ["A", "B"],
    "answered": ["A"],
    "failed": {"B": "rehearsed fault"},
    "late": [],
    "train": {"loss": 0.5, "losses": {"A": 0.5}, "steps": {"A": 3}},
    "mismatch": {"absolute": 0.25, "relative": 0.125},
    "init_mismatch": {"B": 0.5, "A": 1.0},
    "measures": {"truncation_delta": float("nan"), "regulariser": 2.0},
    "global": {
        "pooled": {"loss": 0.5, "accuracy": 0.75, "examples": 20, "score": 0.75, "metrics": {"accuracy": 0.75}},
        "clients": {"accuracy": {"A": 0.5, "B": 1.0}, "score": {"A": 0.5, "B": 1.0}, "mean": 0.75, "worst_25": 0.5},
    },
    "personal": {
        "clients": {"accuracy": {"A": 0.5}, "score": {"A": None}, "mean": 0.5},
        "further": {"preserved": {"clients": {"score": {"A": 0.25}, "mean": 0.25}}},
    },
    "bytes": {
        "evaluation": {"down": {"payload": 1000, "overhead": 1}},
        "message": {"down": {"payload": 10, "overhead": 2}, "up": {"payload": 20, "overhead": 3}},
        "setup": {"down": {"payload": 100, "overhead": 4}},
    },
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a new MLflow store in a folder."""
    for name, value in (("MLFLOW_DISABLE_TELEMETRY", "true"), ("MLFLOW_ALLOW_FILE_STORE", "true")):
        monkeypatch.setenv(name, value)
    return str(tmp_path / "mlruns")


@pytest.fixture
def raw(tiny_base: Path, reviews_csv: Path, store: str) -> dict[str, Any]:
    return {
        "method": "fedpa-lora",
        "rounds": 3,
        "task": {"name": "file", "path": str(reviews_csv)},
        "model": {"base": str(tiny_base), "targets": ["query", "value"]},
        "clients": {"count": 4, "ranks": [2, 4, 8]},
        "partition": {"minimum": 10},
        "train": {"batch_size": 4, "steps": 2, "lr": 1e-2},
        "evaluate": {"objective_examples": 4, "pooled_limit": 20, "clients_every": 2},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 2},
        "tracking": {"tensorboard": True, "mlflow": store, "experiment": "toys"},
    }


class Noting(Silent):
    """Keeps notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def curves_of(folder: Path) -> dict[str, dict[int, float]]:
    """TensorBoard's scalars; fails when any tag has a step twice, in whatever file."""
    place = folder / tracking.TENSORBOARD
    counts = Counter(
        (value.tag, event.step)
        for path in place.iterdir()
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    )
    assert set(counts.values()) == {1}
    read = accumulated(folder)
    return {tag: {one.step: one.value for one in read.Scalars(tag)} for tag in read.Tags()["scalars"]}


def accumulated(folder: Path) -> Any:
    read = EventAccumulator(str(folder / tracking.TENSORBOARD), {"scalars": 0, "histograms": 0, "tensors": 0})
    return read.Reload()


def text_of(folder: Path, name: str) -> str:
    (held,) = accumulated(folder).Tensors(f"{name}/text_summary")
    return bytes(held.tensor_proto.string_val[0]).decode()


def logged(store: str, folder: Path) -> tuple[Any, dict[str, dict[int, float]]]:
    """The MLflow run of a folder with its metrics; fails when any metric has a step twice."""
    client = MlflowClient(tracking_uri=store)
    found = client.get_run(json.loads((folder / tracking.MLFLOW).read_text(encoding="utf-8"))["run"])
    curves: dict[str, dict[int, float]] = {}
    for key in found.data.metrics:
        history = client.get_metric_history(found.info.run_id, key)
        curves[key] = {one.step: one.value for one in history}
        assert len(curves[key]) == len(history), key
    return found, curves


def recorded(folder: Path) -> dict[str, dict[int, float]]:
    """The same from the run's records."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows_of(folder):
        for tag, value in row.scalars.items():
            curves.setdefault(tag, {})[row.step] = value
    return curves


def same(curves: Mapping[str, Mapping[int, float]], wanted: Mapping[str, Mapping[int, float]], rel: float = 0) -> bool:
    return {tag: sorted(curve) for tag, curve in curves.items()} == {t: sorted(c) for t, c in wanted.items()} and all(
        math.isclose(value, wanted[tag][step], rel_tol=rel)
        for tag, curve in curves.items()
        for step, value in curve.items()
    )


def untimed(curves: Mapping[str, Mapping[int, float]]) -> dict[str, Mapping[int, float]]:
    return {tag: curve for tag, curve in curves.items() if not tag.startswith("seconds/")}


def test_a_line_becomes_tags_with_its_dotted_names_and_few_of_them_for_clients() -> None:
    row = row_of(LINE, {"clients": 1.5}, 7.0)
    assert row.scalars == {
        "train/loss": 0.5,
        "mismatch/absolute": 0.25,
        "mismatch/relative": 0.125,
        "init_mismatch/B": 0.5,
        "init_mismatch/A": 1.0,
        "measures/regulariser": 2.0,
        "global/pooled/loss": 0.5,
        "global/pooled/accuracy": 0.75,
        "global/pooled/score": 0.75,
        "global/pooled/metrics/accuracy": 0.75,
        "global/mean": 0.75,
        "global/worst_25": 0.5,
        "personal/mean": 0.5,
        "personal/further/preserved/mean": 0.25,
        "bytes/up": 23.0,
        "bytes/down": 116.0,
        "clients/answered": 1.0,
        "clients/failed": 1.0,
        "clients/late": 0.0,
        "seconds/clients": 1.5,
    }
    assert row.clients == {
        "train/losses": [0.5],
        "global/score": [0.5, 1.0],
        "personal/further/preserved/score": [0.25],
    }
    assert (row.step, row.time) == (3, 7.0)
    assert row_of(json.loads(json_text(LINE)), {"clients": 1.5}, 7.0) == row


def test_no_tag_is_the_beginning_of_another_one() -> None:
    """MLflow's folders have a file for each metric."""
    tags = set(row_of(LINE, {}, 0.0).scalars)
    assert not any(other.startswith(f"{tag}/") for tag in tags for other in tags)


def test_rounds_of_the_past_lie_as_far_back_as_they_took(tmp_path: Path) -> None:
    for number, seconds in ((1, 5.0), (2, 2.0), (3, 4.0)):
        with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json_text({**LINE, "round": number}) + "\n")
        with (tmp_path / "timing.jsonl").open("a", encoding="utf-8") as file:
            file.write(json_text({"round": number, "seconds": {"clients": seconds / 2, "server": seconds / 2}}) + "\n")
    os.utime(tmp_path / "metrics.jsonl", (100.0, 100.0))
    assert [(row.step, row.time) for row in rows_of(tmp_path)] == [(1, 94.0), (2, 96.0), (3, 100.0)]
    assert rows_of(tmp_path / "nothing") == []


def test_both_hold_what_the_records_hold_the_settings_and_the_summary(raw: dict[str, Any], tmp_path: Path) -> None:
    result = run(raw, tmp_path / "r")
    wanted = recorded(result.folder)
    assert list(wanted["train/loss"]) == [1, 2, 3] and list(wanted["personal/mean"]) == [2, 3]
    assert same(curves_of(result.folder), wanted, rel=1e-6)  # event files hold fp32
    read = accumulated(result.folder)
    assert {"train/losses", "global/score", "personal/score"} <= set(read.Tags()["histograms"])
    losses = [histogram.histogram_value for histogram in read.Histograms("train/losses")]
    assert [histogram.num for histogram in losses] == [4, 4, 4]
    assert losses[0].sum / 4 == pytest.approx(result.metrics[0]["train"]["loss"])
    assert "method: fedpa-lora" in text_of(result.folder, "config")
    assert '"title": "FedPA-LoRA"' in text_of(result.folder, "summary")

    found, curves = logged(raw["tracking"]["mlflow"], result.folder)
    assert same(curves, wanted)
    assert found.info.status == "FINISHED" and found.info.run_name == "r"
    assert found.data.params == params(dump(result.config))
    assert found.data.params["clients.ranks"] == "[2, 4, 8]" and found.data.params["train.lr"] == "0.01"
    assert found.data.tags["coterie.title"] == "FedPA-LoRA"
    client = MlflowClient(tracking_uri=raw["tracking"]["mlflow"])
    assert [one.path for one in client.list_artifacts(found.info.run_id)] == ["summary.json"]
    assert client.get_experiment(found.info.experiment_id).name == "toys"


def test_it_changes_no_byte_of_a_run(raw: dict[str, Any], tmp_path: Path) -> None:
    with_both, without = run(raw, tmp_path / "with"), run(raw | {"tracking": {}}, tmp_path / "without")
    names = ["metrics.jsonl", "ledger.jsonl", "partition.json"]
    names += [
        str(path.relative_to(without.folder)) for path in (without.folder / "adapters").rglob("*") if path.is_file()
    ]
    for name in names:
        assert (with_both.folder / name).read_bytes() == (without.folder / name).read_bytes(), name
    assert not (without.folder / tracking.TENSORBOARD).exists() and not (without.folder / tracking.MLFLOW).exists()


def test_a_run_that_is_killed_again_and_again_has_every_round_once(raw: dict[str, Any], tmp_path: Path) -> None:
    """With checkpoints of even rounds only. First round 2 is committed and not written; then round 3 is written, and
    played again since round 4 is not committed; then round 4 is committed and not written."""
    asked = raw | {"rounds": 5, "checkpoint": {"every": 2}}
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    attempts: dict[Path, list[dict[str, Any]]] = {
        whole: [{}],
        killed: [{"at": "after the manifest"}, {"at": "before the manifest"}, {"at": "after the manifest"}, {}],
    }
    assert played(asked, attempts) == {whole: [0], killed: [-9, -9, -9, 0]}
    wanted = untimed(recorded(whole))
    assert list(wanted["train/loss"]) == [1, 2, 3, 4, 5]
    assert untimed(recorded(killed)) == wanted
    assert same(untimed(curves_of(killed)), wanted, rel=1e-6)
    found, curves = logged(raw["tracking"]["mlflow"], killed)
    assert same(untimed(curves), wanted) and found.info.status == "FINISHED"
    assert {tag: sorted(curve) for tag, curve in curves.items()} == {
        tag: sorted(curve) for tag, curve in logged(raw["tracking"]["mlflow"], whole)[1].items()
    }


def test_going_back_to_an_earlier_round_writes_none_twice(raw: dict[str, Any], tmp_path: Path) -> None:
    result = run(raw, tmp_path / "r")
    before = logged(raw["tracking"]["mlflow"], result.folder)
    again = resume(result.folder, round=2)
    assert same(curves_of(again.folder), recorded(again.folder), rel=1e-6)
    found, curves = logged(raw["tracking"]["mlflow"], again.folder)
    assert found.info.run_id == before[0].info.run_id and curves == before[1]


def test_event_files_that_were_cut_off_are_made_whole(raw: dict[str, Any], tmp_path: Path) -> None:
    result = run(raw, tmp_path / "r")
    (path,) = (result.folder / tracking.TENSORBOARD).iterdir()
    path.write_bytes(path.read_bytes()[:2000])
    assert resume(result.folder).resumed_finished
    assert same(curves_of(result.folder), recorded(result.folder), rel=1e-6)
    assert '"rounds": 3' in text_of(result.folder, "summary")


@pytest.fixture
def open_run(raw: dict[str, Any], tmp_path: Path) -> Iterator[tuple[MLflow, Path, About]]:
    """An MLflow writer, and a folder with the records of a run."""
    result = run(raw | {"tracking": {}}, tmp_path / "r")
    config = parse(raw)
    yield MLflow(config, raw["tracking"]["mlflow"]), result.folder, About(result.folder, "FedPA-LoRA", 4, 3)


def test_a_request_of_which_only_half_arrived_is_completed(
    open_run: tuple[MLflow, Path, About], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, folder, about = open_run
    rows = rows_of(folder)
    writer.begin(about, rows[:1])
    whole = writer._client.log_batch

    def half(run_id: str, metrics: Any = (), params: Any = ()) -> None:
        whole(run_id, metrics=list(metrics)[: len(metrics) // 2], params=list(params))
        raise ConnectionError("gone")

    monkeypatch.setattr(writer._client, "log_batch", half)
    with pytest.raises(ConnectionError):
        writer.write(rows[1:2])
    assert 0 < sum(2 in curve for curve in logged(store, folder)[1].values()) < len(rows[1].scalars)
    monkeypatch.setattr(writer._client, "log_batch", whole)
    writer.write(rows[1:])
    assert same(logged(store, folder)[1], recorded(folder))


def test_more_rounds_than_fit_into_one_request_are_written(open_run: tuple[MLflow, Path, About], store: str) -> None:
    writer, folder, about = open_run
    writer.begin(about, [Row(step, 1e9, {"train/loss": step / 2, "odd name?": 1.0}, {}) for step in range(1, 1202)])
    curves = logged(store, folder)[1]
    assert curves["train/loss"] == {step: step / 2 for step in range(1, 1202)} and len(curves["odd name_"]) == 1201


@pytest.mark.parametrize("lost", ["file", "run"])
def test_an_mlflow_run_that_is_gone_is_written_anew(
    open_run: tuple[MLflow, Path, About], store: str, lost: str
) -> None:
    writer, folder, about = open_run
    writer.begin(about, rows_of(folder))
    first = logged(store, folder)[0].info.run_id
    if lost == "file":
        (folder / tracking.MLFLOW).unlink()
    else:
        MlflowClient(tracking_uri=store).delete_run(first)
    writer.begin(about, rows_of(folder))
    found, curves = logged(store, folder)
    assert found.info.run_id != first and same(curves, recorded(folder))


class Failing:
    """A writer that fails from one round on, until it is opened again so many times."""

    name = "Failing"

    def __init__(self, at: int, openings: int) -> None:
        self.at, self.openings, self.seen = at, openings, list[int]()
        self.ended = 0

    def begin(self, about: About, rows: list[Row]) -> None:
        self.openings -= 1
        self.seen = []
        self.write(rows)

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            if self.openings > 0 and row.step >= self.at:
                raise OSError(28, "No space left on device")
            self.seen.append(row.step)

    def end(self, folder: Path) -> None:
        self.ended += 1


@pytest.mark.parametrize(("openings", "seen", "ended"), [(2, [1, 2, 3], 1), (3, [1], 0)])
def test_a_writer_that_fails_costs_a_note_and_is_tried_again_at_the_end(
    raw: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    openings: int,
    seen: list[int],
    ended: int,
) -> None:
    writer, watcher = Failing(2, openings), Noting()
    monkeypatch.setattr("coterie.experiments.runs.tracked", lambda config, observer: Tracking(observer, [writer]))
    result = run(raw, tmp_path / "r", watcher)
    assert result.summary["rounds"] == 3 and (writer.seen, writer.ended) == (seen, ended)
    assert watcher.notes[0].startswith("tracking: Failing failed ([Errno 28] No space left on device); tried again")
    assert len(watcher.notes) == 2 - ended
    if not ended:
        assert watcher.notes[1].endswith(f"coterie resume {result.folder} tries again")
        assert resume(result.folder).resumed_finished
        assert (writer.seen, writer.ended) == ([1, 2, 3], 1)


def test_a_run_that_breaks_off_says_so_at_the_server(raw: dict[str, Any], tmp_path: Path) -> None:
    faults = [{"client": name, "round": 2, "kind": "exception"} for name in ("00", "01", "02", "03")]
    with pytest.raises(RunError, match="round 2: 0 of 4 clients answered"):
        run(raw | {"faults": faults}, tmp_path / "r")
    found, curves = logged(raw["tracking"]["mlflow"], tmp_path / "r")
    assert found.info.status == "KILLED" and list(curves["train/loss"]) == [1]
    assert list(curves_of(tmp_path / "r")["train/loss"]) == [1]


def test_a_writer_that_cannot_be_opened_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    class Closed(Failing):
        def begin(self, about: About, rows: list[Row]) -> None:
            raise PermissionError("read-only")

    with pytest.raises(RunError, match=r"^tracking: Failing cannot be written \(read-only\)$"):
        Tracking(Silent(), [Closed(0, 0)]).begin(About(tmp_path, "", 1, 1))


@pytest.mark.parametrize(
    ("setting", "package", "off"),
    [("tensorboard", "torch.utils.tensorboard", "false"), ("mlflow", "mlflow", "null")],
)
def test_a_package_that_is_missing_is_told_with_its_extra_before_anything_is_written(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, package: str, off: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    only = {"tracking": {setting: raw["tracking"][setting]}}
    with pytest.raises(ConfigError) as caught:
        run(raw | only, tmp_path / "r")
    told = str(caught.value)
    assert told.startswith(f"tracking.{setting} needs a package that is not installed") and "\n" not in told
    assert f"pip install 'coterie[tracking]', or set tracking.{setting}={off}" in told
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "nonsense://x"])
def test_a_server_that_does_not_answer_is_told_before_anything_is_written(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError) as caught:
        run(raw | {"tracking": {"mlflow": uri}}, tmp_path / "r")
    told = str(caught.value)
    assert told.startswith(f"tracking.mlflow: {uri} cannot be used (") and "\n" not in told
    assert not (tmp_path / "r").exists()


def test_a_deleted_experiment_is_named(raw: dict[str, Any], store: str) -> None:
    client = MlflowClient(tracking_uri=store)
    client.delete_experiment(client.create_experiment("toys"))
    with pytest.raises(
        ConfigError, match=r"^tracking\.experiment: 'toys' is deleted at .*; restore it or name another$"
    ):
        tracked(parse(raw), Silent())


def test_nothing_is_put_around_a_watcher_unless_asked_for(raw: dict[str, Any]) -> None:
    watcher = Silent()
    assert tracked(parse(raw | {"tracking": {}}), watcher) is watcher
    assert parse(raw | {"tracking": {}}).tracking.experiment == "coterie"


def test_folders_are_recorded_by_their_absolute_paths(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert grounded(parse(raw | {"tracking": {"mlflow": "here"}})).tracking.mlflow == f"{tmp_path}/here"
    assert grounded_uri("file:here") == f"{tmp_path}/here"
    assert grounded_uri("sqlite:///a.db") == f"sqlite:///{tmp_path}/a.db"
    for address in ("http://host:5000", "sqlite:////var/a.db", "databricks", "databricks://profile", "file:///a/b"):
        assert grounded_uri(address) == address


def test_a_folder_of_ones_own_records_is_read_by_nothing_else(raw: dict[str, Any], tmp_path: Path) -> None:
    """Whatever stands beside the event files stays, and a run without records has no curves."""
    result = run(raw | {"rounds": 1}, tmp_path / "r")
    mine = result.folder / tracking.TENSORBOARD / "notes.txt"
    mine.write_text("mine", encoding="utf-8")
    resume(result.folder)
    assert mine.read_text(encoding="utf-8") == "mine"
    assert len(read_lines(result.folder / "metrics.jsonl")) == 1
