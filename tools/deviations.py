"""Writes docs/deviations.md, where each method departs from its paper, from the heads of the algorithm files.

Usage: python tools/deviations.py docs/deviations.md
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from coterie.algorithms import METHODS, Algorithm

HEAD = """\
# Deviations

Where a method here departs from its paper, and why. This page is made from the heads of the files in
`src/coterie/algorithms` by `make docs`; change it there. A tag such as P6 numbers an open point of a paper:
S for FedSEE, L for FedSLM, P for FedPA-LoRA, F for SeFoRA.
"""


def deviations(method: type[Algorithm]) -> str | None:
    """The paragraph "Deviation(s): …" in the head of the method's file, on one line; None without one."""
    head = sys.modules[method.__module__].__doc__ or ""
    found = re.search(r"^Deviations?:\s*(.*?)(?:\n\s*\n|\Z)", head, re.DOTALL | re.MULTILINE)
    return None if found is None else " ".join(found.group(1).split())


def page() -> str:
    """The whole page, methods in the order of their names."""
    parts = [HEAD]
    for name, method in sorted(METHODS.items()):
        said = deviations(method)
        text = "none." if said is None else said
        paragraph = f"`{name}`, {method.traits.paper}. {text[0].upper()}{text[1:]}"
        wrapped = textwrap.fill(paragraph, 110, break_long_words=False, break_on_hyphens=False)
        parts.append(f"## {method.traits.title}\n\n{wrapped}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
