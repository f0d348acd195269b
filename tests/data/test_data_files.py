"""Files of labelled text: what each format means, and errors that name file, line and column."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from coterie.data.files import Row, read_rows
from coterie.errors import DataError


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, pair: str | None = None) -> list[Row]:
    return read_rows(path, text="text", pair=pair, label="label")


def test_csv_quotes_commas_line_breaks_and_a_byte_order_mark(tmp_path: Path) -> None:
    content = '\ufefflabel,text,other\r\nyes,"a, ""b""\r\nc",1\r\n\r\nno,d,2\r\n'
    rows = read(written(tmp_path, "a.csv", content))
    assert rows == [Row(3, 'a, "b"\r\nc', None, "yes"), Row(5, "d", None, "no")]


def test_tsv_quotation_marks_are_text(tmp_path: Path) -> None:
    rows = read(written(tmp_path, "a.tsv", 'text\tlabel\n"open\t0\n\nit\u2028s ""\t 1 \n'))
    assert rows == [Row(2, '"open', None, "0"), Row(4, 'it\u2028s ""', None, "1")]


def test_json_lines_take_texts_and_whole_numbers(tmp_path: Path) -> None:
    content = '{"text": "a\\nb", "two": "c", "label": 1}\n\n{"two": "e", "label": true, "text": "d"}\n'
    rows = read(written(tmp_path, "a.jsonl", content), pair="two")
    assert rows == [Row(1, "a\nb", "c", "1"), Row(3, "d", "e", "true")]


def test_a_field_beyond_the_csv_modules_limit_is_read_and_the_limit_kept(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    long = "x" * (limit + 1)
    assert read(written(tmp_path, "a.csv", f"text,label\n{long},1\n"))[0].text == long
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "txt,label\na,1\n", "line 1: no column 'text'; did you mean 'txt'"),
        ("a.csv", "", "line 1: no column 'text'"),
        ("a.csv", "text,label,text\na,1,b\n", "line 1: more than one column 'text'"),
        ("a.csv", "text,label\na,1\nb\n", "line 3: 1 columns where the header has 2"),
        ("a.csv", 'text,label\na,1\n"b,2\n', "line 3: not CSV"),
        ("a.csv", "text,label\na,1\n  ,2\n", "line 3: nothing in column 'text'"),
        ("a.tsv", "text\tlabel\na\t1\nb\t\n", "line 3: nothing in column 'label'"),
        ("a.csv", b"text,label\na,1\ncaf\xe9,2\n", "line 3: not UTF-8"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": \n', "line 2: not JSON"),
        ("a.jsonl", '{"text": "a", "label": 1}\n[1]\n', "line 2: not a JSON object"),
        ("a.jsonl", '{"text": "a", "lable": 1}\n', "line 1: no key 'label'; did you mean 'lable'"),
        ("a.jsonl", '{"text": "a", "label": null}\n', "line 1: 'label' is null"),
        ("a.jsonl", '{"text": "a", "label": 0.5}\n', "line 1: 'label' is 0.5"),
        ("a.xlsx", "", "must end in .csv, .jsonl, .ndjson, .tsv"),
    ],
)
def test_errors_are_one_line_with_file_and_place(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    path = written(tmp_path, name, content)
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert said in message and str(path) in message and "\n" not in message


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    for name in ("none.csv", "folder.csv"):
        with pytest.raises(DataError, match=f"{name}: cannot be read"):
            read(tmp_path / name)
