"""`coterie partition` shows and writes precisely what a run will hold, and neither loads nor writes anything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from coterie.cli.partition import _bar, sentences, table
from coterie.data.pictures import partition_svg

Coterie = Callable[..., Any]


def cells(out: str) -> dict[str, list[str]]:
    """The cells of each row of the table, by client."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in rows}


def test_it_writes_the_bytes_of_the_runs_own_partition(
    coterie: Coterie, small: Path, finished: Path, tmp_path: Path
) -> None:
    told = coterie("partition", small, "--json", "who.json")
    assert told.code == 0 and told.err == ""
    assert (tmp_path / "who.json").read_bytes() == (finished / "partition.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["who.json"]


def test_the_table_tells_ranks_counts_and_labels_of_every_client(coterie: Coterie, small: Path) -> None:
    settings = ("partition.validation_fraction=0.25", "server_data.public=30", "clients.groups=[x, y]")
    told = coterie("partition", small, *settings, "--json", "who.json")
    record = json.loads(Path("who.json").read_text(encoding="utf-8"))
    rows = cells(told.out)
    totals = dict.fromkeys(("train", "validation", "test"), 0)
    for place, client in enumerate(record["clients"]):
        row, counts = rows[client["id"]], record["statistics"]["histogram"][place]
        assert row[:2] == ["xy"[place % 2], str([2, 4, 8, 2][place])]
        assert row[2:5] == [str(len(client[part])) for part in totals]
        assert row[5] == str(sum(map(bool, counts))) and row[6] == f"{100 * max(counts) / sum(counts):.1f}"
        totals = {part: total + len(client[part]) for part, total in totals.items()}
    assert rows["all"][2:5] == [str(total) for total in totals.values()]
    assert sum(totals.values()) + 30 == 192
    assert "file: dirichlet, beta 0.5, seed 0" in told.out and "from left to right: bad, good" in told.out
    assert "set aside for the server: 30 as public/file" in told.out


def test_the_picture_is_that_of_the_shares(coterie: Coterie, small: Path, tmp_path: Path) -> None:
    told = coterie("partition", small, "server_data.unlabeled=20", "--picture", "who.svg", "--json", "who.json")
    picture = (tmp_path / "who.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(picture)
    assert picture == partition_svg(json.loads((tmp_path / "who.json").read_text(encoding="utf-8")))
    assert "set aside for the server: 20 examples (unlabeled)" in picture
    assert "who.svg is written" in told.out and "who.json is written" in told.out


def test_no_model_is_needed(coterie: Coterie, small: Path) -> None:
    assert coterie("partition", small, "model.base=./nowhere").code == 0


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("partition.minimum=500", "192 examples do not give 4 clients 500 each"),
        ("server_data.public=192", "server_data takes 192 of 192 training examples"),
        ("partition.kind=natural", "needs to know what each example belongs to"),
        ("partition.kind=shards partition.shards=90", "at most 48 shards"),
        ("partition.kind=dirichelt", "did you mean 'dirichlet'?"),
        ("partition.validation_fraction=0.8", "leave nothing to train on"),
        ("task.path=missing.csv", "missing.csv"),
    ],
)
def test_what_cannot_be_shared_out_is_told_in_one_line(coterie: Coterie, small: Path, setting: str, said: str) -> None:
    assert said in coterie("partition", small, *setting.split(), "--json", "who.json").complaint
    assert not Path("who.json").exists()


def test_a_file_that_cannot_be_written_is_told(coterie: Coterie, small: Path) -> None:
    complaint = coterie("partition", small, "--picture", "no/such/folder.svg").complaint
    assert "no/such/folder.svg: cannot be written (No such file or directory)" in complaint


def test_of_very_many_clients_evenly_spaced_ones_are_shown(coterie: Coterie, small: Path) -> None:
    told = coterie("partition", small, "clients.count=90", "partition.minimum=2")
    rows = cells(told.out)
    assert {"00", "89", "all"} <= set(rows) and "60 of 90 clients are shown, evenly spaced" in told.out


def test_the_settings_of_a_run_can_be_shown_again(coterie: Coterie, finished: Path, small: Path) -> None:
    assert yaml.safe_load((finished / "config.yaml").read_text(encoding="utf-8"))["seed"] == 0
    one, other = coterie("partition", finished / "config.yaml"), coterie("partition", small)
    assert one.out == other.out


RECORD: dict[str, Any] = {
    "how": {"kind": "iid", "seed": 3},
    "statistics": {
        "clients": 2,
        "examples": 12,
        "sizes": [8, 4],
        "classes": [0, 1],
        "histogram": [[6, 2], [0, 4]],
        "mean_total_variation": 0.75,
        "mean_from_pooled": 0.375,
    },
    "classes": ["bad", "good"],
    "clients": [
        {"id": "left", "train": list(range(6)), "test": [6, 7]},
        {"id": "right", "train": [8, 9, 10], "test": [11]},
    ],
    "server": {"public/toy": {"examples": 5, "indices": [12, 13, 14, 15, 16]}},
}


def test_stored_shares_are_told_in_words() -> None:
    assert sentences(RECORD) == [
        "12 examples of 2 clients; the smallest is right with 4, the largest left with 8",
        "mean total variation distance of label shares: 0.375 from those of all, 0.750 between two clients "
        "(0: alike, 1: no class in common)",
        "set aside for the server: 5 as public/toy",
    ]
    made = table("toy", RECORD, [2, 16], ["all", "all"])
    columns = {str(column.header): list(column.cells) for column in made.columns}
    assert columns["client"] == ["left", "right", "all"] and columns["rank"] == ["2", "16", ""]
    assert columns["train"] == ["6", "3", "9"] and columns["test"] == ["2", "1", "3"]
    assert columns["classes"] == ["2", "1", "2"] and columns["top class %"] == ["75.0", "100.0", "50.0"]
    assert columns["labels"] == ["█▃", " █", "██"] and "group" not in columns and "validation" not in columns


def test_mixtures_are_told_task_by_task() -> None:
    held = [{"groups": {"movie": 6, "sms": 2}}, {"groups": {"sms": 4}}]
    clients = [{**client, **groups} for client, groups in zip(RECORD["clients"], held, strict=True)]
    mixture = {
        "groups": ["movie", "sms"],
        "supply": {"movie": 6, "sms": 9},
        "allocated": {"movie": 6, "sms": 6},
        "mean_total_variation": 0.75,
    }
    record = {
        **RECORD,
        "how": {"kind": "mixture", "alpha": 0.1, "seed": 3},
        "clients": clients,
        "parts": {},
        "mixture": mixture,
        "tests": {"examples": 3, "of_several_clients": 1},
    }
    assert sentences(record)[1:] == [
        "held by clients: movie 6 of 6, sms 6 of 9",
        "mean total variation distance of two clients' mixtures: 0.750",
        "clients' tests are 3 examples of the task's test set, 1 of them in several clients'",
        "set aside for the server: 5 as public/toy",
    ]
    made = table("mixture", record, [2, 16], ["all", "all"])
    columns = {str(column.header): list(column.cells) for column in made.columns}
    assert columns["tasks"] == ["2", "1", "2"] and columns["top task %"] == ["75.0", "100.0", "50.0"]
    assert columns["tasks held"] == ["█▃", " █", "██"] and "labels" not in columns
    assert made.title == "mixture: mixture, alpha 0.1, seed 3"


def test_a_bars_columns_are_as_high_as_counts_are_large() -> None:
    assert _bar([0, 1, 8, 4, 5]) == " ▁█▄▅" and _bar([0, 0]) == "  "
