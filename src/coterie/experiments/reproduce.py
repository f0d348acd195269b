"""`coterie reproduce`: tables and figures of the papers, computed anew and put beside what the papers report.

Runs are comparisons (`compare`) under <folder>/runs, so one that was broken off goes on when it is started again. The
runs of all comparisons share one pool of workers.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from coterie.algorithms import METHODS
from coterie.errors import ConfigError, RunError
from coterie.experiments.compare import conclude, failures, prepared
from coterie.experiments.config import merged
from coterie.experiments.folders import json_text, versions, write_whole
from coterie.experiments.methods import method_class, short_name
from coterie.experiments.papers import (
    curves,
    estimates_picture,
    fedsee_geometry,
    fedsee_geometry_pictures,
    panels,
    server_times,
    setting,
)
from coterie.experiments.papers.claims import judged
from coterie.experiments.papers.definition import Column, Definition, Row, Scale, at_scale, definition, names
from coterie.experiments.papers.fedsee_theory import sizes_of
from coterie.experiments.papers.pictures import require_matplotlib
from coterie.experiments.papers.reading import FIGURES, Cell, Finished, cell, finished_runs, further_cells, of_model
from coterie.experiments.papers.writing import LEFT_OUT, NOT_HERE, markdown
from coterie.experiments.workers import JobObserver, play

SCALES = ("small", "paper")
MAJORITY = "majority"
WITHOUT_RUNS = ("server", "theory", "geometry")
"""Kinds that are computed in this process, without methods or workers; all but the last without settings of runs."""
PANELLED = ("theory", "geometry")
"""Kinds whose page has a table for each panel."""


@dataclass(frozen=True)
class Block:
    """Runs that share all settings but method and seed: one comparison in one folder."""

    folder: str
    config: dict[str, Any]
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Reproduced:
    """Where the result was written, its content (result.json), and why runs failed."""

    folder: Path
    result: dict[str, Any]
    failed: dict[str, str] = field(default_factory=dict)


def reproductions() -> dict[str, Definition]:
    """Every reproduction by name."""
    return {name: definition(name) for name in names()}


def reproduction_folder(name: str, scale: str) -> Path:
    """reproductions/<paper>/<name>-<scale>."""
    return Path("reproductions") / f"{name}-{scale}"


def reproduce(
    name: str,
    *,
    scale: str = "small",
    seeds: Sequence[int] | None = None,
    methods: Sequence[str] | None = None,
    settings: Sequence[str] = (),
    folder: Path | None = None,
    workers: int = 1,
    watcher: JobObserver,
    say: Callable[[str], None] = lambda text: None,
    advance: fedsee_geometry.Advance = lambda what, done, total: None,
) -> Reproduced:
    """Computes a table or figure and writes result.json, result.md and, where one is drawn, figure.svg and figure.png.

    seeds: by default the definition's. methods: rows in place of the definition's, by name; others are run with
    averaged heads. settings: `dotted.key=value` over every run's. watcher: of the runs of all comparisons together.
    say: told of what begins or ends; advance: of what is trained without a run, how much is done and of how much.

    Raises:
        ConfigError: no such name, scale or method, or a folder that holds runs of other settings.
        RunError: a comparison of which no run finished, after all others were concluded; or another process works in
            the folder of one.
    """
    whole = definition(name)
    if scale not in whole.scales:
        raise ConfigError(f"{name} has no scale {scale!r}; known: {', '.join(whole.scales)}")
    if methods is not None:
        whole = with_methods(name, whole, methods)
    chosen = whole.scales[scale]
    reported = whole.columns
    whole = at_scale(whole, chosen)
    place = folder if folder is not None else reproduction_folder(name, scale)
    used = list(seeds) if seeds is not None else list(chosen.seeds)
    if whole.kind in ("curves", *PANELLED) or whole.drawn or whole.mixtures in whole.rows:
        require_matplotlib()
    if whole.kind in ("server", "theory") and settings:
        raise ConfigError(f"{name} has no runs: it takes no settings such as {settings[0]}")
    place.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    geometry: fedsee_geometry.Geometry | None = None
    runs: dict[str, dict[str, list[Finished]]] = {}
    if whole.kind == "server":
        used = used[:1]
        cells = server_times.measured(whole, chosen.config, place / "seconds.json", used[0], say)
        here = _server_setting(chosen)
    elif whole.kind == "theory":
        cells = panels.measured(whole, chosen.config, place / "values.json", used, say)
        here = panels.setting_here(sizes_of(chosen.config), used)
    elif whole.kind == "geometry":
        geometry = fedsee_geometry.measured(whole, chosen.config, settings, place, used, advance)
        cells, here = geometry.cells, geometry.here
    else:
        blocks = plan(whole, chosen)
        count = len(used) * sum(len(block.methods) for block in blocks)
        say(f"{name}: {count} runs in {len(blocks)} comparison{'' if len(blocks) == 1 else 's'}")
        failed = _play(blocks, settings, used, place / "runs", workers, watcher)
        runs = _runs(whole, place, used)
        cells = _cells(whole, runs)
        here = setting.of_runs([run for row in runs.values() for found in row.values() for run in found], used)
    judging = whole
    if geometry is not None and geometry.void:
        judging = fedsee_geometry.unjudged(whole, geometry.void)
    rows = _rows(whole, chosen, cells, runs)
    rows = panels.without_blanks(rows) if whole.kind in PANELLED else rows
    result = {
        "name": name,
        "title": whole.title,
        "paper": whole.paper,
        "shows": whole.shows,
        "kind": whole.kind,
        "scale": scale,
        "about": chosen.about,
        "command": _command(name, scale, used, methods, settings, None if whole.kind in WITHOUT_RUNS else workers),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "seeds": used,
        "figures": whole.figures,
        "columns": {column: entry.title for column, entry in whole.columns.items()},
        "reported": _only_reported(reported, whole),
        "against": whole.against,
        "rows": rows,
        "claims": judged(judging, cells),
        "setting": setting.lines(whole.setting, here),
        "notes": [*whole.notes, *chosen.notes],
    }
    if whole.kind in PANELLED:
        result["panels"] = panels.told(whole)
        result["picture"] = "figure.svg"
    if whole.kind == "theory":
        panels.draw(result, place / "figure")
    if geometry is not None:
        result["void"] = geometry.void
        fedsee_geometry_pictures.draw(geometry.drawn, rows, place / "figure")
    if whole.kind == "curves" or whole.drawn:
        curves.draw(result, whole.drawn or whole.figures, place / "figure")
        result["picture"] = "figure.svg"
    if told := estimates_picture.points(runs.get(whole.mixtures, {})):
        titled = {whole.columns[column].title: pairs for column, pairs in told.items()}
        estimates_picture.draw(titled, place / "figure")
        result["picture"] = "figure.svg"
    write_whole(place / "result.json", json.dumps(json.loads(json_text(result)), indent=1, ensure_ascii=False) + "\n")
    write_whole(place / "result.md", markdown(result))
    return Reproduced(place, result, failed)


def plan(whole: Definition, scale: Scale) -> list[Block]:
    """The comparisons of a scale: its columns times the variants of its rows, of the methods that are here."""
    made: list[Block] = []
    for column, entry in at_scale(whole, scale).columns.items():
        by_variant: dict[str, list[str]] = {}
        for name, row in whole.rows.items():
            if row.method is not None and _is_here(row.method) and name not in scale.left_out:
                by_variant.setdefault(row.variant, []).append(row.method)
        base = merged(merged(scale.config, entry.config), scale.columns.get(column, {}))
        for variant, listed in by_variant.items():
            config = merged(merged(base, whole.variants[variant]), scale.cells.get(f"{column}/{variant}", {}))
            made.append(Block(_block_folder(column, variant), config, tuple(dict.fromkeys(listed))))
    return made


def with_methods(name: str, whole: Definition, methods: Sequence[str]) -> Definition:
    """The definition with these methods as its rows; one that the paper has not gets averaged heads.

    Raises:
        ConfigError: rows that are more than methods (variants or models of one method), or no such method.
    """
    several = any(row.model for row in whole.rows.values()) or len({row.variant for row in whole.rows.values()}) > 2
    if whole.kind in WITHOUT_RUNS or several:
        raise ConfigError(f"the rows of {name} are not single methods; leave --methods out")
    rows: dict[str, Row] = {}
    for method in methods:
        there = {row: entry for row, entry in whole.rows.items() if entry.method == method}
        if not there:
            kind = method_class(method)
            title = kind.traits.title or method
            there = {short_name(method): Row(title=title, method=method, variant="averaged", extra=True)}
        rows |= there
    claims = [
        claim.model_copy(
            update={
                "first": [row for row in claim.first if row in rows],
                "second": [row for row in claim.second if row in rows],
            }
        )
        for claim in whole.claims
    ]
    kept = [
        claim
        for claim, before in zip(claims, whole.claims, strict=True)
        if claim.untested or (claim.first and (claim.second or not before.second))
    ]
    return whole.model_copy(update={"rows": rows, "claims": kept})


def machine() -> dict[str, Any]:
    """The class of this machine, without any name: cores and what its processor can do."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"cores": os.cpu_count(), "cpu": capability, "architecture": versions()["machine"]}


def _play(
    blocks: Sequence[Block],
    settings: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    workers: int,
    watcher: JobObserver,
) -> dict[str, str]:
    """Plays the runs of all blocks in one pool, so that no worker waits for another's block, and then concludes each.

    Returns why runs failed, by block and run. All settings are checked before the first run begins.
    """
    with ExitStack() as held:
        ready = [
            held.enter_context(prepared(block.config, settings, block.methods, seeds, folder / block.folder))
            for block in blocks
        ]
        jobs = [
            replace(job, name=f"{each.folder.name}/{job.name}") for each in ready for job in each.finals(each.untuned)
        ]
        try:
            watcher.plan(jobs, 0)
            failed = play(jobs, workers, watcher)
        finally:
            watcher.end()
        with_runs = [each for each in ready if any(job.finished for job in each.finals(each.untuned))]
        for each in with_runs:
            conclude(each, each.untuned)
        if len(with_runs) < len(ready):
            raise RunError(failures(failed))
    return failed


def _is_here(method: str) -> bool:
    return ":" in method or method in METHODS


def _block_folder(column: str, variant: str) -> str:
    return f"{column}_{variant}"


def _runs(whole: Definition, place: Path, seeds: Sequence[int]) -> dict[str, dict[str, list[Finished]]]:
    """The finished runs by row and column."""
    found: dict[str, dict[str, list[Finished]]] = {}
    for row, entry in whole.rows.items():
        if entry.method is not None and _is_here(entry.method):
            found[row] = {
                column: [of_model(run, entry.model) for run in _finished(place, column, entry, seeds)]
                for column in whole.columns
            }
    return found


def _finished(place: Path, column: str, row: Row, seeds: Sequence[int]) -> list[Finished]:
    return finished_runs(place / "runs" / _block_folder(column, row.variant), row.method or "", seeds)


def _cells(whole: Definition, runs: Mapping[str, Mapping[str, Sequence[Finished]]]) -> dict[str, dict[str, Any]]:
    return {
        row: {
            column: {
                figure: cell({str(run.summary["seed"]): FIGURES[figure].pick(run, whole.layer) for run in found})
                for figure in whole.figures
            }
            for column, found in by_column.items()
        }
        for row, by_column in runs.items()
    }


def _only_reported(columns: Mapping[str, Column], whole: Definition) -> dict[str, str]:
    """The columns, by name with their titles, that the paper reports and this scale has not."""
    told = {column for row in whole.rows.values() for column in row.paper}
    return {name: entry.title for name, entry in columns.items() if name in told and name not in whole.columns}


def _rows(
    whole: Definition,
    scale: Scale,
    cells: Mapping[str, Mapping[str, Mapping[str, Cell]]],
    runs: Mapping[str, Mapping[str, Sequence[Finished]]],
) -> dict[str, dict[str, Any]]:
    """Each row with what the paper reports, what was found here, and what it consists of; then the baselines."""
    made: dict[str, dict[str, Any]] = {}
    for row, entry in whole.rows.items():
        here = not entry.operation and entry.method is not None and not _is_here(entry.method)
        heads = whole.variants.get(entry.variant, {}).get("federation", {}).get("head", "")
        made[row] = {
            "title": entry.title + (" (not in the paper)" if entry.extra and whole.kind in ("runs", *PANELLED) else ""),
            "method": entry.method or entry.operation.get("kind", ""),
            "heads": {"local": "own"}.get(heads, heads),
            "paper": {column: list(reported) for column, reported in entry.paper.items()},
            "here": cells.get(row, {}),
            "state": NOT_HERE if here else LEFT_OUT if row in scale.left_out else "",
            "note": entry.note,
        }
        over_rounds = whole.figures if whole.kind == "curves" else whole.drawn
        if over_rounds and row in runs:
            series = {column: curves.series(found, over_rounds, whole.layer) for column, found in runs[row].items()}
            if whole.kind == "curves" or any(line["rounds"] for one in series.values() for line in one.values()):
                made[row]["series"] = series
        if whole.kind == "runs" and row in runs and not entry.model:
            made |= _further(row, made[row], runs[row])
    if whole.kind == "runs" and runs:
        made[MAJORITY] = _majority(whole, runs)
    return made


def _further(row: str, entry: Mapping[str, Any], runs: Mapping[str, Sequence[Finished]]) -> dict[str, dict[str, Any]]:
    """Rows of a method's further models, such as FedPA-LoRA's preserved factors."""
    by_name: dict[str, dict[str, Any]] = {}
    for column, found in runs.items():
        for name, figures in further_cells(found).items():
            by_name.setdefault(name, {})[column] = figures
    return {
        f"{row}/{name}": {**entry, "title": f"– its {name} model (not in the paper)", "paper": {}, "here": here}
        for name, here in by_name.items()
    }


def _majority(whole: Definition, runs: Mapping[str, Mapping[str, Sequence[Finished]]]) -> dict[str, Any]:
    """What always the most frequent class would score, under the names of the figures that it belongs to."""
    here: dict[str, dict[str, Cell]] = {}
    for column in whole.columns:
        found = {str(run.summary["seed"]): run for by_column in runs.values() for run in by_column[column]}
        here[column] = {
            figure: cell({seed: FIGURES[f"{MAJORITY}_{figure}"].pick(run, "") for seed, run in found.items()})
            for figure in whole.figures
            if f"{MAJORITY}_{figure}" in FIGURES
        }
    title = "always the most frequent class"
    return {"title": title, "method": "", "heads": "–", "paper": {}, "here": here, "state": "", "note": ""}


def _server_setting(scale: Scale) -> dict[str, str]:
    found = machine()
    return {
        "hardware": f"one thread of {found['cores']} cores ({found['cpu']}), no GPU",
        "layers": "query and value projections, " + ("all" if scale.config["whole"] else "one of each shape"),
        "factors": "random, normal",
        "arithmetic": str(scale.config["dtype"]),
    }


def _command(
    name: str,
    scale: str,
    seeds: Sequence[int],
    methods: Sequence[str] | None,
    settings: Sequence[str],
    workers: int | None,
) -> str:
    parts = ["coterie", "reproduce", name, *settings, "--scale", scale, "--seeds", ",".join(map(str, seeds))]
    if methods is not None:
        parts += ["--methods", ",".join(methods)]
    if workers is not None:
        parts += ["--workers", str(workers)]
    return shlex.join(parts)
