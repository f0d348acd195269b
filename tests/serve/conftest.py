"""Finished runs to load, and language models with adapters that PEFT itself has made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def settings(base: Path, reviews: Path, **changes: Any) -> dict[str, Any]:
    """Two rounds of three clients in about a second."""
    return {
        "method": "fedit",
        "rounds": 2,
        "task": {"name": "file", "path": str(reviews)},
        "model": {"base": str(base), "targets": ["query", "value"], "max_length": 12},
        "clients": {"count": 3, "ranks": [2, 4]},
        "partition": {"kind": "iid", "minimum": 10},
        "train": {"batch_size": 4, "steps": 4, "lr": 2e-2},
        "evaluate": {"objective_examples": 0},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 1},
        **changes,
    }


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, reviews_csv: Path) -> Path:
    """A finished run. Read only."""
    from coterie import run

    return run(settings(tiny_base, reviews_csv), tmp_path_factory.mktemp("runs") / "finished").folder


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, reviews_csv: Path) -> Path:
    """A finished run of a method without a global model. Read only."""
    from coterie import run

    content = settings(tiny_base, reviews_csv, method="local-only", rounds=1)
    return run(content, tmp_path_factory.mktemp("runs") / "alone").folder
