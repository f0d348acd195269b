"""Rows keep all their columns, in order, and get the predictions; what cannot be read is told in one line."""

from __future__ import annotations

import csv
import json
import os
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import DataError
from coterie.serve.tables import check_out, read_table, write_table

ADDED = {"prediction": "good", "probability": 0.75}
letters = string.ascii_letters + "\"',;\n\té "
fields = st.text(st.sampled_from(letters), min_size=1, max_size=9).filter(lambda text: text.strip())


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


@given(st.lists(st.tuples(fields, st.text(st.sampled_from(letters), max_size=9)), min_size=1, max_size=6))
@settings(max_examples=40)
def test_a_csv_file_comes_out_as_it_was_with_two_columns_more(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    place = tmp_path_factory.mktemp("table")
    with (place / "in.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "note"), *rows])
    table = read_table(place / "in.csv")
    assert table.columns == ("text", "note") and table.texts == [text for text, _ in rows] and table.pairs is None
    write_table(table, [ADDED] * len(rows), place / "out.csv", "csv")
    with (place / "out.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.reader(file))
    assert found == [["text", "note", *ADDED], *([*row, "good", "0.75"] for row in rows)]


def test_json_lines_keep_what_json_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"n": 1, "text": "a film", "more": {"x": [None, 1.5]}}, {"text": "é", "tag": None}]
    path = write(tmp_path / "in.jsonl", "\n".join(json.dumps(record) for record in records))
    table = read_table(path)
    assert table.columns == ("n", "text", "more", "tag") and table.texts == ["a film", "é"]
    write_table(table, [ADDED] * 2, None, "jsonl")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [r | ADDED for r in records]
    write_table(table, [ADDED] * 2, None, "csv")
    assert capsys.readouterr().out.splitlines() == [
        "n,text,more,tag,prediction,probability",
        '1,a film,"{""x"": [null, 1.5]}",,good,0.75',
        ",é,,,good,0.75",
    ]


def test_tables_with_tabs_pairs_and_plain_lines_are_read(tmp_path: Path) -> None:
    tabs = read_table(write(tmp_path / "in.tsv", 'one\ttwo\n"a"\tb\n\nc\td\n'), "two", "one")
    assert tabs.texts == ["b", "d"] and tabs.pairs == ['"a"', "c"]
    lines = read_table(write(tmp_path / "in.txt", "\ufeffa film\r\n\n it was dull\n"), "note")
    assert lines.columns == ("note",) and lines.texts == ["a film", " it was dull"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("in.csv", "review,label\nfine,good\n", "no column 'text' among review, label; name another with --text"),
        ("in.csv", "text\nfine\n", "no column 'second' among text; name another with --pair"),
        ("in.csv", ",".join(f"c{i}" for i in range(20)) + "\n", "c10, c11, …; name another"),
        ("in.csv", "", "there are no rows in it"),
        ("in.csv", "text,second\n", "there are no rows in it"),
        ("in.jsonl", "\n", "there are no rows in it"),
        ("in.txt", " \n", "no column 'second'"),
        ("in.csv", "text,second\nfine,\n", "line 2: nothing in column 'second'"),
        ("in.csv", "text,second,probability\nfine,x,1\n", "a column 'probability' already; rename it"),
        ("in.csv", "text,second,a,a\n", "more than one column 'a'"),
        ("in.csv", "text,second\nfine\n", "line 2: 1 columns where the header has 2"),
        ("in.jsonl", '{"text": "a", "second": "b"}\n{"text": "a"}\n', "line 2: no key 'second'"),
        ("in.xlsx", "x", "must end in .csv, .jsonl"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path, name: str, content: str, told: str) -> None:
    with pytest.raises(DataError) as caught:
        read_table(write(tmp_path / name, content), "text", "second")
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_no_file_is_replaced(tmp_path: Path) -> None:
    check_out(tmp_path / "out.csv")
    check_out(tmp_path / "out.jsonl")
    for place, told in (
        (write(tmp_path / "there.csv", "mine"), "is there already"),
        (tmp_path / "out.txt", "must end in .csv or .jsonl"),
        (tmp_path / "none" / "out.csv", "there is no folder"),
    ):
        with pytest.raises(DataError, match=told):
            check_out(place)


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    table = read_table(write(tmp_path / "in.csv", "text\nfine\n"))
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match=r"out.csv: cannot be written \(No space left"):
        write_table(table, [ADDED], tmp_path / "out.csv", "csv")
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]
