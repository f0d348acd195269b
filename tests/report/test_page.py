"""The page: whole in itself, escaped, small, the same each time; and the command that writes it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.cli.main import main
from coterie.errors import ConfigError
from coterie.report.writing import write_report

pytest.importorskip("matplotlib", reason="matplotlib is not installed: it draws the figures")

VOID = {"meta", "br", "hr", "link"}


class Tree(HTMLParser):
    """Checks that elements are closed in order; collects ids, links and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.names: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        given = dict(attrs)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        self.links += [str(given[key]) for key in ("href", "src") if given.get(key)]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def page_of(*places: Path, out: Path) -> str:
    return write_report(places, out)[0].read_text(encoding="utf-8")


def test_a_page_of_real_runs_is_whole_small_and_loads_nothing(real: Path, tmp_path: Path) -> None:
    text = page_of(real, out=tmp_path / "p.html")
    tree = Tree(text)
    assert len(text.encode()) < 2_000_000
    assert not {"script", "link", "img", "iframe", "object"} & set(tree.names)
    assert all(link.startswith("#") and link[1:] in tree.ids for link in tree.links)
    assert "url(" not in text.replace("url(#", "") and "@import" not in text and "@font-face" not in text
    assert len(tree.ids) == len(set(tree.ids))
    said = " ".join(tree.words)
    assert "FedIT and " in said and "most frequent class" in said and "coterie report" in said
    assert "coterie compare" in said and "--methods fedit,fedpa-lora --seeds 0,1" in said


def test_a_page_is_the_same_each_time(real: Path, tmp_path: Path) -> None:
    assert page_of(real, out=tmp_path / "a.html") == page_of(real, out=tmp_path / "b.html")


def test_nothing_from_records_becomes_markup(records: Any, tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>&\"'"
    folder = records(
        "r",
        title=bad,
        settings={"task": {"name": bad}, "train": {"lr": bad}, "model": {"base": bad}},
        rows={"failed": {bad: bad}, "measures": {bad: 1.0}, "cohort": [bad], "answered": []},
        summary={"task": {"name": bad, "classes": [bad, bad], "test": 9, "source": bad, "notes": [bad]}},
    )
    tree = Tree(page_of(folder, out=tmp_path / "p.html"))
    assert "script" not in tree.names and any(bad in word for word in tree.words)


def test_what_is_missing_stands_on_the_page(records: Any, tmp_path: Path) -> None:
    folder = records("half", summary=None, settings={"rounds": 7})
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"round": 3, "glo')
    said = " ".join(Tree(page_of(folder, out=tmp_path / "p.html")).words)
    assert "half is not finished: 2 of 7 rounds have been played" in said
    assert "line 3 damaged and left out" in said and f"coterie resume {folder}" in said


def test_a_stored_comparison_adds_what_it_took_to_reach_a_score(records: Any, tmp_path: Path) -> None:
    for method, title in (("fedit", "FedIT"), ("flexlora", "FlexLoRA")):
        records(f"c/{method}", method=method, title=title)
    figure = {"mean": 1.0, "std": None, "values": {"0": 1}}
    reached = {"seeds": 1, "of": 1, "rounds": figure, "up_per_client": {**figure, "mean": 2048.0}}
    stored = {
        "methods": {"fedit": {"reached": {"pooled": reached}}, "flexlora": {"reached": {"pooled": None}}},
        "targets": {"pooled": {"score": 0.66, "from": "95 % of FlexLoRA"}},
    }
    (tmp_path / "c/comparison.json").write_text(json.dumps(stored), encoding="utf-8")
    said = " ".join(Tree(page_of(tmp_path / "c", out=tmp_path / "p.html")).words)
    assert "Until the pooled test shows 66.0 (95 % of FlexLoRA) " in said and "2.0 kB" in said


def test_a_file_that_no_report_wrote_is_not_overwritten(records: Any, tmp_path: Path) -> None:
    folder, place = records("r"), tmp_path / "thesis.html"
    place.write_text("years of work", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"thesis\.html is there and is no report"):
        write_report([folder], place)
    assert place.read_text(encoding="utf-8") == "years of work"
    own = tmp_path / "own.html"
    assert write_report([folder], own) == write_report([folder], own)
    with pytest.raises(ConfigError, match="is a folder"):
        write_report([folder], tmp_path)


def test_a_place_that_cannot_be_written_is_told(records: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([records("r")], tmp_path / "file" / "p.html")


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code and both streams of the command line."""
    capsys.readouterr()
    try:
        main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_command_writes_the_page_beside_the_run_and_figures_where_asked(
    records: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = records("one"), records("two", seed=1)
    code, out, _ = call(capsys, "report", one, "--figures", tmp_path / "f")
    assert code == 0 and out.splitlines()[0] == str(one / "report.html")
    names = {path.name for path in (tmp_path / "f").iterdir()}
    assert {"pooled.svg", "pooled.png", "traffic.svg"} <= names and f"{len(names) // 2} figures" in out
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "report", one, two)[1] == "report.html\n"
    assert call(capsys, "report", one, two, "--out", "deep/er/p.html")[1] == "deep/er/p.html\n"


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "report", place)
    assert code == 2 and not out and len(err.splitlines()) == 1 and err.startswith("coterie: error: ")


def test_without_matplotlib_the_way_out_is_told(
    records: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.report.drawing.available", lambda: False)
    code, _, err = call(capsys, "report", records("r"))
    assert code == 2 and "pip install 'coterie[report]'" in err


def test_a_run_leaves_its_page_and_a_page_that_fails_is_a_note(
    tiny_base: Path,
    reviews_csv: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {
        "method": "fedit",
        "rounds": 1,
        "task": {"name": "file", "path": str(reviews_csv)},
        "model": {"base": str(tiny_base), "targets": ["query", "value"]},
        "clients": {"count": 2},
        "train": {"steps": 1, "batch_size": 4},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 1},
    }
    Path("small.yaml").write_text(json.dumps(content), encoding="utf-8")
    code, out, _ = call(capsys, "run", "small.yaml", "--folder", "r")
    assert code == 0 and "r/report.html" in out and Path("r/report.html").is_file()

    def fails(*_: object) -> None:
        raise ValueError("no room")

    monkeypatch.setattr("coterie.report.writing.write_report", fails)
    code, _, err = call(capsys, "run", "small.yaml", "--folder", "q")
    assert code == 0 and "note: no page of it (no room); to try again: coterie report q" in err
    monkeypatch.setattr("coterie.report.drawing.available", lambda: False)
    code, out, err = call(capsys, "run", "small.yaml", "--folder", "s")
    assert code == 0 and "report.html" not in out and "note: no page" not in err


def test_a_worker_of_a_comparison_writes_no_page(records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.cli.report import page_after

    folder = records("r")
    spec = type("Spec", (), {"name": "coterie.cli.worker"})
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    page_after(folder)
    assert not (folder / "report.html").exists()
    spec.name = "coterie"  # type: ignore[attr-defined]
    page_after(folder)
    assert re.match("<!doctype html>", (folder / "report.html").read_text(encoding="utf-8"))


JUNK = st.sampled_from([None, "x", -1, 1e308, float("nan"), True, [], {}, [1, "a"], {"a": {"b": 1}}])


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_anywhere_in_the_records_costs_a_figure_at_most_and_the_page_only_where_no_method_is_left(
    records: Any, tmp_path: Path, data: st.DataObject
) -> None:
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    records("damaged", rows={"measures": {"rank": 1.0}, "objective": {"task": 0.5}})
    name = data.draw(
        st.sampled_from(["summary.json", "partition.json", "metrics.jsonl", "timing.jsonl", "config.yaml"])
    )
    place = folder / name
    read = yaml.safe_load if name == "config.yaml" else json.loads
    lines = [place.read_text(encoding="utf-8")]
    if name.endswith("jsonl"):
        lines = lines[0].splitlines()
    contents = [read(line) for line in lines]
    spot = contents[data.draw(st.integers(0, len(contents) - 1))]
    while True:
        key = data.draw(st.sampled_from(sorted(spot)))
        if not isinstance(spot[key], dict) or not spot[key] or data.draw(st.booleans()):
            break
        spot = spot[key]
    spot[key] = data.draw(JUNK)
    place.write_text("\n".join(json.dumps(content) for content in contents), encoding="utf-8")
    if not isinstance(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["method"], str):
        with pytest.raises(ConfigError, match=r"config\.yaml: names no method, so it is not the file of a run"):
            page_of(folder, out=tmp_path / "p.html")
        return
    tree = Tree(page_of(folder, out=tmp_path / "p.html"))
    assert {"results", "play-it-again", "settings"} <= set(tree.ids) and "svg" in tree.names
