"""FedSEE, Figures 6 to 8 as one picture: the experts' planes layer by layer, coordinates, and mean usage of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.experiments.papers.fedsee_geometry import ALL, KINDS
from coterie.experiments.papers.fedsee_geometry_training import TARGETS
from coterie.experiments.papers.panels import VALUE
from coterie.experiments.papers.pictures import blank, saved

COLOURS = dict(zip(KINDS, ("C0", "C1", "C2"), strict=True))


def draw(drawn: Sequence[Mapping[str, Any]], rows: Mapping[str, Mapping[str, Any]], stem: Path) -> list[Path]:
    """Writes <stem>.svg and <stem>.png.

    drawn: of each seed, `planes` (layer by layer experts, places of the mixtures and clients, each (n, 2)), `points`
    (true and recovered coordinate), `kinds`, `layers` and `tasks`. rows: of the result, for mean usage.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    layers = drawn[0]["layers"]
    picture, plots = blank(len(layers) + 2, 4, (3.2, 2.9))
    for number, (plot, layer) in enumerate(zip(plots, layers, strict=False)):
        _plane(plot, [torch.tensor(one["planes"][number]) for one in _parts(drawn)], drawn[0], _short(layer))
    _recovery(plots[len(layers)], drawn)
    _usage(plots[len(layers) + 1], rows)
    marks = [plots[0].scatter([], [], color=COLOURS[kind], s=22) for kind in KINDS]
    cross = plots[0].scatter([], [], color="0.3", marker="x", s=28, linewidths=1.2)
    told = [*(f"{kind} clients" for kind in KINDS), "where their mixtures would be"]
    picture.legend([*marks, cross], told, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return saved(picture, stem)


def _parts(drawn: Sequence[Mapping[str, Any]]) -> list[dict[str, list[list[list[float]]]]]:
    """Each seed's planes with experts, mixtures and clients one after another, (M + 2 N, 2) a layer."""
    return [{"planes": [[place for part in plane for place in part] for plane in one["planes"]]} for one in drawn]


def _plane(plot: Any, seeds: Sequence[Tensor], first: Mapping[str, Any], title: str) -> None:
    """One layer: the mean over seeds of experts, mixtures' places (crosses) and clients (dots)."""
    mean = torch.stack(list(seeds)).mean(dim=0)
    M, N = len(first["tasks"]), len(first["kinds"])
    experts, crosses, clients = mean[:M], mean[M : M + N], mean[M + N :]
    corners = torch.cat([experts, experts[:1]])
    plot.plot(*corners.T.tolist(), color="0.7", linewidth=1)
    for task, (x, y) in zip(first["tasks"], experts.tolist(), strict=True):
        plot.annotate(task, (x, y), (0, 4), textcoords="offset points", fontsize=7, ha="center", color="0.35")
    for kind, cross, client in zip(first["kinds"], crosses.tolist(), clients.tolist(), strict=True):
        plot.plot(*zip(cross, client, strict=True), color="0.8", linewidth=0.8, zorder=1)
        plot.scatter(*cross, color=COLOURS[kind], marker="x", s=28, linewidths=1.2, zorder=2)
        plot.scatter(*client, color=COLOURS[kind], s=22, zorder=3)
    plot.set_title(f"{title}: the experts' plane", fontsize=9)
    plot.set_aspect("equal")
    plot.tick_params(labelsize=7)
    plot.margins(0.2, 0.2)


def _recovery(plot: Any, drawn: Sequence[Mapping[str, Any]]) -> None:
    points = torch.tensor([point for one in drawn for point in one["points"]])
    plot.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--")
    plot.scatter(*points.T.tolist(), color="0.25", s=8, alpha=0.25, linewidths=0)
    for true in sorted(set(points[:, 0].tolist())):
        plot.scatter(true, float(points[points[:, 0] == true, 1].mean()), color="C3", marker="_", s=90, zorder=3)
    plot.set_title("coordinates (bars: means)", fontsize=9)
    plot.set_xlabel("share of a task in a client's mixture", fontsize=8)
    plot.set_ylabel("recovered", fontsize=8)
    plot.tick_params(labelsize=7)


def _usage(plot: Any, rows: Mapping[str, Mapping[str, Any]]) -> None:
    for number, target in enumerate(TARGETS):
        here = rows[f"mismatch-{target}"]["here"]
        found = [(place, here[kind][VALUE]) for place, kind in enumerate((*KINDS, ALL)) if kind in here]
        plot.bar(
            [place + 0.38 * (number - 0.5) for place, _ in found],
            [value["mean"] for _, value in found],
            0.36,
            yerr=[value["std"] or 0.0 for _, value in found],
            color=("0.7", "C0")[number],
            error_kw={"linewidth": 1},
            label=f"target: {target}",
        )
    plot.set_xticks(range(len(KINDS) + 1), [*KINDS, ALL], fontsize=8)
    plot.set_title("mean usage off the mixture, 1-norm", fontsize=9)
    plot.tick_params(axis="y", labelsize=7)
    plot.legend(fontsize=7, frameon=False)


def _short(layer: str) -> str:
    """Its number, as "layer 3", where its name has one."""
    numbers = [part for part in layer.split(".") if part.isdigit()]
    return f"layer {int(numbers[0]) + 1}" if numbers else layer
