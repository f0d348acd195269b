"""FedSEE, Appendix B.2: whether clients' updates lie where their mixtures of the experts' updates would put them.

One seed's figures follow from what `fedsee_geometry_training` leaves on disk; they are kept as values, seed by seed.
An expert that hardly learnt its task says nothing about geometry: then nothing is judged.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.experiments.config import Config, parse_override, resolve
from coterie.experiments.folders import write_whole
from coterie.experiments.papers.definition import Definition
from coterie.experiments.papers.fedsee_geometry_training import (
    TARGETS,
    Federation,
    Recipe,
    Shelf,
    Trained,
    expert_scores,
    federation,
    routers,
    static,
    train,
    usage,
)
from coterie.experiments.papers.panels import VALUE, kept_values
from coterie.experiments.papers.reading import Cell, Finished, cell
from coterie.experiments.papers.setting import of_runs
from coterie.theory.fedsee.geometry import barycentres
from coterie.theory.fedsee.reconstruction import (
    affine_weights,
    convex_weights,
    derangements,
    plane_coordinates,
    residuals,
)

KINDS = ("pure", "edge", "interior")
"""Of one task, of some tasks, of all."""
ALL = "all"

Rows = dict[str, dict[str, float]]
"""Values by row and column."""
Advance = Callable[[str, int, int], None]
"""Told what goes on, how much of it is done, and of how much."""


@dataclass(frozen=True)
class Geometry:
    """Cells by row, column and figure; what is drawn, by seed; our side of the set-up; why all is void ("": it is
    not)."""

    cells: dict[str, dict[str, dict[str, Cell]]]
    drawn: list[dict[str, Any]]
    here: dict[str, str]
    void: str


def measured(
    definition: Definition,
    config: Mapping[str, Any],
    settings: Sequence[str],
    place: Path,
    seeds: Sequence[int],
    advance: Advance,
) -> Geometry:
    """Everything of B.2, seed by seed; values go into <place>/values.json, what is trained into <place>/trained.

    config: `run`, the settings of a run, and the fields of `Recipe`. settings: `dotted.key=value` over the former.

    Raises:
        ConfigError: `place` holds values of other settings, or the settings are none of three tasks in given mixtures.
    """
    recipe = Recipe(**{name: value for name, value in config.items() if name != "run"})
    chosen = {seed: _settings(config["run"], settings, seed) for seed in seeds}
    asked = json.loads(json.dumps({"config": dict(config), "settings": list(settings)}))
    values = kept_values(place / "values.json", asked)
    for seed in seeds:
        if str(seed) not in values:
            _keep(place / "values.json", asked, values)  # what is trained under other settings is not taken for ours
            told = _Told(f"seed {seed}", advance)
            values[str(seed)] = one_seed(chosen[seed], recipe, place / "trained" / str(seed), told)
            _keep(place / "values.json", asked, values)
    found = {str(seed): values[str(seed)] for seed in seeds}
    cells = {
        row: {
            column: {VALUE: cell({seed: one["rows"][row].get(column) for seed, one in found.items()})}
            for column in definition.panels[entry.panel].columns
            if any(column in one["rows"][row] for one in found.values())
        }
        for row, entry in definition.rows.items()
    }
    here = _setting_here(list(chosen.values()), recipe, found)
    return Geometry(cells, list(found.values()), here, _void(found, recipe.margin))


def one_seed(config: Config, recipe: Recipe, folder: Path, told: _Told) -> dict[str, Any]:
    """The values of one seed: `rows`, what is drawn (`planes`, `points`, `kinds`), and how large its data are."""
    of = federation(config)
    N = len(of.clients)
    told.total = N + (len(of.tasks) + N) + len(TARGETS) * N + N
    shelf = Shelf(folder, told)
    trained = train(of, recipe, shelf)
    names = [name for name in of.built.base.layers if fnmatch(name, recipe.compared)]
    if not names:
        raise ConfigError(f"no adapted layer fits {recipe.compared!r}; adapt the value projections (model.targets)")
    experts = [torch.stack([one[name].B for one in trained.experts]) for name in names]
    clients = [torch.stack([one[name].B for one in trained.clients]) for name in names]
    rows, drawn = compared(experts, clients, of.alpha)
    for m, (accuracy, majority) in enumerate(expert_scores(of, trained), start=1):
        found = {"accuracy": accuracy, "majority": majority, "margin": accuracy - majority}
        for row, value in found.items():
            rows.setdefault(row, {})[f"expert-{m}"] = 100 * value
    rows |= routed(of, trained, recipe, shelf)
    task = of.built.task
    sizes = {"name": ", ".join(of.tasks), "classes": task.label_names, "train": len(task.train), "test": len(task.test)}
    return {"rows": rows, **drawn, "layers": names, "tasks": of.tasks, "task": sizes}


def compared(experts: Sequence[Tensor], clients: Sequence[Tensor], alpha: Tensor) -> tuple[Rows, dict[str, list[Any]]]:
    """Table 5 and Figure 7 as rows, and what is drawn of them and of Figure 6.

    experts (M, l, r) and clients (N, l, r), layer by layer; alpha (N, M). A residual is the median over clients and
    layers; a shuffled one first the mean over `derangements`.
    """
    third = torch.full_like(alpha, 1 / alpha.shape[1])
    fits: dict[str, list[float]] = {row: [] for row in ("affine", "convex", "true", "uniform", "shuffled")}
    recovered, planes = [], []
    for E, B in zip(experts, clients, strict=True):
        convex = convex_weights(B, E)
        for row, weights in (("affine", affine_weights(B, E)), ("convex", convex), ("true", alpha), ("uniform", third)):
            fits[row] += residuals(B, E, weights).tolist()
        moved = torch.stack([residuals(B, E, weights) for weights in derangements(alpha)])
        fits["shuffled"] += moved.mean(dim=0).tolist()
        recovered.append(convex)
        places = (E, barycentres(alpha, E.double()), B)
        planes.append([plane_coordinates(points, E).tolist() for points in places])
    hat = torch.stack(recovered)
    true = alpha.expand_as(hat)
    edge = torch.tensor([kind == "edge" for kind in kinds(alpha)])
    absent = hat[:, edge][(true == 0)[:, edge]]
    rows: Rows = {f"residual-{row}": {ALL: statistics.median(values)} for row, values in fits.items()}
    rows["correlation"] = {ALL: float(torch.corrcoef(torch.stack([hat.flatten(), true.flatten()]))[0, 1])}
    rows["coordinate-error"] = {ALL: float((hat - true).abs().mean())}
    rows["coordinate-error-uniform"] = {ALL: float((third - alpha).abs().mean())}
    rows["absent-mass"] = {ALL: float(absent.mean())} if len(absent) else {}
    points = torch.stack([true.flatten(), hat.flatten()], dim=1).tolist()
    return rows, {"planes": planes, "points": points, "kinds": kinds(alpha)}


def kinds(alpha: Tensor) -> list[str]:
    """Each client's of `KINDS`, by how many tasks its mixture (N, M) has."""
    M = alpha.shape[1]
    return [{1: "pure", M: "interior"}.get(count, "edge") for count in (alpha > 0).sum(dim=1).tolist()]


def routed(of: Federation, trained: Trained, recipe: Recipe, shelf: Shelf) -> Rows:
    """Table 6 and Figure 8: validation losses of constant and routed combinations, and how far usage is from alpha."""
    made = routers(of, trained, recipe, shelf)
    by_client: dict[str, list[float]] = {}
    uniform = torch.full((len(of.tasks),), 1 / len(of.tasks))
    correct: dict[str, list[float]] = {}
    absent: dict[str, list[float]] = {}
    for i, (client, kind) in enumerate(zip(of.clients, kinds(of.alpha), strict=True)):
        models = {"loss-uniform": static(trained, uniform), "loss-true": static(trained, of.alpha[i])}
        models |= {f"loss-routed-{target}": made[target][i] for target in TARGETS}
        data = of.data(client, "validation")
        for row, score in zip(models, of.scores([(model, data) for model in models.values()]), strict=True):
            by_client.setdefault(row, []).append(score.loss)
        for target in TARGETS:
            used = usage(of, made[target][i], client)
            by_client.setdefault(f"mismatch-{target}", []).append(float((used - of.alpha[i]).abs().sum()))
            if kind == "pure":
                correct.setdefault(target, []).append(float(used[of.alpha[i] > 0].sum()))
            if kind == "edge":
                absent.setdefault(target, []).append(float(used[of.alpha[i] == 0].sum()))
        shelf.advance(1)
    rows: Rows = {}
    for row, values in by_client.items():
        of_kind = {kind: [v for v, own in zip(values, kinds(of.alpha), strict=True) if own == kind] for kind in KINDS}
        rows[row] = {kind: statistics.fmean(own) for kind, own in of_kind.items() if own}
        rows[row][ALL] = statistics.fmean(values)
    for target in TARGETS:
        found = {"correct": correct.get(target), "absent": absent.get(target)}
        rows[f"usage-{target}"] = {column: statistics.fmean(own) for column, own in found.items() if own}
    return rows


def unjudged(definition: Definition, void: str) -> Definition:
    """The definition with no statement to be judged, for this reason."""
    claims = [
        claim.model_copy(update={"untested": void, "first": [], "second": [], "columns": [], "than": {}})
        for claim in definition.claims
    ]
    return definition.model_copy(update={"claims": claims})


class _Told:
    """Counts what is done of one seed, and tells."""

    def __init__(self, what: str, advance: Advance) -> None:
        self.what, self.advance, self.done, self.total = what, advance, 0, 1

    def __call__(self, more: int) -> None:
        self.done += more
        self.advance(self.what, self.done, self.total)


def _settings(run: Mapping[str, Any], settings: Sequence[str], seed: int) -> Config:
    config = resolve(run, [*map(parse_override, settings), (["seed"], seed)])
    if config.partition.kind != "mixture" or config.partition.weights is None or len(config.task.parts or ()) != 3:
        raise ConfigError("the geometry is of three tasks and prescribed mixtures: task.parts, partition.weights")
    return config


def _keep(place: Path, asked: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    write_whole(place, json.dumps({**asked, "values": values}) + "\n")


def _void(found: Mapping[str, Mapping[str, Any]], margin: float) -> str:
    weak = [
        f"{values['tasks'][int(column.removeprefix('expert-')) - 1]} (seed {seed}): {above:.1f}"
        for seed, values in found.items()
        for column, above in values["rows"]["margin"].items()
        if above < margin
    ]
    if not weak:
        return ""
    return (
        f"void: each expert must be at least {margin:g} points above always answering the most frequent class; "
        f"points of those that are not: {', '.join(weak)}"
    )


def _setting_here(configs: Sequence[Config], recipe: Recipe, found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Our side of the set-up, in the words of `setting.LABELS`."""
    runs = [
        Finished(config, {"task": values["task"]}, [], {})
        for config, values in zip(configs, found.values(), strict=True)
    ]
    told = of_runs(runs, [config.seed for config in configs])
    one = next(iter(found.values()))
    sizes = one["task"]
    validation = configs[0].partition.validation_size
    return {name: value for name, value in told.items() if name not in ("rounds", "weights")} | {
        "task": f"{sizes['name']}, {sizes['train']} training examples",
        "tests": f"{sizes['test']} of the tasks for experts; {validation} of each client, in its proportions",
        "mixtures": ", ".join(f"{count} {kind}" for kind, count in Counter(one["kinds"]).items()),
        "seeds": str(len(found)),
        "init": f"{recipe.init_steps} steps",
        "routers": f"{recipe.router_steps} steps at {recipe.router_lr:g} times the rate, β = {recipe.beta:g}",
    }
