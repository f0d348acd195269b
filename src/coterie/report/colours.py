"""The colours of a report, by what they stand for, on a light and on a dark ground.

Series keep apart for all common kinds of colour vision: among the eight, the smallest difference (CIE 1976) as seen
with protanopia, deuteranopia or tritanopia is 10. All text and series have a contrast of 4.5 to the ground or more,
all else that is drawn 3; the tests measure both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SERIES, RANKS, PARTS, KINDS = 8, 5, 5, 10
"""How many colours there are for methods, for ranks from low to high, for parts of a sum, and for classes."""


def _numbered(prefix: str, colours: str) -> dict[str, str]:
    return {f"{prefix}{place}": colour for place, colour in enumerate(colours.split())}


_CLASSES = _numbered("k", "#1f9c96 #d6608c #8f8c22 #9b7ad6 #a5794a #3f9a54 #4a8fd6 #d9731a #d0604f #858b93")
"""At least 3:1 to both grounds, and 4.5:1 under black figures."""

LIGHT: Mapping[str, str] = {
    "ground": "#fcfcfb",
    "ink": "#1d1f22",
    "muted": "#5c6168",
    "rule": "#e3e4e2",
    "panel": "#f4f4f1",
    "bad": "#c0272d",
    "warn": "#9a5b00",
    **_numbered("s", "#1463d0 #b9540f #0b4d3c #8a1a84 #56470a #6b6e78 #6a1fe0 #cf2f42"),
    **_numbered("r", "#c58214 #bb5333 #93305f #5c2579 #281b5c"),
    **_numbered("p", "#2f4358 #5f7489 #8194a5 #a87b32 #a5648f"),
    **_CLASSES,
}
DARK: Mapping[str, str] = {
    "ground": "#131518",
    "ink": "#e9eaec",
    "muted": "#a2a8b0",
    "rule": "#2c3036",
    "panel": "#1b1e22",
    "bad": "#ff7b72",
    "warn": "#f0b440",
    **_numbered("s", "#4a97ff #f96f2c #2fe0b0 #fb9bec #ecde7e #9aa4af #a673cf #dd6b73"),
    **_numbered("r", "#7d63cc #b864bd #e6738d #f6a45c #f8e37e"),
    **_numbered("p", "#c6d3df #92a6b9 #62778b #c79b55 #c98ab5"),
    **_CLASSES,
}

STAND_INS: Mapping[str, str] = {role: f"#fe{place:02x}01" for place, role in enumerate(LIGHT)}
"""Colours that stand for roles while a figure is drawn for a page, where variables take their place."""


def with_variables(svg: str) -> str:
    """The drawing with var(--role) in place of stand-ins."""
    for role, colour in STAND_INS.items():
        svg = svg.replace(colour, f"var(--{role})")
    return svg


def style_rules() -> str:
    """The variables for a page, in the reader's scheme; on paper, light."""
    light, dark = (";".join(f"--{role}:{colour}" for role, colour in scheme.items()) for scheme in (LIGHT, DARK))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def series(place: int) -> str:
    """The role of the method at this place; from the ninth on, colours come again (with dashes)."""
    return f"s{place % SERIES}"


def rank_roles(ranks: Any) -> dict[int, str]:
    """The role of each of these ranks, from low to high; of more ranks than colours, neighbours share one."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return {ordered[0]: "r2"}
    return {rank: f"r{round(place * (RANKS - 1) / (len(ordered) - 1))}" for place, rank in enumerate(ordered)}
