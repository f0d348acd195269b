"""The newcomer's page is played as it stands: files saved, commands run, Python executed, outputs compared."""

from __future__ import annotations

import csv
import io
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from docs.pages import WHOLE, Block, blocks

import coterie
from coterie.cli.main import main


def played(line: str) -> None:
    """A line of a plain block: `python FILE` or `coterie …`."""
    program, *arguments = shlex.split(line, comments=True)
    if program == "python":
        runpy.run_path(arguments[0], run_name="__main__")
        return
    assert program == "coterie", f"{WHOLE.name}: {line}"
    try:
        main(arguments)
    except SystemExit as stop:
        assert not stop.code, line


def stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def figures(text: str) -> list[str]:
    """The names of a printed table's rows."""
    return re.findall(r"^│ (.+?)\s*│", text, re.MULTILINE)


def check(command: str, out: str, shown: Block) -> None:
    """What the page shows of an output is what came, but for numbers that differ from machine to machine."""
    if command.startswith("coterie partition"):
        assert stripped(out) == stripped(shown.text)
    elif command.startswith("coterie run"):
        assert figures(out) == figures(shown.text) and len(figures(out)) > 5
    elif command.startswith("coterie predict"):
        came, told = (list(csv.DictReader(io.StringIO(text))) for text in (out, shown.text))
        assert [{**row, "probability": ""} for row in came] == [{**row, "probability": ""} for row in told]
        assert all(float(row["probability"]) > 0.5 for row in came)
    else:
        assert Path("notes.csv").read_text(encoding="utf-8").startswith(shown.text)


@pytest.mark.assets
def test_the_newcomers_page_works_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    names: dict[str, object] = {"__name__": "first_federation"}
    command = ""
    compared = 0
    for block in blocks(WHOLE):
        language, _, file = block.language.partition(" ")
        if file:
            Path(file).write_text(block.text, encoding="utf-8")
        elif language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), names)
        elif language == "text":
            check(command, capsys.readouterr().out, block)
            compared += 1
        else:
            assert language == ""
            for command in block.text.splitlines():
                capsys.readouterr()
                played(command)
    assert compared == 4
    # What the page says in words.
    summary = json.loads(Path("runs/hospitals-flexlora-seed0/summary.json").read_text(encoding="utf-8"))
    assert summary["global"]["pooled"]["accuracy"] > summary["majority"]["pooled"] + 0.2
    run = coterie.load("runs/hospitals-flexlora-seed0")
    texts = ["31 years: cut the thumb, bleeding heavily", "62 years: repeat prescription"]
    assert run.labels == ("routine", "urgent")
    assert coterie.load("triage", base="minilm").predict(texts) == run.predict(texts) == ["urgent", "routine"]
    played("coterie predict runs/hospitals-flexlora-seed0 new.csv --client north --out predicted.csv")
    assert Path("predicted.csv").is_file()
