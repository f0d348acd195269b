"""`coterie predict`: a file's rows with a prediction beside them, and one line for what cannot be."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import coterie as package
from coterie.cli import predict as command

Coterie = Callable[..., Any]


@pytest.fixture
def rows(tmp_path: Path, reviews_csv: Path) -> Path:
    """Twelve of the reviews, without their labels, in another order of columns."""
    with reviews_csv.open(encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)][:12]
    with (tmp_path / "new.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("id", "text", "note"), *((i, text, "") for i, text in enumerate(texts))])
    return tmp_path / "new.csv"


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_rows_come_out_with_a_prediction_and_its_probability(coterie: Coterie, finished: Path, rows: Path) -> None:
    told = coterie("predict", finished, rows, "--batch-size", 5)
    assert told.code == 0 and told.err == ""
    found, given = read(told.out), read(rows.read_text(encoding="utf-8"))
    assert [list(row)[:3] for row in found] == [["id", "text", "note"]] * 12
    assert [{name: row[name] for name in ("id", "text", "note")} for row in found] == given
    predictor = package.load(finished)
    texts = [row["text"] for row in given]
    assert [row["prediction"] for row in found] == predictor.predict(texts)
    likely = predictor.probabilities(texts).max(dim=1).values.tolist()
    assert [float(row["probability"]) for row in found] == pytest.approx(likely, abs=2e-6)


def test_the_model_of_a_client_an_adapter_and_a_merged_model_predict_too(
    coterie: Coterie, finished: Path, rows: Path, tmp_path: Path
) -> None:
    texts = [row["text"] for row in read(rows.read_text(encoding="utf-8"))]
    expected = package.load(finished, client="02").predict(texts)
    coterie("export", finished, "adapter", "--client", "02")
    coterie("export", finished, "merged", "--client", "02", "--merged")
    for arguments in ((finished, rows, "--client", "02"), ("adapter", rows), ("merged", rows)):
        told = coterie("predict", *arguments)
        assert told.code == 0 and [row["prediction"] for row in read(told.out)] == expected
    told = coterie("predict", "adapter", rows, "--out", "out.jsonl")
    assert told.out == "out.jsonl: 12 rows with a prediction\n"
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["prediction"] for line in lines] == expected and list(lines[0])[-2:] == ["prediction", "probability"]


def test_columns_are_the_runs_unless_named(
    coterie: Coterie, small: Path, finished: Path, rows: Path, reviews_csv: Path, tmp_path: Path
) -> None:
    renamed = tmp_path / "renamed.csv"
    renamed.write_text(rows.read_text(encoding="utf-8").replace("id,text,note", "id,review,second"), encoding="utf-8")
    complaint = coterie("predict", finished, renamed).complaint
    assert "no column 'text' among id, review, second; name another with --text" in complaint
    named = read(coterie("predict", finished, renamed, "--text", "review").out)
    plain = read(coterie("predict", finished, rows).out)
    assert [row["prediction"] for row in named] == [row["prediction"] for row in plain]
    # A run on pairs that knows its columns.
    own = tmp_path / "own.csv"
    with own.open("w", encoding="utf-8", newline="") as file:
        given = read(reviews_csv.read_text(encoding="utf-8"))
        csv.writer(file).writerows(
            [("review", "second", "label"), *((row["text"], "it is so", row["label"]) for row in given)]
        )
    columns = "task.columns={text: review, pair: second}"
    assert coterie("run", small, "rounds=1", "task.path=own.csv", columns, "--folder", "pairs").code == 0
    found = read(coterie("predict", "pairs", own).out)
    texts, pairs = ([row[name] for row in found] for name in ("review", "second"))
    assert [row["prediction"] for row in found] == package.load("pairs").predict(texts, pairs)


def test_lines_and_json_lines_are_read(coterie: Coterie, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a fine film\nit is dull\n", encoding="utf-8")
    assert [list(row) for row in read(coterie("predict", finished, "in.txt").out)] == [
        ["text", "prediction", "probability"]
    ] * 2
    (tmp_path / "in.jsonl").write_text('{"text": "a fine film", "n": 1}\n', encoding="utf-8")
    told = json.loads(coterie("predict", finished, "in.jsonl").out)
    assert told["n"] == 1 and 0.5 <= told["probability"] <= 1


def test_what_cannot_be_is_told_in_one_line(coterie: Coterie, finished: Path, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("", encoding="utf-8")
    for arguments, told in (
        ((finished, "none.csv"), "none.csv: cannot be read"),
        ((finished, "empty.csv"), "there are no rows in it"),
        ((finished, rows, "--client", "2"), "there is no client '2'; did you mean '02'?"),
        (("nowhere", rows), "there is no folder nowhere"),
        ((finished, rows, "--out", rows), "is there already"),
        ((finished, rows, "--out", "out.txt"), "must end in .csv or .jsonl"),
        ((finished, rows, "--pair", "second"), "no column 'second' among id, text, note"),
        ((finished, rows, "--choices", "a,b"), "--choices are for a language model"),
        ((finished, rows, "--device", "nowhere"), "device 'nowhere' cannot be used"),
    ):
        assert told in coterie("predict", *arguments).complaint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.csv", "new.csv"]


def test_a_run_that_is_not_finished_is_told(coterie: Coterie, small: Path, rows: Path) -> None:
    faults = ", ".join(f"{{client: '0{i}', round: 2, kind: exception}}" for i in range(4))
    coterie("run", small, f"faults=[{faults}]", "--folder", "broken")
    assert "broken is not finished; coterie resume broken" in coterie("predict", "broken", rows).complaint


def test_a_base_that_is_gone_can_be_given(
    coterie: Coterie, finished: Path, rows: Path, tiny_base: Path, tmp_path: Path
) -> None:
    coterie("export", finished, "adapter")
    place = tmp_path / "adapter/adapter_config.json"
    content = json.loads(place.read_text(encoding="utf-8")) | {"base_model_name_or_path": "/gone"}
    place.write_text(json.dumps(content), encoding="utf-8")
    assert "its base model '/gone' is not on this machine" in coterie("predict", "adapter", rows).complaint
    assert coterie("predict", "adapter", rows, "--base", tiny_base).out == coterie("predict", finished, rows).out


def test_one_is_told_how_far_it_is_once_it_takes_long(
    coterie: Coterie, finished: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert coterie("predict", finished, rows, "--batch-size", 1).err == ""
    monkeypatch.setattr(command, "PATIENCE", 0.0)
    assert coterie("predict", finished, rows, "--batch-size", 1).err.startswith("predicted 8/12 rows, left ")
    bar = command._Bar(12)
    bar.at(8, 3.0)
    bar.end()
    assert bar.progress is not None and bar.progress.tasks[0].completed == 8
