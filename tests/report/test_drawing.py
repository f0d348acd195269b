"""What all charts share: labels that do not collide, ticks, and SVG that may stand in a page."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.report import drawing
from coterie.report.drawing import Picture, Sheet, Table, round_ticks, spaced, spread_out, tip
from coterie.report.html import Html, element, joined

pytest.importorskip("matplotlib", reason="matplotlib is not installed: it draws the figures")

PLACES = st.lists(st.floats(0, 300), max_size=15).map(sorted)


@given(PLACES, st.floats(1, 15))
def test_labels_keep_their_order_and_distance_and_stay_inside_where_there_is_room(
    wanted: list[float], gap: float
) -> None:
    found = spaced(wanted, gap, 0, 300)
    assert len(found) == len(wanted)
    assert all(after - before >= gap - 1e-6 for before, after in itertools.pairwise(found))
    if gap * (len(wanted) - 1) <= 300:
        assert all(-1e-6 <= place <= 300 + 1e-6 for place in found)


@given(st.lists(st.integers(0, 20), unique=True, max_size=10).map(sorted))
def test_labels_with_room_stay_where_they_belong(wanted: list[int]) -> None:
    places = [15.0 * place for place in wanted]
    assert spaced(places, 13, 0, 300) == pytest.approx(places)


def test_colliding_labels_share_their_middle() -> None:
    assert spaced([100, 100], 10, 0, 300) == pytest.approx([95, 105])
    assert spaced([0, 0], 10, 0, 300) == pytest.approx([0, 10])
    assert spaced([300, 300], 10, 0, 300) == pytest.approx([290, 300])


@given(st.integers(1, 50), st.integers(0, 5000))
def test_round_ticks_are_few_and_have_both_ends(first: int, more: int) -> None:
    ticks = round_ticks(first, first + more)
    assert ticks[0] == first and ticks[-1] == first + more and len(ticks) <= 11
    assert ticks == sorted(set(ticks))


@given(st.lists(st.integers(), max_size=40), st.integers(2, 10))
def test_of_many_items_as_many_as_may_be_with_both_ends(items: list[int], most: int) -> None:
    kept = spread_out(items, most)
    assert len(kept) == min(len(items), most)
    assert not items or (kept[0] == items[0] and kept[-1] == items[-1])


def picture(wide: bool = False) -> Picture:
    def draw(sheet: Sheet):  # type: ignore[no-untyped-def]
        figure, axes = drawing.panel(sheet, 200)
        axes.plot([0, 1], [0.0351, 0.0352], color=sheet.colours["s0"], marker="o", **tip("a < b"))
        axes.set_yticks([0.0351], ["0.03512345"])
        drawing.end_labels(axes, sheet, [(1, 0.0352, "R&D", "s0")])
        return figure

    return Picture("p", "Title", "unit", 'says "so"', draw, Table([], []), wide=wide)


def test_a_figure_in_a_page_has_variables_text_tooltips_and_ids_of_its_own() -> None:
    with drawing.settings(outlines=False):
        found = drawing.inline(picture())
    root = ElementTree.fromstring(found)
    assert root.get("role") == "img" and root.get("aria-label") == 'says "so"'
    assert "var(--s0)" in found and "#fe" not in found.replace("#fe-", "")
    assert not re.findall(r"https?:", found) and "<style" not in found and "<metadata" not in found
    texts = [text.text for text in root.iter("text")]
    assert "R&D" in texts and "0.03512345" in texts  # numbers are shortened where they place, not where they tell
    assert "a < b" in [title.text for title in root.iter("title")]
    ids = [one.get("id") for one in root.iter() if one.get("id")]
    assert ids and all(str(name).startswith("p-") for name in ids)
    assert {one.get("href") for one in root.iter("use")} <= {f"#{name}" for name in ids}


def test_a_wide_figure_comes_in_two_widths_that_share_no_id() -> None:
    with drawing.settings(outlines=False):
        found = drawing.inline(picture(wide=True))
    assert re.findall(r'class="chart (\w+)" viewBox="0 0 ([\d.]+)', found) == [("wide", "748"), ("narrow", "356")]
    ids = re.findall(r' id="([^"]+)"', found)
    assert len(ids) == len(set(ids))


def test_files_stand_alone_and_are_the_same_each_time() -> None:
    with drawing.settings(outlines=True):
        one, other = drawing.files(picture()), drawing.files(picture())
    assert one == other
    assert one["png"].startswith(b"\x89PNG") and b"var(--" not in one["svg"] and b"<text" not in one["svg"]
    assert ElementTree.fromstring(one["svg"]).get("viewBox") == "0 0 356 248"


def test_the_users_own_matplotlib_settings_neither_count_nor_change() -> None:
    import matplotlib

    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30}):
        with drawing.settings(outlines=True):
            mine = drawing.files(picture())
        assert matplotlib.rcParams["font.size"] == 30
    with drawing.settings(outlines=True):
        assert drawing.files(picture()) == mine


def test_html_escapes_what_is_not_html() -> None:
    made = element("p", "<b>&", Html("<i>x</i>"), None, class_="a b", title='"', hidden=True, id=None, aria_label="n")
    assert made == '<p class="a b" title="&quot;" hidden aria-label="n">&lt;b&gt;&amp;<i>x</i></p>'
    assert joined("<", Html("<br>")) == "&lt;<br>" and element("br") == "<br>"
