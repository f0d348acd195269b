"""What the documentation shows works as it stands there."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path

import deviations
import methods_page
import pytest
import typer
from docs.pages import PAGES, ROOT, WHOLE, Block, blocks, command_lines, links

from coterie.algorithms import METHODS
from coterie.cli.main import app
from coterie.experiments.config import load

WITH_PYTHON = [page for page in PAGES if page != WHOLE and any(block.language == "python" for block in blocks(page))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_blocks_run_one_after_another(
    page: Path, toy_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(toy_assets))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    names: dict[str, object] = {"__name__": f"page_{page.stem}"}
    try:
        for block in blocks(page):
            if block.language == "python":
                _execute(block, names)
    finally:
        for name in set(sys.modules) - known:
            if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def _execute(block: Block, names: dict[str, object]) -> None:
    """Runs a block, and the tests in it; one that opens with a file name is written there and imported."""
    if block.file is not None:
        Path(block.file).write_text(block.text, encoding="utf-8")
        importlib.invalidate_caches()
        importlib.import_module(Path(block.file).stem)
        return
    # Blank lines before the text, so that a traceback names the line of the page.
    exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), names)
    for name in re.findall(r"^def (test_\w+)\(\)", block.text, re.MULTILINE):
        test = names[name]
        assert callable(test)
        test()


@pytest.mark.parametrize(("page", "line"), list(command_lines()))
def test_command_lines_name_existing_commands_options_files_and_settings(
    page: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    name = "coterie"
    while isinstance(command, typer.core.TyperGroup) and arguments:
        name, *arguments = arguments
        assert name in command.commands, f"{page}: {line}: there is no command {name!r}"
        command = command.commands[name]
    given = command.make_context(name, arguments).params
    if name in ("run", "compare"):
        chosen = ["method=fedit"] if name == "compare" else []
        load(given["config"], [*(given["settings"] or []), *chosen])
    for method in (given.get("methods") or "").split(","):
        assert not method or method in METHODS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    assert [link for link in links(page) if not (page.parent / link).exists()] == []


def test_the_catalogue_is_that_of_the_methods() -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert methods_page.inserted(text) == text, "run make docs"


def test_the_page_of_deviations_is_that_of_the_methods_heads() -> None:
    assert deviations.page() == (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8"), "run make docs"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_from_a_paper_states_its_deviations(name: str) -> None:
    method = METHODS[name]
    assert method.traits.paper == "baseline" or deviations.deviations(method)
