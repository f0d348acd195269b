"""Figures by matplotlib that take a page's colours: what all charts share.

One unit of a figure is a pixel of a page on which it has its natural width, so that letters keep their size.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from coterie.errors import ConfigError
from coterie.report.colours import LIGHT, SERIES, STAND_INS, with_variables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NARROW, WIDE = 356, 748
"""Natural widths: one column of a page, and two of three."""

MARKERS, MARKS = "os^DvPX*", "●■▲◆▼✚✖★"
"""matplotlib's markers, and letters like them."""

FEW_POINTS = 14
"""Up to so many points of a curve are marked."""

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


@dataclass(frozen=True)
class Sheet:
    """What a figure is drawn on: the colours by role, the width and, above the chart, room for its title, in units."""

    colours: Mapping[str, str]
    width: float
    head: float = 0


@dataclass(frozen=True)
class Table:
    """The same numbers as text: headings, and rows whose first cell names them."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A chart. name: of its files. title, unit: what stands above it. alt: what it shows, in words. note: how to read
    it. draw: the figure on a sheet. wide: whether it has room for two columns where a page has them."""

    name: str
    title: str
    unit: str
    alt: str
    draw: Callable[[Sheet], Figure]
    table: Table
    note: str = ""
    wide: bool = False


def available() -> bool:
    """Whether matplotlib is there."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def require() -> None:
    """Raises ConfigError where matplotlib is missing."""
    if not available():
        raise ConfigError("a report needs matplotlib, which is not installed: pip install 'coterie[report]'")


def inline(picture: Picture) -> str:
    """The figure as SVG inside of a page: its colours are variables, its text is text, its ids are its own.

    A wide one comes in two widths, of which the page shows the one that it has room for. Inside of `settings`.
    """
    widths = {"wide": WIDE, "narrow": NARROW} if picture.wide else {"": NARROW}
    return "".join(
        _embedded(_saved(picture.draw(Sheet(STAND_INS, width))), f"{picture.name}-{kind}", kind, picture.alt)
        for kind, width in widths.items()
    )


def files(picture: Picture) -> dict[str, bytes]:
    """The figure as files, by ending: svg and png (216 dots an inch). Inside of `settings`."""
    sheet = Sheet(LIGHT, WIDE if picture.wide else NARROW, head=48)
    figure = picture.draw(sheet)
    figure.patch.set(visible=True, facecolor=LIGHT["ground"])
    whole = figure.get_figheight() * 72
    for text, down, size, weight, role in (
        (picture.title, 21, 13, "bold", "ink"),
        (picture.unit, 37, 11, "normal", "muted"),
    ):
        figure.text(12 / sheet.width, 1 - down / whole, text, fontsize=size, weight=weight, color=LIGHT[role])
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=216, metadata={"Software": None})
    return {"svg": _saved(figure).encode(), "png": png.getvalue()}


@contextmanager
def settings(*, outlines: bool) -> Iterator[None]:
    """matplotlib's own defaults with ours on top, whatever the user has set, and back again. outlines: letters of an
    SVG become shapes, which need no font; else they stay text."""
    import matplotlib

    ours: dict[Any, Any] = {
        "svg.fonttype": "path" if outlines else "none",
        "svg.hashsalt": "coterie",
        "font.family": "DejaVu Sans",
        "font.size": 11,
        "axes.unicode_minus": True,
        "lines.solid_capstyle": "round",
        "path.simplify": True,
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(ours)
        yield


def _saved(figure: Figure) -> str:
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return drawn.getvalue()


def _embedded(svg: str, name: str, kind: str, alt: str) -> str:
    """A drawing as it may stand in a page beside others."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    used = {ref.lstrip("#") for one in root.iter() for key, ref in one.attrib.items() if key == f"{{{_XLINK}}}href"}
    used |= set(re.findall(r"url\(#([^)]+)\)", svg))
    for one in root.iter():
        one.tag = one.tag.removeprefix(f"{{{_SVG}}}")
        tip = one.get("id", "")
        if tip.startswith(TIP):
            ElementTree.SubElement(one, "title").text = tip.removeprefix(TIP)
        if "id" in one.attrib and one.attrib["id"] not in used:
            del one.attrib["id"]
        for key in list(one.attrib):
            if key == f"{{{_XLINK}}}href":
                one.set("href", f"#{name}-{one.attrib.pop(key).lstrip('#')}")
        if "id" in one.attrib:
            one.set("id", f"{name}-{one.attrib['id']}")
        for key in ("d", "x", "y", "transform", "style"):
            if key in one.attrib:  # a hundredth of a pixel is enough
                one.set(key, re.sub(r"(?<=\d\.\d{2})\d+", "", one.attrib[key]).replace("\n", ""))
        if "style" in one.attrib:  # of the font, the size; the page has the family
            one.set("style", re.sub(r"font: ([\d.]+px) [^;]+", r"font-size:\1", one.attrib["style"]))
        for key in ("clip-path", "style"):
            if "url(#" in one.get(key, ""):
                one.set(key, one.attrib[key].replace("url(#", f"url(#{name}-"))
    _, _, width, height = root.get("viewBox", "").split()
    body = "".join(ElementTree.tostring(child, encoding="unicode") for child in root)
    body = re.sub(r"\s*\n\s*", "\n", body)
    named = f"chart {kind}".strip()
    return (
        f'<svg class="{named}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(alt)}">'
        f"{with_variables(body)}</svg>"
    )


TIP = "tip: "
"""A gid that begins so becomes the tooltip of what carries it."""


def panel(
    sheet: Sheet,
    height: float,
    *,
    left: float = 40,
    right: float = 16,
    top: float = 14,
    bottom: float = 34,
) -> tuple[Figure, Axes]:
    """A figure of `sheet.width` times `height` units (and the head more), and its axes, around which the given margins
    stay free. Only the lower border is drawn; the grid is horizontal."""
    from matplotlib.figure import Figure

    colours = sheet.colours
    whole = height + sheet.head
    figure = Figure(figsize=(sheet.width / 72, whole / 72), dpi=72)
    figure.patch.set_visible(False)
    axes = figure.add_axes(
        (
            left / sheet.width,
            bottom / whole,
            (sheet.width - left - right) / sheet.width,
            (height - top - bottom) / whole,
        )
    )
    axes.patch.set_visible(False)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(color=colours["muted"], linewidth=0.8)
    axes.tick_params(axis="both", colors=colours["muted"], labelsize=11, length=0, pad=6)
    axes.grid(axis="y", color=colours["rule"], linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def bar(axes: Axes, x: float, length: float, y: float, height: float, colour: str, told: str | None = None) -> None:
    """A filled rectangle from x on around y, in data coordinates, with a tooltip where one is given."""
    from matplotlib.patches import Rectangle

    drawn = Rectangle((x, y - height / 2), length, height, facecolor=colour, linewidth=0, clip_on=False)
    if told is not None:
        drawn.set(**tip(told))
    axes.add_artist(drawn)


def marker(place: int) -> str:
    """The marker of the method at this place; from the ninth on, another one comes with each colour."""
    return MARKERS[(place + place // SERIES) % len(MARKERS)]


def spread_out(items: Sequence[Any], most: int) -> list[Any]:
    """All of them, or `most` evenly spaced ones with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[place * (len(items) - 1) // max(1, most - 1)] for place in range(most)]


def below(axes: Axes, sheet: Sheet, text: str, down: float = 29) -> None:
    """What the horizontal axis counts, so many units under it."""
    axes.annotate(
        text,
        (0.5, 0),
        xycoords="axes fraction",
        xytext=(0, -down),
        textcoords="offset points",
        ha="center",
        fontsize=11,
        color=sheet.colours["muted"],
    )


def rounds_axis(axes: Axes, last: int, first: int = 1) -> None:
    """Whole rounds, the first and the last of them named."""
    spare = 0.02 * (last - first) or 1.0
    axes.set_xlim(first - spare, last + spare)
    axes.set_xticks(round_ticks(first, last))


def round_ticks(first: int, last: int, most: int = 8) -> list[int]:
    """Round numbers to be named, ascending: both ends, and multiples of 1, 2, 5, 10, … not too near to them."""
    step = next(s * 10**power for power in range(12) for s in (1, 2, 5) if last - first < most * s * 10**power)
    multiples = range(-(-first // step) * step, last + 1, step)
    inner = [tick for tick in multiples if min(tick - first, last - tick) >= step / 2]
    return sorted({first, *inner, last})


def label_width(text: str, size: float = 11) -> float:
    """About how wide a text is, in units; more than a browser will need."""
    return 0.62 * size * len(text)


def shortened(text: str, letters: int) -> str:
    """The text, cut with an ellipsis where it is longer."""
    return text if len(text) <= letters else f"{text[: letters - 1].rstrip()}…"


def end_labels(
    axes: Axes, sheet: Sheet, labels: Sequence[tuple[float, float, str, str]], *, gap: float = 13, away: float = 8
) -> None:
    """Names beside the ends of lines: (x, y, text, role) in data coordinates. Those too near to each other are moved
    apart, in order, and tied to their ends by a hairline."""
    frame = axes.get_window_extent()
    if not labels:
        return
    ends = [axes.transData.transform((x, y)) for x, y, _, _ in labels]
    order = sorted(range(len(labels)), key=lambda place: (ends[place][1], -place))
    wanted = [float(ends[place][1]) for place in order]
    places = spaced(wanted, gap, frame.y0, frame.y1)
    edge = max(float(end[0]) for end in ends)
    inverse = axes.transData.inverted()
    for spot, place in enumerate(order):
        x, y, text, role = labels[place]
        moved = abs(places[spot] - wanted[spot]) > 3
        start = edge + away + (8 if any(abs(a - b) > 3 for a, b in zip(places, wanted, strict=True)) else 0)
        tx, ty = inverse.transform((start, places[spot]))
        axes.text(tx, ty, text, color=sheet.colours[role], va="center_baseline", fontsize=11, clip_on=False)
        if moved:
            hx, hy = inverse.transform((start - 3, places[spot]))
            axes.plot([x, hx], [y, hy], color=sheet.colours[role], linewidth=0.7, alpha=0.7, clip_on=False)


def spaced(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending places, each at least `gap` above the one before, close to the wanted ones (ascending too) and within
    [low, high] as far as that has room: neighbours that collide share their common middle."""
    blocks: list[tuple[float, int]] = []  # (sum of what the members want as the block's start, members)
    for place in wanted:
        blocks.append((place, 1))
        while len(blocks) > 1:
            (before, many), (after, more) = blocks[-2:]
            if before / many + gap * many <= after / more:
                break
            blocks[-2:] = [(before + after - more * gap * many, many + more)]
    found: list[float] = []
    for total, many in blocks:
        found += [total / many + gap * step for step in range(many)]
    if found and found[-1] > high:
        for place in range(len(found) - 1, -1, -1):
            found[place] = min(found[place], high - gap * (len(found) - 1 - place))
    if found and found[0] < low:
        for place in range(len(found)):
            found[place] = max(found[place], low + gap * place)
    return found


def swatches(
    figure: Figure,
    sheet: Sheet,
    names: Sequence[str],
    roles: Sequence[str],
    places: Sequence[tuple[float, int]],
    marks: str = "■",
) -> None:
    """A legend above the axes: a mark and a name at each of the places that `swatch_places` gave."""
    whole = figure.get_figheight() * 72
    for number, (name, role, (x, line)) in enumerate(zip(names, roles, places, strict=True)):
        y = 1 - (sheet.head + 11 + 17 * line) / whole
        figure.text(
            x / sheet.width, y, marks[number % len(marks)], fontsize=12, color=sheet.colours[role], va="center_baseline"
        )
        figure.text((x + 14) / sheet.width, y, name, fontsize=11, color=sheet.colours["muted"], va="center_baseline")


def swatch_places(names: Sequence[str], width: float) -> list[tuple[float, int]]:
    """Where the names of a legend stand, as many in a line as fit: (x, line)."""
    x, line, found = 12.0, 0, []
    for name in names:
        need = 14 + label_width(name)
        if x > 12 and x + need > width - 8:
            x, line = 12.0, line + 1
        found.append((x, line))
        x += need + 12
    return found


def legend_above(axes: Axes, sheet: Sheet, ncols: int, title: str = "") -> None:
    """What the labelled artists are called, in a line above the axes."""
    handles, labels = axes.get_legend_handles_labels()
    if title:
        from matplotlib.lines import Line2D

        handles, labels = [Line2D([], [], linestyle=""), *handles], [title, *labels]
        ncols += 1
    axes.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.01),
        ncols=ncols,
        frameon=False,
        fontsize=11,
        labelcolor=sheet.colours["muted"],
        handletextpad=0.1,
        columnspacing=0.9,
        borderaxespad=0,
        borderpad=0.1,
        handlelength=1.2,
    )


def tip(text: str) -> dict[str, Any]:
    """What makes a tooltip of a text, for the artists of matplotlib that take a gid."""
    return {"gid": f"{TIP}{text}"}
