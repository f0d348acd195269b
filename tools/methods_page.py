"""Writes the catalogue of methods, from their traits and byte formulas, between two marks of a page.

Usage: python tools/methods_page.py docs/methods.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from coterie.algorithms import METHODS
from coterie.report.catalogue import catalogue

BEGIN, END = "<!-- catalogue: make docs -->", "<!-- /catalogue -->"


def tables() -> str:
    """What each method is, then what it sends; one row for each, in the order of their names."""
    found = catalogue(METHODS)
    what = [
        ("method", "source", "ranks", "model", "deployed, beside Σ pᵢsᵢBᵢAᵢ", "upload linear"),
        ("---",) * 6,
        *((f"`{f.name}`", f.paper, f.ranks, f.model, f.deployed, f.linear) for f in found),
    ]
    sent = [
        ("method", "up, per layer", "down, per layer", "KiB up", "KiB down"),
        ("---", "---", "---", "---:", "---:"),
        *((f"`{f.name}`", f.up, f.down, f"{f.bytes_up / 1024:.4g}", f"{f.bytes_down / 1024:.4g}") for f in found),
    ]
    return "\n\n".join("\n".join(f"| {' | '.join(cells)} |" for cells in rows) for rows in (what, sent)) + "\n"


def inserted(text: str) -> str:
    """The page with the tables of today between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(inserted(page.read_text(encoding="utf-8")), encoding="utf-8")
