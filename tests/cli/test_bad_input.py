"""What a user can cause is told in one line, with exit code 2, and nothing that was computed is lost."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import coterie.engines.checkpoints as checkpoints
from coterie.engines.checkpoints import CheckpointStore
from coterie.engines.in_process import InProcess

Coterie = Callable[..., Any]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("train.lrr=1", "there is no setting 'train.lrr'; did you mean 'train.lr'?"),
        ("partition.minimum=500", "do not give 4 clients 500 each"),
        ("task.path=missing.csv", "missing.csv: cannot be read"),
        ("task.columns.text=txet", "no column 'txet'; did you mean 'text'?"),
        ("clients.ranks=[2,33]", "client 01: rank 33 is above what layer"),
        ("model.targets=[querry]", "no linear layer is called 'querry'; nearest: query"),
        ("model.base=./nowhere", "there is no model folder './nowhere'"),
        ("method=fedlt", "there is no method 'fedlt'; did you mean 'fedit'?"),
        ("options.lam=1", "method 'fedit' has no option 'lam'"),
        ("task.name=movies", "did you mean 'movie'?"),
        ("partition.kind=iidd", "there is no partitioner 'iidd'; did you mean 'iid'?"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(
    coterie: Coterie, small: Path, tmp_path: Path, setting: str, told: str
) -> None:
    complaint = coterie("run", small, setting).complaint
    assert complaint.startswith("coterie: error: ") and told in complaint
    assert not list((tmp_path / "runs").glob("*"))


def test_a_missing_configuration_an_asset_and_a_run_are_named(coterie: Coterie, tmp_path: Path) -> None:
    assert "none.yaml: cannot be read" in coterie("run", "none.yaml").complaint
    assert "did you mean 'minilm'?" in coterie("assets", "fetch", "minilmm").complaint
    assert "did you mean 'minilm'?" in coterie("assets", "remove", "minilmm").complaint
    assert "there is no run here" in coterie("resume", tmp_path).complaint
    assert "there is no run here" in coterie("export", tmp_path, "out").complaint


@pytest.mark.parametrize("arguments", [["runn"], ["run"], ["compare", "x.yaml", "--workers", "0"], ["resume"]])
def test_a_wrong_command_line_has_exit_code_two(coterie: Coterie, arguments: list[str]) -> None:
    assert coterie(*arguments).code == 2


def test_comparisons_need_methods_and_whole_seeds(coterie: Coterie, small: Path) -> None:
    assert "--methods needs" in coterie("compare", small).complaint
    assert "--seeds needs whole numbers" in coterie("compare", small, "--methods", "fedit", "--seeds", "a").complaint
    assert "did you mean 'fedit'?" in coterie("compare", small, "--methods", "fedlt").complaint


def test_a_run_folder_is_never_overwritten(coterie: Coterie, small: Path, finished: Path) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    complaint = coterie("run", small, "--folder", finished).complaint
    assert "is not empty" in complaint and f"coterie resume {finished}" in complaint
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_exports_that_cannot_be_are_refused(coterie: Coterie, small: Path, finished: Path, tmp_path: Path) -> None:
    assert "no client '2'; did you mean" in coterie("export", finished, "out", "--client", "2").complaint
    assert "exclude each other" in coterie("export", finished, "out", "--client", "02", "--global").complaint
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("keep", encoding="utf-8")
    assert "holds files of something else" in coterie("export", finished, "full").complaint
    assert "name a new folder" in coterie("export", finished, "full", "--merged").complaint
    assert (tmp_path / "full/mine.txt").read_text(encoding="utf-8") == "keep"
    coterie("run", small, "rounds=1", "method=local-only", "--folder", "alone")
    assert "has no global model; choose a client's" in coterie("export", "alone", "out").complaint


@pytest.fixture
def broken_off(coterie: Coterie, small: Path, tmp_path: Path) -> Path:
    """A run in which nobody answers in round 3."""
    faults = ", ".join(f"{{client: '0{i}', round: 3, kind: exception}}" for i in range(4))
    told = coterie("run", small, f"faults=[{faults}]", "--folder", "broken")
    assert "min_replies" in told.complaint and "coterie resume broken" in told.complaint
    return tmp_path / "broken"


def mend(run: Path) -> None:
    """Takes the rehearsed faults out of a run's own configuration."""
    content = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    (run / "config.yaml").write_text(yaml.safe_dump(content | {"faults": []}), encoding="utf-8")


def test_too_few_replies_keep_the_run_which_goes_on_once_mended(
    coterie: Coterie, broken_off: Path, finished: Path
) -> None:
    assert len((broken_off / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert "is not finished" in coterie("export", broken_off, "out").complaint
    mend(broken_off)
    assert coterie("resume", broken_off).code == 0
    assert (broken_off / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    for path in (finished / "adapters").rglob("*.safetensors"):
        assert (broken_off / path.relative_to(finished)).read_bytes() == path.read_bytes()


def test_a_corrupt_checkpoint_names_an_intact_one_from_which_the_run_goes_on(
    coterie: Coterie, broken_off: Path, finished: Path
) -> None:
    mend(broken_off)
    store = CheckpointStore(broken_off)
    opened = store.open()
    store.close()
    blob = broken_off / "checkpoints/blobs" / opened.blobs["progress"].sha256
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    complaint = coterie("resume", broken_off).complaint
    assert "checksum does not match" in complaint and "--round 1" in complaint
    assert coterie("resume", broken_off, "--round", 1).code == 0
    assert (broken_off / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_a_corrupt_manifest_is_told(coterie: Coterie, broken_off: Path) -> None:
    (broken_off / "checkpoints/round-00002.json").write_text("{}", encoding="utf-8")
    assert "round-00002.json: is damaged" in coterie("resume", broken_off).complaint


def test_a_truncated_message_in_a_checkpoint_is_told(coterie: Coterie, broken_off: Path) -> None:
    store = CheckpointStore(broken_off)
    opened = store.open()
    store.put("progress", store.get("progress")[:-100])
    store.commit(opened.round, opened.metadata)
    complaint = coterie("resume", broken_off).complaint
    assert "the checkpoint of round 2 cannot be read" in complaint and "not a coterie message" in complaint


@pytest.mark.parametrize("part", ["checkpoint", "record"])
def test_a_full_disk_leaves_the_checkpoint_before_intact(
    coterie: Coterie, small: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    played = 0
    play, write, opened = InProcess.play, checkpoints._write, Path.open

    def counted(self: InProcess, progress: Any) -> Any:
        nonlocal played
        played += 1
        return play(self, progress)

    def full(*arguments: Any, **options: Any) -> Any:
        if played == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments, **options)

    def full_record(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if played == 3 and self.name == "metrics.jsonl" and mode == "ab":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(self, mode, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "play", counted)
        if part == "checkpoint":
            patch.setattr(checkpoints, "_write", full)
        else:
            patch.setattr(Path, "open", full_record)
        complaint = coterie("run", small, "--folder", "full").complaint
    assert "No space left on device" in complaint and "resume the run" in complaint
    assert "rounds 3 to 3" in coterie("resume", "full").err
    assert (tmp_path / "full/metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_an_interruption_says_how_to_go_on(
    coterie: Coterie, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "begin", interrupted)
        told = coterie("run", small, "--folder", "r")
    assert told.code == 130 and "to go on: coterie resume r" in told.err
    assert coterie("resume", "r").code == 0
    with monkeypatch.context() as patch:
        patch.setattr("coterie.experiments.runs.build", interrupted)
        told = coterie("run", small, "--folder", "s")
    assert told.code == 130 and "nothing had been computed" in told.err
    assert not (tmp_path / "s").exists()


def test_data_that_changed_since_the_run_began_are_refused(
    coterie: Coterie, small: Path, reviews_csv: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.csv"
    own.write_bytes(reviews_csv.read_bytes())
    faults = ", ".join(f"{{client: '0{i}', round: 2, kind: exception}}" for i in range(4))
    coterie("run", small, f"faults=[{faults}]", "task.path=own.csv", "--folder", "r")
    own.write_text(own.read_text(encoding="utf-8").replace("film", "plot"), encoding="utf-8")
    assert "are no longer those of partition.json" in coterie("resume", "r").complaint


def test_two_processes_cannot_work_on_one_run(coterie: Coterie, broken_off: Path) -> None:
    from coterie.experiments.folders import alone_in

    with alone_in(broken_off):
        assert "another process is at work" in coterie("resume", broken_off).complaint
