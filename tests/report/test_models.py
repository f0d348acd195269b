"""A run's further models are told beside the deployed one, each with its own scores."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from coterie.report.groups import grouped
from coterie.report.models import further_models, models_table
from coterie.report.reading import read_run
from coterie.report.tables import run_table
from coterie.report.writing import write_report


def scored(pooled: float, questions: float) -> dict[str, Any]:
    return {"pooled": {"score": pooled}, "more": {"questions": {"score": questions}}}


def several(shift: float = 0.0) -> dict[str, Any]:
    return {
        "global": scored(0.5 + shift, 0.61) | {"further": {"weak": scored(0.3 + shift, 0.42)}},
        "personal": {"bases": {"ratio-0.4": scored(0.2 + shift, 0.23)}},
        "untrained": {"base": scored(0.1, 0.14)},
        "validation": None,
        "loss": 1.0,
        "mismatch": None,
        "bytes": {"up": 1, "down": 1},
        "seconds": {"clients": 1.0},
    }


def test_every_model_has_a_line_with_its_mean_over_seeds(records: Any) -> None:
    folders = [records(f"s{seed}", seed=seed, summary=several(seed / 10)) for seed in (0, 1)]
    (group,), _ = grouped([read_run(folder) for folder in folders])
    found = models_table(group)
    assert found is not None and found.heads == ["", "pooled test", "questions"]
    assert found.rows == [
        ["untrained, base", "10.0", "14.0"],
        ["own models, clients with ratio-0.4", "25.0", "23.0"],
        ["at the server, weak", "35.0", "42.0"],
        ["global model", "55.0", "61.0"],
    ]


def test_one_model_needs_no_table(records: Any) -> None:
    (group,), _ = grouped([read_run(records("one", summary={"global": scored(0.5, 0.6)}))])
    assert models_table(group) is None and not list(further_models({"global": None, "personal": None}))


def test_page_and_terminal_show_them(records: Any) -> None:
    pytest.importorskip("matplotlib")
    folder = records("run", summary=several())
    page = write_report([folder])[0].read_text(encoding="utf-8")
    assert "own models, clients with ratio-0.4" in page and "Its models" in page
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(run_table(read_run(folder).summary))
    told = [line for line in console.export_text().splitlines() if "at the server, weak, pooled test" in line]
    assert len(told) == 1 and "30.0" in told[0]
