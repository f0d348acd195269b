"""Commands on the page play the same runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie.experiments.config import dump, parse, parse_override, resolve
from coterie.report.groups import Group, grouped
from coterie.report.reading import read_run
from coterie.report.rerun import commands, comparison_of, configuration, report_command, written


def groups_of(*folders: Path) -> list[Group]:
    return grouped([read_run(folder) for folder in folders])[0]


def full(method: str, seed: int, **changes: Any) -> dict[str, Any]:
    """A whole configuration as a run's folder has it."""
    given = {"method": method, "seed": seed, "name": "made", "rounds": 2, "task": {"name": "movie"}, **changes}
    return dump(parse(given))


@pytest.fixture
def compared(records: Any) -> list[Path]:
    special = {
        "fedit": {"train": {"lr": 0.01}},
        "fedpa-lora": {"options": {"lam": 2.0}, "train": {"lr": 0.03, "batch_size": 8}, "clients": {"ranks": [2, 8]}},
    }
    return [
        records(f"{method}-{seed}", method=method, title=method, seed=seed, settings=full(method, seed, **own))
        for method, own in special.items()
        for seed in (0, 1)
    ]


def test_one_file_and_command_give_every_run_of_a_comparison_its_settings(compared: list[Path]) -> None:
    made = comparison_of(groups_of(*compared))
    assert made is not None
    config, command = made
    assert command == "coterie compare made.yaml --methods fedit,fedpa-lora --seeds 0,1 --out made-again"
    raw = yaml.safe_load(written(config))
    for folder in compared:
        wanted = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        base = {key: one for key, one in raw.items() if key != "options" or raw["method"] == wanted["method"]}
        overrides = [parse_override(f"method={wanted['method']}"), parse_override(f"seed={wanted['seed']}")]
        found = dump(resolve(base, overrides))
        del wanted["recorded"]
        assert found | {"per_method": {}} == wanted | {"per_method": {}}


def test_runs_that_are_no_comparison_have_commands_of_their_own(records: Any, compared: list[Path]) -> None:
    assert comparison_of(groups_of(compared[0])) is None  # a single method
    assert comparison_of(groups_of(compared[0], *compared[2:])) is None  # unequal seeds
    rates = [records(f"lr{n}", settings={"train": {"lr": n}}) for n in (1, 2)]
    assert comparison_of(groups_of(*rates)) is None  # one method twice
    told = dict(commands(groups_of(*rates)))
    assert told["FedIT, lr 1, seed 0, again"].startswith("coterie run ")


def test_a_finished_run_is_played_again_and_an_unfinished_one_resumed(records: Any) -> None:
    done, half = records("a b"), records("half", seed=1, summary=None)
    (command,) = [command for _, command in commands(groups_of(done))]
    assert command == f"coterie run '{done}/config.yaml' --folder '{done}-again'"
    assert commands(groups_of(half))[0][1] == f"coterie resume {half}"
    (done / "adapters/global").mkdir(parents=True)
    assert commands(groups_of(done))[1][1] == f"coterie export '{done}' '{done}-merged' --merged"


def test_no_path_on_the_page_names_the_home_folder(
    records: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = records("with space", settings={"task": {"name": "file", "path": f"{tmp_path}/reviews.csv"}})
    monkeypatch.setenv("HOME", str(tmp_path))
    (group,) = groups_of(folder)
    assert "path: ~/reviews.csv" in configuration(group.runs[0])
    assert commands([group])[0][1] == "coterie run ~/'with space/config.yaml' --folder ~/'with space-again'"
    assert report_command([folder]) == "coterie report ~/'with space'"
