"""What all pictures of reproductions share: an empty one with its panels, and how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError


def require_matplotlib() -> None:
    """Raises ConfigError where matplotlib, which draws the picture, is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "this figure is drawn by matplotlib; install it with: pip install 'coterie[report]'"
        ) from error


def blank(count: int, across: int, size: tuple[float, float]) -> tuple[Any, Sequence[Any]]:
    """A picture and its `count` panels, at most `across` in a row, each of this size in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(across, count)
    down = -(-count // across)
    picture = Figure(figsize=(size[0] * across, size[1] * down), layout="constrained")
    FigureCanvasAgg(picture)
    panels = list(picture.subplots(down, across, squeeze=False).flat)
    for panel in panels[count:]:
        panel.remove()
    return picture, panels[:count]


def saved(picture: Any, stem: Path) -> list[Path]:
    """Writes <stem>.svg and <stem>.png, the same bytes whenever the same is drawn."""
    from matplotlib import rc_context

    written = []
    for suffix, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 90})):
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "coterie"}):
            picture.savefig(stem.with_suffix(suffix), **options)
        written.append(stem.with_suffix(suffix))
    return written
