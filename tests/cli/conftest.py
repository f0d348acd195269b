"""A small configuration as a file, the command line in this process, and runs to look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from coterie.cli.main import main


@dataclass(frozen=True)
class Told:
    """What a command left: exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line of a user's error; fails when there is more, or another exit code."""
        lines = [line for line in self.err.splitlines() if not line.startswith(("round ", "FedIT:", "FedPA-LoRA:"))]
        assert self.code == 2 and len(lines) == 1, self
        return lines[0]


Coterie = Callable[..., Told]


@pytest.fixture
def coterie(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Coterie:
    """Runs the command line with these arguments in an empty working folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Told:
        capsys.readouterr()
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        streams = capsys.readouterr()
        return Told(code, streams.out, streams.err)

    return call


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, reviews_csv: Path) -> Path:
    """A configuration that plays three rounds in about a second. Read only."""
    place = tmp_path_factory.mktemp("config") / "small.yaml"
    content = {
        "method": "fedit",
        "rounds": 3,
        "task": {"name": "file", "path": str(reviews_csv)},
        "model": {"base": str(tiny_base), "targets": ["query", "value"]},
        "clients": {"count": 4, "ranks": [2, 4, 8]},
        "partition": {"minimum": 10},
        "train": {"batch_size": 4, "steps": 3, "lr": 1e-2},
        "evaluate": {"objective_examples": 4, "pooled_limit": 20},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 2},
    }
    place.write_text(yaml.safe_dump(content), encoding="utf-8")
    return place


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Path:
    """A finished run of it. Read only."""
    from coterie.experiments.config import load
    from coterie.experiments.runs import run

    return run(load(small), tmp_path_factory.mktemp("runs") / "finished").folder
