"""The documentation taken apart: fenced blocks and links of the Markdown pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NO_RUN = "<!-- no-run -->"
WHOLE = ROOT / "docs" / "first-federation.md"
"""The page of which every block is played in turn, commands too (`test_first_federation.py`)."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language ("" for none), its text, and the line on which the text begins."""

    page: Path
    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The file name that a first line such as `# mine.py` gives."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found.group(1) if found else None


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, but those after a line `<!-- no-run -->`."""
    lines = page.read_text(encoding="utf-8").splitlines()
    language, start = None, 0
    for number, line in enumerate(lines):
        if language is None and line.startswith("```"):
            language, start = line[3:].strip(), number + 1
        elif language is not None and line.startswith("```"):
            before = [text for text in lines[: start - 1] if text.strip()]
            if not before or before[-1].strip() != NO_RUN:
                yield Block(page, language, "\n".join(lines[start:number]) + "\n", start + 1)
            language = None


def command_lines() -> Iterator[tuple[str, str]]:
    """Every `coterie ...` line of plain blocks and of the Makefile, and where it stands; but of `WHOLE`."""
    for page in PAGES:
        if page == WHOLE:  # its commands name files that the page itself makes
            continue
        for block in blocks(page):
            if block.language != "python":
                yield from ((page.name, line) for line in block.text.splitlines() if line.startswith("coterie "))
    for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines():
        if line.startswith("\t$(BIN)/coterie "):
            yield "Makefile", line.strip().removeprefix("$(BIN)/")


def links(page: Path) -> list[str]:
    """The targets of a page's links to files."""
    found = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return [str(target) for target in found]
