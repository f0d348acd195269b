"""FedSEE's Figure 9 as a picture: estimates of clients' mixtures over the shares that they hold, regime by regime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.experiments.papers.estimates import Pairs, estimated, mean_absolute_error, pairs, slope
from coterie.experiments.papers.pictures import blank, saved
from coterie.experiments.papers.reading import Finished


def points(runs: Mapping[str, Sequence[Finished]]) -> dict[str, Pairs]:
    """Every pair of a client and a task in these runs, by column, of all seeds together; columns without any left out.

    runs: of one row, by column.
    """
    found = {
        column: [pair for run in of_column for pair in pairs(estimated(run.metrics), run.mixtures)]
        for column, of_column in runs.items()
    }
    return {column: told for column, told in found.items() if told}


def draw(found: Mapping[str, Pairs], stem: Path) -> list[Path]:
    """Writes <stem>.svg and <stem>.png: a panel for each title, with the diagonal, the least-squares line and figures.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    picture, panels = blank(len(found), 5, (2.7, 2.9))
    for panel, (title, told) in zip(panels, found.items(), strict=True):
        _panel(panel, title, told)
    panels[0].set_ylabel("share estimated from contributions", fontsize=8)
    return saved(picture, stem)


def _panel(panel: Any, title: str, told: Pairs) -> None:
    panel.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--")
    panel.scatter(*zip(*told, strict=True), color="C0", s=9, alpha=0.4, linewidths=0, zorder=2)
    steep, error = slope(told), mean_absolute_error(told)
    if steep is not None:
        x, y = (sum(values) / len(told) for values in zip(*told, strict=True))
        ends = [min(held for held, _ in told), max(held for held, _ in told)]
        panel.plot(ends, [y + steep * (end - x) for end in ends], color="C3", linewidth=1.4, zorder=3)
    figures = f"slope {'–' if steep is None else f'{steep:z.2f}'}, MAE {error:.3f}"
    panel.set_title(f"{title}\n{figures}", fontsize=9)
    panel.set_xlabel("share of a task in a client's mixture", fontsize=8)
    panel.set_xlim(-0.04, 1.04)
    panel.set_ylim(-0.04, 1.04)
    panel.set_aspect("equal")
    panel.tick_params(labelsize=7)
