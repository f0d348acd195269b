"""The picture of a partition: well-formed, true to the counts, readable on light and dark, nothing from outside."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data.holdings import manifest
from coterie.data.partition import dirichlet
from coterie.data.pictures import COLOURS, MOST_CLIENTS, partition_svg
from coterie.maths.keys import root_key

SVG = "{http://www.w3.org/2000/svg}"


def record(counts: list[list[int]], names: list[str] | None = None) -> dict[str, Any]:
    """A manifest of clients with the given numbers of each class."""
    labels = np.concatenate([np.repeat(np.arange(len(row)), row) for row in counts])
    borders = np.cumsum([sum(row) for row in counts])[:-1]
    parts = np.split(np.arange(len(labels)), borders)
    made = manifest(parts, labels, how={})
    if names is not None:
        made["classes"] = names
    made["clients"] = [{**held, "id": f"ward {client}"} for client, held in enumerate(made["clients"])]
    return made


def bars(svg: str) -> list[tuple[str, float, str]]:
    """Class, width and tooltip of every piece of a bar."""
    rects = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [(r.get("class") or "", float(r.get("width") or 0), r[0].text or "") for r in rects if len(r)]


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_pieces_are_as_long_as_their_counts_and_say_them() -> None:
    svg = partition_svg(record([[30, 10], [0, 60]], ["bad", "good"]))
    pieces = bars(svg)
    assert [tip for _, _, tip in pieces] == [
        "client ward 0, bad: 30 of 40 (75%)",
        "client ward 0, good: 10 of 40 (25%)",
        "client ward 1, good: 60 of 60 (100%)",
    ]
    assert [kind for kind, _, _ in pieces] == ["partition-0", "partition-1", "partition-1"]
    lengths = [width + 1 for _, width, _ in pieces]
    assert lengths[0] / lengths[2] == pytest.approx(0.5, abs=0.01)
    assert lengths[1] / lengths[2] == pytest.approx(1 / 6, abs=0.01)
    assert {"ward 0", "ward 1", "bad", "good", "40", "60", "30", "10"} <= set(texts(svg))
    assert "100 examples, 40 to 60 a client" in texts(svg)


def test_of_a_mixture_the_pieces_are_tasks() -> None:
    made = record([[30, 10], [0, 60]], ["bad", "good"])
    for client, groups in zip(made["clients"], [{"sms": 15, "movie": 25}, {"movie": 60}], strict=True):
        client["groups"] = groups
    supply = {"movie": 90, "sms": 20}
    made["mixture"] = {"groups": ["movie", "sms"], "supply": supply, "mean_total_variation": 0.375}
    svg = partition_svg({**made, "parts": {"movie": ["bad", "good"], "sms": ["ham", "spam"]}})
    assert [tip for _, _, tip in bars(svg)] == [
        "client ward 0, movie: 25 of 40 (62%)",
        "client ward 0, sms: 15 of 40 (38%)",
        "client ward 1, movie: 60 of 60 (100%)",
    ]
    assert {"examples of each task", "movie", "sms", "left to nobody: 10 examples that no client asked for"} <= set(
        texts(svg)
    )
    assert "mean distance of mixtures 0.38 (0: alike, 1: disjoint)" in texts(svg)
    assert "examples of each group" in texts(partition_svg(made))


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 400), min_size=4, max_size=4), min_size=1, max_size=9).filter(
        lambda rows: any(map(sum, rows))
    ),
    st.integers(200, 900),
)
def test_everything_stays_inside_of_the_drawing(rows: list[list[int]], width: int) -> None:
    svg = partition_svg(record(rows), width)
    root = ElementTree.fromstring(svg)
    _, _, across, down = map(float, (root.get("viewBox") or "").split())
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(name) or 0) for name in ("x", "y", "width", "height"))
        assert x >= 0 and x + w <= across + 0.01 and y >= 0 and y + h <= down
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x") or 0) <= across and 0 < float(text.get("y") or 0) <= down


def test_of_many_classes_the_rarest_are_put_together() -> None:
    counts = [[10 + kind for kind in range(77)], [5] * 77]
    svg = partition_svg(record(counts, [f"intent {kind}" for kind in range(77)]))
    assert "68 others" in texts(svg) and "intent 76" in texts(svg) and "intent 3" not in texts(svg)
    shown = [int(tip.split(": ")[1].split()[0].replace(",", "")) for _, _, tip in bars(svg)]
    assert sum(shown) == sum(map(sum, counts)) and len(shown) == 2 * len(COLOURS)


def test_of_many_clients_evenly_spaced_ones_are_drawn_and_it_is_said() -> None:
    labels = np.arange(3000) % 3
    made = manifest(dirichlet(labels, 500, 1.0, root_key(0)), labels, how={})
    svg = partition_svg(made)
    clients = {tip.split(",")[0] for _, _, tip in bars(svg)}
    assert len(clients) == MOST_CLIENTS and {"client 0", "client 499"} <= clients
    assert f"{MOST_CLIENTS} of 500 clients are drawn, evenly spaced" in texts(svg)


def test_names_are_escaped_and_long_ones_shortened() -> None:
    svg = partition_svg(record([[3, 4]], ["<b>&", "x" * 60]))
    assert "<b>" not in svg and "<b>&" in texts(svg)
    assert any(text.endswith("…") and len(text) == 28 for text in texts(svg))
    assert any("x" * 60 in tip for _, _, tip in bars(svg))


def test_nothing_comes_from_outside_and_text_takes_the_colour_of_the_place() -> None:
    svg = partition_svg(record([[3, 4], [5, 6]]))
    assert re.findall(r"https?://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
    assert "url(" not in svg and "@import" not in svg and "<script" not in svg
    assert "fill:currentColor" in svg
    # Only as a document of its own may it choose the colours of text and ground.
    assert re.findall(r"([^{}]*)\{[^}]*color:CanvasText", svg.split("<style>")[1]) == ["svg.partition:root"]


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", COLOURS)
def test_colours_have_enough_contrast_on_light_and_dark_and_under_figures(colour: str) -> None:
    """WCAG 2.1: 3 for graphics, 4.5 for text."""
    own = luminance(colour) + 0.05
    assert 1.05 / own >= 3
    assert own / (luminance("#121212") + 0.05) >= 3
    assert own / 0.05 >= 4.5
