"""How to get the same runs again: commands, and one file for a whole comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from coterie.report.groups import Group, settings
from coterie.report.reading import Run, shown


def commands(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """(what it does, command) for the runs as they lie here."""
    runs = [run for group in groups for run in group.runs]
    if len(runs) == 1:
        return _of_one(runs[0])
    found = [
        (f"{group.label}, seed {run.seed}, again", _again(run))
        for group in groups
        for run in group.runs
        if run.finished
    ]
    return found + [(f"go on with {run.folder.name}", _resume(run)) for run in runs if not run.finished]


def comparison_of(groups: Sequence[Group]) -> tuple[dict[str, Any], str] | None:
    """One configuration and the command that plays all of these runs as a comparison, where there is such a one: every
    method once, with the same seeds, and no setting that depends on the seed."""
    methods = [group.runs[0].method for group in groups]
    seeds = {tuple(group.seeds) for group in groups}
    if len(groups) < 2 or len(set(methods)) < len(methods) or len(seeds) != 1:
        return None
    configs = {group.runs[0].method: _plain(group.runs[0]) for group in groups}
    if any(settings(run) != settings(group.runs[0]) for group in groups for run in group.runs):
        return None
    common = _shared([{key: one for key, one in config.items() if key != "options"} for config in configs.values()])
    special = {method: _beyond(config, common) for method, config in configs.items()}
    whole = {"method": methods[0], **common, "per_method": {method: own for method, own in special.items() if own}}
    listed, numbers = ",".join(methods), ",".join(map(str, groups[0].seeds))
    name = str(common.get("name", "comparison"))
    file, again = quote(f"{name}.yaml"), quote(f"{name}-again")
    return whole, f"coterie compare {file} --methods {quote(listed)} --seeds {numbers} --out {again}"


def configuration(run: Run) -> str:
    """The run's settings as YAML; paths inside of the home folder begin with ~."""
    return written(run.config)


def written(config: Mapping[str, Any]) -> str:
    """A configuration as YAML."""
    return str(yaml.safe_dump(_homeless(config), sort_keys=False, allow_unicode=True))


def report_command(places: Sequence[Path]) -> str:
    """The command that makes the page."""
    return f"coterie report {' '.join(_place(place) for place in places)}"


def _of_one(run: Run) -> list[tuple[str, str]]:
    if not run.finished:
        return [("Go on with it, to the same bytes as without a break", _resume(run))]
    adapters = _place(run.folder / "adapters" / "global")
    found = [("The same run again, to the same bytes on the same machine and versions", _again(run))]
    if (run.folder / "adapters" / "global").is_dir():
        merged = _place(run.folder.with_name(f"{run.folder.name}-merged"))
        found.append(
            (
                f"Its model as a plain one (the adapter itself: {adapters})",
                f"coterie export {_place(run.folder)} {merged} --merged",
            )
        )
    return found


def _again(run: Run) -> str:
    again = run.folder.with_name(f"{run.folder.name}-again")
    return f"coterie run {_place(run.folder / 'config.yaml')} --folder {_place(again)}"


def _resume(run: Run) -> str:
    return f"coterie resume {_place(run.folder)}"


def _place(path: Path) -> str:
    """A path for a shell, which must still expand a leading ~."""
    text = shown(path)
    return f"~/{quote(text[2:])}" if text.startswith("~/") else quote(text)


def _plain(run: Run) -> dict[str, Any]:
    return {key: one for key, one in run.config.items() if key not in ("method", "seed", "per_method")}


def _shared(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all have, mapping by mapping."""
    first = configs[0]
    found: dict[str, Any] = {}
    for key, one in first.items():
        others = [config.get(key) for config in configs]
        if all(other == one for other in others):
            found[key] = one
        elif all(isinstance(other, Mapping) for other in others):
            found[key] = _shared([other for other in others if isinstance(other, Mapping)])
    return found


def _beyond(config: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration has beside the common part."""
    found: dict[str, Any] = {}
    for key, one in config.items():
        if key not in common:
            if one not in ({}, None) or key != "options":
                found[key] = one
        elif isinstance(one, Mapping) and isinstance(common[key], Mapping):
            own = _beyond(one, common[key])
            if own:
                found[key] = own
    return found


def _homeless(value: Any) -> Any:
    """The same with ~ in place of the home folder."""
    if isinstance(value, str):
        return shown(Path(value)) if value.startswith(f"{Path.home()}/") else value
    if isinstance(value, Mapping):
        return {key: _homeless(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_homeless(one) for one in value]
    return value
