"""Pages of computed theory: values by panel, kept seed by seed, and how they are put into tables and drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from coterie.errors import ConfigError
from coterie.experiments.folders import write_whole
from coterie.experiments.papers.definition import Definition
from coterie.experiments.papers.fedsee_theory import COMPUTED, Sizes, sizes_of
from coterie.experiments.papers.pictures import blank, saved
from coterie.experiments.papers.reading import Cell, cell
from coterie.maths.keys import root_key

VALUE = "value"
"""The one figure of such a page."""
NEGLIGIBLE = 1e-12
"""What is smaller is told as rounding."""


def measured(
    definition: Definition, config: Mapping[str, Any], place: Path, seeds: Sequence[int], say: Callable[[str], None]
) -> dict[str, dict[str, dict[str, Cell]]]:
    """Cells by row, column and the figure `value`, of one computation after another, on one thread.

    config: the sizes, see `fedsee_theory.Sizes`. What `place` holds from a run before is taken from there.

    Raises:
        ConfigError: `place` holds values of other settings.
    """
    places = places_on_x(definition)
    settings = json.loads(json.dumps({"config": dict(config), "panels": places}))
    kept = kept_values(place, settings)
    sizes = sizes_of(config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for seed in seeds:
            for name, compute in COMPUTED.items():
                if f"{name}/{seed}" not in kept:
                    kept[f"{name}/{seed}"] = compute(root_key(seed).fold("fedsee-theory"), sizes, places)
                    write_whole(place, json.dumps({**settings, "values": kept}, indent=1) + "\n")
                    say(f"seed {seed}: {name.replace('_', ' ')}")
    finally:
        torch.set_num_threads(threads)
    by_seed = {
        str(seed): {row: found for name in COMPUTED for row, found in kept[f"{name}/{seed}"].items()} for seed in seeds
    }
    return {
        row: {
            column: {VALUE: cell({seed: by_seed[seed][row].get(column) for seed in by_seed})}
            for column in definition.panels[entry.panel].columns
            if any(column in by_seed[seed][row] for seed in by_seed)
        }
        for row, entry in definition.rows.items()
    }


def places_on_x(definition: Definition) -> dict[str, dict[str, float]]:
    """Each panel's columns with their place on its x axis, zero where they have none."""
    return {
        name: {column: float(definition.columns[column].config.get("x", 0)) for column in panel.columns}
        for name, panel in definition.panels.items()
    }


def told(definition: Definition) -> dict[str, Any]:
    """The panels as a result keeps them: title, columns, rows, axis and places on it."""
    places = places_on_x(definition)
    return {
        name: {
            "title": panel.title,
            "columns": list(panel.columns),
            "rows": [row for row, entry in definition.rows.items() if entry.panel == name],
            "axis": None if panel.axis is None else panel.axis.model_dump(),
            "x": list(places[name].values()),
        }
        for name, panel in definition.panels.items()
    }


def without_blanks(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of a result without what such rows do not have: methods, heads, states."""
    return {row: {name: value for name, value in entry.items() if value != ""} for row, entry in rows.items()}


def setting_here(sizes: Sizes, seeds: Sequence[int]) -> dict[str, str]:
    """Our side of the set-up, in the words of `setting.LABELS`."""
    return {
        "task": "synthetic: y = W0 x + θm φ(x) + noise",
        "features": f"φ(x) = A x, d = {sizes.d}, r = {sizes.r}, l = {sizes.l}",
        "condition": f"κ(Φ) = {sizes.condition:g}",
        "spectrum": f"from 1 to {sizes.condition:g} in equal ratios",
        "experts": f"M = {sizes.M}, centred, diameter {sizes.diam:g}",
        "drawn": "normal",
        "noise": f"σ = {sizes.sigma:g}",
        "clients": f"{sizes.N}",
        "mixtures": "one anchor a task; others Dir(0.5)",
        "local": "least squares in closed form",
        "extraction": "FISTA with exact simplex projection",
        "public": f"{sizes.n_m} examples a task; {sizes.plenty_m} where clients' data vary",
        "clustering": "average linkage of Frobenius distances",
        "spa": "farthest from the affine hull of those chosen",
        "precision": "float64",
        "seeds": ", ".join(map(str, seeds)),
    }


def tables(result: Mapping[str, Any]) -> list[str]:
    """A table for each panel; what the paper reports of a row stands in a line above ours."""
    made: list[str] = []
    for panel in result["panels"].values():
        titles = [result["columns"][column] for column in panel["columns"]]
        made += [f"{panel['title']}:", "", f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
        for row in panel["rows"]:
            entry = result["rows"][row]
            if entry["paper"]:
                reported = [entry["paper"].get(column) for column in panel["columns"]]
                cells = ["–" if one is None else _reported(*one) for one in reported]
                made.append(f"| {entry['title']}: paper | {' | '.join(cells)} |")
            name = f"{entry['title']}: here" if entry["paper"] else entry["title"]
            made.append(
                f"| {name} | {' | '.join(_written(entry['here'].get(column)) for column in panel['columns'])} |"
            )
        made.append("")
    notes = [f"{entry['title']}: {entry['note']}." for entry in result["rows"].values() if "note" in entry]
    spread = ["± is the sample standard deviation over seeds.", ""] if len(result["seeds"]) > 1 else []
    return [*made, *spread, *([" ".join(notes), ""] if notes else [])]


def _reported(mean: float, std: float | None) -> str:
    return f"{mean:g}" if std is None else f"{mean:g} ± {std:g}"


def _written(found: Mapping[str, Cell] | None) -> str:
    """Mean and deviation with three significant digits; a deviation that is rounding is left out."""
    value = None if found is None else found[VALUE]
    if value is None or value["mean"] is None:
        return "–"
    mean, std = value["mean"], value["std"] or 0.0
    written = "0" if mean == 0 else "< 1e-12" if abs(mean) < NEGLIGIBLE else f"{mean:.3g}"
    return written if std < NEGLIGIBLE * max(1.0, abs(mean)) else f"{written} ± {std:.3g}"


def draw(result: Mapping[str, Any], stem: Path) -> list[Path]:
    """Writes <stem>.svg and <stem>.png: every panel with an axis, its rows as lines with bands over seeds, the paper's
    figures as crosses.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    wanted = [panel for panel in result["panels"].values() if panel["axis"] is not None]
    picture, plots = blank(len(wanted), 3, (3.9, 3.1))
    for plot, panel in zip(plots, wanted, strict=True):
        _plot(plot, panel, result["rows"])
    (line,) = plots[0].plot([], [], color="0.3", marker="o", markersize=3, linewidth=1.4)
    cross = plots[0].scatter([], [], color="0.3", marker="x", s=32, linewidths=1.2)
    told = ["here: mean, and range over seeds", "the paper"]
    picture.legend([line, cross], told, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return saved(picture, stem)


def _plot(plot: Any, panel: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> None:
    """One panel; on logarithmic axes what is not positive is left out."""
    axis = panel["axis"]
    x_log, y_log = axis["x_scale"] == "log", axis["y_scale"] == "log"
    for index, row in enumerate(axis["rows"]):
        entry, colour = rows[row], f"C{index}"
        points, reported = [], []
        for column, x in zip(panel["columns"], panel["x"], strict=True):
            found = entry["here"].get(column, {}).get(VALUE)
            values = [] if found is None else [value for value in found["values"].values() if value is not None]
            if values and not (x_log and x <= 0) and not (y_log and min(values) <= NEGLIGIBLE):
                points.append((x, sum(values) / len(values), min(values), max(values)))
            theirs = entry["paper"].get(column)
            if theirs is not None and not (x_log and x <= 0) and not (y_log and theirs[0] <= 0):
                reported.append((x, theirs[0]))
        if points:
            places, means, least, greatest = zip(*points, strict=True)
            plot.plot(places, means, color=colour, linewidth=1.4, marker="o", markersize=3, label=_label(entry))
            plot.fill_between(places, least, greatest, color=colour, alpha=0.2, linewidth=0)
        if reported:
            plot.scatter(*zip(*reported, strict=True), color=colour, marker="x", s=32, linewidths=1.2, zorder=3)
    if x_log:
        plot.set_xscale("log")
    if y_log:
        plot.set_yscale("log")
    else:
        plot.set_ylim(bottom=0)
    plot.set_title(axis["title"], fontsize=9)
    plot.set_xlabel(axis["x"], fontsize=8)
    plot.set_ylabel(axis["y"], fontsize=8)
    plot.tick_params(which="both", labelsize=7)
    plot.grid(alpha=0.25, linewidth=0.5)
    plot.legend(fontsize=7, frameon=False)


def _label(entry: Mapping[str, Any]) -> str:
    return str(entry["title"]).removesuffix(" (not in the paper)")


def kept_values(place: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a run before has left; raises ConfigError when it had other settings."""
    if not place.is_file():
        return {}
    there = json.loads(place.read_text(encoding="utf-8"))
    values = there.pop("values", None)
    if values is None or there != settings:
        raise ConfigError(f"{place} holds values of other settings; choose another folder with --out, or remove it")
    return dict(values)
