"""Figures over rounds, as numbers and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.experiments.papers.pictures import blank, saved
from coterie.experiments.papers.reading import FIGURES, Finished, curve

DIGITS = 4


def drawn(figures: Sequence[str]) -> list[str]:
    """Those of the figures that are drawn over rounds."""
    return [figure for figure in figures if FIGURES[figure].axis is not None]


def series(runs: Sequence[Finished], figures: Sequence[str], layer: str) -> dict[str, dict[str, Any]]:
    """By figure that has a curve: the rounds, and mean, least and greatest over seeds, to four significant digits."""
    made = {}
    for figure in drawn(figures):
        by_round: dict[int, list[float]] = {}
        for run in runs:
            for number, value in curve(run, figure, layer).items():
                by_round.setdefault(number, []).append(value)
        numbers = sorted(by_round)
        made[figure] = {
            "rounds": numbers,
            "mean": [_short(sum(by_round[n]) / len(by_round[n])) for n in numbers],
            "least": [_short(min(by_round[n])) for n in numbers],
            "greatest": [_short(max(by_round[n])) for n in numbers],
        }
    return made


def draw(result: Mapping[str, Any], figures: Sequence[str], stem: Path) -> list[Path]:
    """Writes <stem>.svg and <stem>.png: one panel a figure and column, one line a row, the band from least to greatest
    seed.

    Logarithmic axes are for mismatches, whose zeros lie on the floor of their panel, as in FedPA-LoRA's Figure 1.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    wanted = [(column, figure) for column in result["columns"] for figure in drawn(figures)]
    picture, panels = blank(len(wanted), 4, (3.2, 2.6))
    rows = {row: entry for row, entry in result["rows"].items() if "series" in entry}
    for panel, (column, figure) in zip(panels, wanted, strict=True):
        _panel(panel, figure, {row: entry["series"][column][figure] for row, entry in rows.items()})
        if len(result["columns"]) > 1:
            panel.set_title(f"{result['columns'][column]}\n{FIGURES[figure].heading}", fontsize=9)
    colours = [panels[0].plot([], [], color=f"C{index}", linewidth=1.4)[0] for index in range(len(rows))]
    titles = [entry["title"] for entry in rows.values()]
    picture.legend(colours, titles, loc="outside lower center", ncols=max(1, len(titles)), fontsize=8, frameon=False)
    return saved(picture, stem)


def _panel(panel: Any, figure: str, lines: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """One figure's lines; on a logarithmic axis zeros lie on a floor well below all else."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    logarithmic = FIGURES[figure].axis == "log"
    floor, factor = -math.inf, 100 if FIGURES[figure].unit == "percent" else 1
    if logarithmic:
        positive = [value for line in lines.values() for value in line["least"] if value > 0]
        zeros = any(value == 0 for line in lines.values() for value in line["least"])
        floor = min(positive, default=1.0) / (10 if zeros else 1)
    for index, line in enumerate(lines.values()):
        if line["mean"]:
            low, mean, high = (
                [factor * max(value, floor) for value in line[name]] for name in ("least", "mean", "greatest")
            )
            nothing = logarithmic and not any(line["greatest"])
            panel.plot(line["rounds"], mean, color=f"C{index}", linewidth=1.4, linestyle=":" if nothing else "-")
            if nothing:
                where = (line["rounds"][-1], mean[-1])
                panel.annotate("0", where, (3, -2), textcoords="offset points", color=f"C{index}", fontsize=8)
            panel.fill_between(line["rounds"], low, high, color=f"C{index}", alpha=0.2, linewidth=0)
    if logarithmic:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_title(FIGURES[figure].heading, fontsize=9)
    panel.set_xlabel("round", fontsize=8)
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panel.tick_params(which="both", labelsize=7)
    panel.grid(alpha=0.25, linewidth=0.5)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
