"""Writes the table of what travels, from the methods' traits and byte formulas, between two marks of a page.

Usage: python tools/traffic_table.py README.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from coterie.algorithms import METHODS, Algorithm
from coterie.protocol import Card, Layer

BEGIN, END = "<!-- traffic: make docs -->", "<!-- /traffic -->"
LAYER, RANK = Layer(768, 768), 8


def table() -> str:
    """One row for each method, in the order of their names."""
    rows = [
        (
            "method",
            "source",
            "ranks",
            "up, per layer",
            "down, per layer",
            "KiB up / down",
            "deployed, beside Σ pᵢsᵢBᵢAᵢ",
        ),
        ("---",) * 7,
        *(row(name, method) for name, method in sorted(METHODS.items())),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n"


def row(name: str, method: type[Algorithm]) -> tuple[str, ...]:
    """The cells of one method; sizes are of one 768 x 768 layer at rank 8, in fp32."""
    traits = method.traits
    card = Card("example", RANK, 1, 1.0, {"layer": LAYER}, RANK)
    algorithm = method()
    sizes = [algorithm.bytes_up(LAYER, card) / 1024, algorithm.bytes_down(LAYER, card) / 1024]
    return (
        f"`{name}`",
        traits.paper,
        traits.ranks,
        traits.up,
        traits.down,
        " / ".join(f"{size:g}" for size in sizes),
        deployed(method),
    )


def deployed(method: type[Algorithm]) -> str:
    """How what the server deploys stands to the weighted sum of the clients' products, in words."""
    traits = method.traits
    if traits.up == "nothing":
        return "nothing"
    if traits.exact:
        return "equal"
    return "best of its rank" if traits.best_rank else "approximate"


def inserted(text: str) -> str:
    """The page with the table of today between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(inserted(page.read_text(encoding="utf-8")), encoding="utf-8")
