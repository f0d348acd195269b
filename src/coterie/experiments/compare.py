"""Comparisons: methods times seeds, each run in a process of its own, on the same partitions and keys.

The partition and all random keys follow from the seed, never from the method. A comparison that was broken off goes on
when it is started again, and so does one that is given more methods, seeds or values to try: finished runs are taken
as they are, half-done ones are resumed. Times stand in timing.json alone, so that comparison.json and comparison.md
are the same bytes however often it was broken off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from coterie.errors import ConfigError, RunError, nearest
from coterie.experiments.build import build
from coterie.experiments.comparison import Finished, comparison, timing
from coterie.experiments.config import Config, dump, parse, parse_override, read_mapping, resolve, with_overrides
from coterie.experiments.folders import CONFIG, SUMMARY, alone_in, json_text, read_config, write_whole
from coterie.experiments.methods import configured, short_name
from coterie.experiments.runs import grounded
from coterie.experiments.tuning import Tried, Tuning, Validation, candidates, check_options, choose, label, record
from coterie.experiments.workers import Job, JobObserver, play
from coterie.report.comparison import markdown

SETTINGS, EXECUTION = "settings.yaml", "execution.yaml"
"""What all runs of a comparison share, and what a probe settled for all of them."""

OWN = ("method", "options", "seed", "per_method")
"""The settings in which runs of one comparison may differ, what is tuned apart."""

VALIDATION_FRACTION = 0.1
"""Of each client's share, where something is tuned and nothing else is said."""

Override = tuple[list[str], Any]
Grids = Mapping[str, Sequence[Mapping[str, Any]]]
"""For each method the settings that are tried for it; one empty mapping where nothing is tuned."""

Jobs = Mapping[tuple[str, int, str], Job]
"""Every run that may be played, by method, seed and the label of its tried settings."""


@dataclass(frozen=True)
class Outcome:
    """The comparison of all runs that finished (the content of comparison.json), the content of timing.json, and why
    runs failed."""

    comparison: dict[str, Any]
    timing: dict[str, Any]
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A comparison whose settings are checked and whose execution is settled, so that its runs can be played.

    trial_seeds: those that settings are chosen with; none where nothing is tuned.
    """

    folder: Path
    grids: Grids
    seeds: tuple[int, ...]
    trial_seeds: tuple[int, ...]
    jobs: Jobs

    @property
    def untuned(self) -> dict[str, str]:
        """The label of every method's settings where there is one choice of them."""
        return dict.fromkeys(self.grids, "")

    def finals(self, chosen: Mapping[str, str]) -> list[Job]:
        """The runs that are compared, given the label of what was chosen for each method, in the order of playing."""
        return [self.jobs[method, seed, chosen[method]] for seed in self.seeds for method in chosen]


def comparison_folder(name: str) -> Path:
    """comparisons/<name>."""
    return Path("comparisons") / name


def compare(
    raw: Mapping[str, Any],
    overrides: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    *,
    workers: int = 1,
    watcher: JobObserver,
    tuning: Tuning | None = None,
    target: float | None = None,
    against: str | None = None,
) -> Outcome:
    """Plays every method with every seed and writes comparison.json, comparison.md and timing.json.

    raw: a configuration as read from a file; `options` in it are those of its own `method` alone, `per_method` gives
    sections of single methods. One execution plan, chosen once, serves all runs. tuning: settings that are chosen for
    each method on validation shares first, with its own seeds or the first of `seeds`. against: the method that
    differences are taken from, by default the first; target: see `comparison`.

    Raises:
        ConfigError: a setting that cannot be meant, or a folder that holds a comparison with other settings.
        RunError: no run finished, or another process works in the folder.
    """
    if against is not None and against not in methods:
        raise ConfigError(f"--against {against!r} is none of the methods{nearest(against, methods)}")
    with prepared(raw, overrides, methods, seeds, folder, tuning=tuning) as ready:
        chosen, tuned = ready.untuned, None
        failed: dict[str, str] = {}
        try:
            if tuning is not None:
                chosen, failed, tuned = _tuned(ready, tuning, workers, watcher)
            finals = ready.finals(chosen)
            watcher.plan(finals, 0)
            failed |= play(finals, workers, watcher)
        finally:
            watcher.end()
        failed |= _unscored(methods, chosen, failed)
        if not any(job.finished for job in finals):
            raise RunError(failures(failed))
        return Outcome(*conclude(ready, chosen, tuned=tuned, target=target, against=against), failed)


@contextmanager
def prepared(
    raw: Mapping[str, Any],
    overrides: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    *,
    tuning: Tuning | None = None,
) -> Iterator[Prepared]:
    """Checks every run's settings, settles the execution plan and holds the folder until the comparison is concluded.

    Arguments are those of `compare`.

    Raises:
        ConfigError: a setting that cannot be meant, or a folder that holds a comparison with other settings.
        RunError: another process works in the folder.
    """
    if len({short_name(method) for method in methods}) != len(methods):
        raise ConfigError("two of the methods have the same class name; rename one")
    given = [parse_override(text) for text in overrides]
    if tuning is not None:
        check_options(methods, tuning)
        given += _validation_share(raw, given)
    grids: Grids = {method: [{}] if tuning is None else candidates(method, tuning) for method in methods}
    trial_seeds = () if tuning is None else tuning.seeds or tuple(seeds[:1])
    configs = _configs(raw, given, grids, list(dict.fromkeys([*seeds, *trial_seeds])))
    if tuning is not None and any(not config.partition.validates for config in configs.values()):
        raise ConfigError("tuning needs validation shares: set partition.validation_fraction above 0, such as 0.1")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: the folder cannot be made ({error.strerror or error})") from error
    with alone_in(folder):
        _check_settings(folder, _shared(raw, given, methods[0]))
        execution = _execution(folder, _config(raw, given, methods[0], seeds[0], {}))
        jobs = {key: _job(folder, key, config, execution) for key, config in configs.items()}
        for job in jobs.values():
            _check_same(job)
        yield Prepared(folder, grids, tuple(seeds), tuple(trial_seeds), jobs)


def conclude(
    ready: Prepared,
    chosen: Mapping[str, str],
    *,
    tuned: Mapping[str, Any] | None = None,
    target: float | None = None,
    against: str | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compares the runs that finished, of which there is one at least, and plays nothing.

    chosen: for each method that is compared the label of its settings. tuned: the record of what was tried. target,
    against: see `compare`. Returns what it writes as comparison.json (and comparison.md) and as timing.json.
    """
    methods, jobs = list(ready.grids), ready.jobs
    by_run = {(method, seed): jobs[method, seed, chosen[method]] for method in chosen for seed in ready.seeds}
    runs = {run: job for run, job in by_run.items() if job.finished}
    finished = [Finished(_summary(job), job.metrics()) for job in runs.values()]
    more: dict[str, Any] = {} if tuned is None else {"tuning": tuned}
    more["missing"] = [f"{short_name(m)}-seed{s}" for m in methods for s in ready.seeds if (m, s) not in runs]
    reference = _stored(jobs, methods[0] if against is None else against)
    found, times = comparison(finished, against=reference, target=target, **more), timing(finished)
    write_whole(ready.folder / "timing.json", _pretty(times))
    write_whole(ready.folder / "comparison.md", markdown(found))
    write_whole(ready.folder / "comparison.json", _pretty(found))
    return found, times


def failures(failed: Mapping[str, str]) -> str:
    """Why runs failed, by name, on one line."""
    return "; ".join(f"{name} failed: {reason}" for name, reason in failed.items())


def read_list(text: str, what: str) -> list[str]:
    """Names with commas between; raises ConfigError when there is none, or one twice."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"{what} needs different names with commas between, such as fedit,flexlora, not {text!r}")
    return names


def read_seeds(text: str, what: str = "--seeds") -> list[int]:
    """Whole numbers with commas between; raises ConfigError for anything else."""
    names = read_list(text, what)
    if not all(name.isdecimal() for name in names):
        raise ConfigError(f"{what} needs whole numbers with commas between, such as 0,1,2, not {text!r}")
    return [int(name) for name in names]


def _validation_share(raw: Mapping[str, Any], given: Sequence[Override]) -> list[Override]:
    """The share that tuning needs, unless one is given."""
    partition = with_overrides(raw, given).get("partition")
    if isinstance(partition, Mapping) and not partition.keys().isdisjoint(("validation_fraction", "validation_size")):
        return []
    return [(["partition", "validation_fraction"], VALIDATION_FRACTION)]


def _config(
    raw: Mapping[str, Any], given: Sequence[Override], method: str, seed: int, settings: Mapping[str, Any]
) -> Config:
    """The settings of one run; raises ConfigError for what cannot be meant."""
    base = dict(raw)
    if raw.get("method") != method:
        base.pop("options", None)
    tried = [(name.split("."), value) for name, value in settings.items()]
    config = grounded(resolve(base, [*given, *tried, (["method"], method), (["seed"], seed)]))
    configured(config)
    return config


def _configs(
    raw: Mapping[str, Any], given: Sequence[Override], grids: Grids, seeds: Sequence[int]
) -> dict[tuple[str, int, str], Config]:
    """The settings of every run that may be played; all are checked before any is."""
    configs = {
        (method, seed, label(settings)): _config(raw, given, method, seed, settings)
        for seed in seeds
        for method, grid in grids.items()
        for settings in grid
    }
    if len(configs) != len(seeds) * sum(map(len, grids.values())):
        raise ConfigError("two of the values to be tried look alike in a file name; leave one out")
    _check_shares(configs)
    return configs


def _check_shares(configs: Mapping[tuple[str, int, str], Config]) -> None:
    """Raises ConfigError where `per_method` gives a method other data, or other clients, than the first has."""
    (first, _, _), reference = next(iter(configs.items()))
    for (method, _, _), config in configs.items():
        found = _difference(_shared_out(reference), _shared_out(config))
        if found is not None:
            name, old, new = found
            raise ConfigError(
                f"{method} would have {name}: {new}, but {first} {old}; compared methods share data and clients, so "
                "set it for all of them, outside per_method"
            )


def _shared_out(config: Config) -> dict[str, Any]:
    """What settles who holds which examples, the seed apart."""
    content = dump(config)
    clients = {name: content["clients"][name] for name in ("count", "ids", "groups")}
    return {"clients": clients, **{name: content[name] for name in ("task", "partition", "server_data")}}


def _job(folder: Path, key: tuple[str, int, str], config: Config, execution: Mapping[str, Any]) -> Job:
    """The run in a folder of its own; `execution` is what was settled for all of them."""
    method, seed, behind = key
    name = f"{short_name(method)}-seed{seed}{behind}"
    settled = config.model_copy(update={"execution": config.execution.model_copy(update=execution)})
    phases = configured(config).phases(config.rounds)
    return Job(name, settled, folder / name, sum(phase.rounds for phase in phases))


def _unscored(methods: Sequence[str], chosen: Mapping[str, str], failed: Mapping[str, str]) -> dict[str, str]:
    """The methods for which nothing could be chosen although their runs ended."""
    return {
        short_name(method): "none of its runs has a finite validation score"
        for method in methods
        if method not in chosen and not any(name.startswith(f"{short_name(method)}-seed") for name in failed)
    }


def _tuned(
    ready: Prepared, tuning: Tuning, workers: int, watcher: JobObserver
) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
    """Plays what is tried: the label of the best settings of each method that has any, why runs failed, the record."""
    tried, failed = _try(ready, workers, watcher)
    best = {method: choose(tried[method], tuning.grid) for method in ready.grids}
    chosen = {method: label(one.settings) for method, one in best.items() if one is not None}
    by_method = {_stored(ready.jobs, method): tried[method] for method in ready.grids}
    return chosen, failed, record(by_method, tuning, ready.trial_seeds)


def _try(ready: Prepared, workers: int, watcher: JobObserver) -> tuple[dict[str, list[Tried]], dict[str, str]]:
    """Plays every method with all that is tried for it: the validation scores by method, and why runs failed.

    A run with what is then chosen and one of `seeds` is a run of the comparison too, and is not played again.
    """
    grids, jobs, trial_seeds = ready.grids, ready.jobs, ready.trial_seeds
    later_seeds = [seed for seed in ready.seeds if seed not in trial_seeds]
    trials = [jobs[method, seed, label(one)] for seed in trial_seeds for method in grids for one in grids[method]]
    later = [jobs[method, seed, label(one[0])] for method, one in grids.items() for seed in later_seeds]
    watcher.plan(trials, sum(job.rounds for job in later))
    failed = play(trials, workers, watcher)
    tried = {
        method: [
            Tried(one, {seed: _validation(jobs[method, seed, label(one)]) for seed in trial_seeds})
            for one in grids[method]
        ]
        for method in grids
    }
    return tried, failed


def _validation(job: Job) -> Validation | None:
    """What a run scored on the validation shares; nothing else of it is looked at. None where it did not finish."""
    found = _summary(job).get("validation") if job.finished else None
    return None if found is None else Validation(found["score"], found["loss"], found["examples"])


def _summary(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.folder / SUMMARY).read_text(encoding="utf-8"))
    return found


def _stored(jobs: Jobs, method: str) -> str:
    """The method as it stands in configurations, which hold absolute paths."""
    return next(job.config.method for (given, _, _), job in jobs.items() if given == method)


def _pretty(content: Mapping[str, Any]) -> str:
    return json.dumps(json.loads(json_text(content)), indent=1) + "\n"


def _execution(folder: Path, config: Config) -> dict[str, Any]:
    """The execution settings of all runs; what is `auto` is settled once and kept for the comparison's next start."""
    if "auto" not in (config.execution.dtype, config.execution.attention, config.execution.clients_per_step):
        return {}
    place = folder / EXECUTION
    if place.is_file():
        chosen: dict[str, Any] = yaml.safe_load(place.read_text(encoding="utf-8"))
    else:
        plan = build(config).plan
        lower = "stored" if plan.lower_memory or plan.lower_disk else "off"
        chosen = {
            "dtype": plan.dtype,
            "attention": plan.attention,
            "clients_per_step": plan.clients_per_step,
            "lower": lower,
        }
        write_whole(place, yaml.safe_dump(chosen, sort_keys=False))
    given = config.execution.model_dump()
    return {name: value for name, value in chosen.items() if given[name] == "auto"}


def _shared(raw: Mapping[str, Any], given: Sequence[Override], method: str) -> dict[str, Any]:
    """The settings of all runs, without what single methods have of their own."""
    common = {name: value for name, value in raw.items() if name not in OWN}
    config = grounded(resolve(common, [*(one for one in given if one[0][0] not in OWN), (["method"], method)]))
    return {name: value for name, value in dump(config).items() if name not in OWN}


def _check_settings(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Writes what all runs share, or raises ConfigError when the folder holds runs with other settings."""
    place = folder / SETTINGS
    if place.is_file() and any(folder.glob(f"*/{CONFIG}")):
        there = dump(parse({**read_mapping(place), "method": "any"}))  # settings that are new since then have defaults
        _refuse(folder, "a comparison", {name: value for name, value in there.items() if name not in OWN}, wanted)
        return
    (folder / EXECUTION).unlink(missing_ok=True)
    write_whole(place, yaml.safe_dump(dict(wanted), sort_keys=False, allow_unicode=True))


def _check_same(job: Job) -> None:
    """Raises ConfigError when a folder holds a run of other settings."""
    if (job.folder / CONFIG).is_file():
        _refuse(job.folder, "a run", dump(read_config(job.folder)[0]), dump(job.config))


def _refuse(place: Path, what: str, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises ConfigError that names the first setting in which the two differ."""
    difference = _difference(there, wanted)
    if difference is not None:
        name, old, new = difference
        raise ConfigError(
            f"{place} holds {what} with {name}: {old}, not {new}; choose another folder with --out, or remove it"
        )


def _difference(there: Mapping[str, Any], wanted: Mapping[str, Any], before: str = "") -> tuple[str, Any, Any] | None:
    """The dotted name of the first setting that differs, and both values."""
    for name in dict.fromkeys([*wanted, *there]):
        old, new = there.get(name), wanted.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found = _difference(old, new, f"{before}{name}.")
            if found is not None:
                return found
        elif old != new:
            return f"{before}{name}", old, new
    return None
