"""Choosing settings for each method on the clients' validation shares, never on a test.

Every method is played with every combination of the values that are to be tried; of each, the validation score of the
last round counts. Options that a method lacks are not tried for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from coterie.errors import ConfigError
from coterie.experiments.intervals import mean
from coterie.experiments.methods import method_class

SECTIONS = ("train", "lora", "options")
"""What may be tuned: settings that leave data, clients and measurements as they are."""

RULE = "validation score of the last round, of equal ones the lower loss, then the smaller value"

Settings = Mapping[str, Any]
"""Values by dotted name, such as {"train.lr": 0.003}."""


@dataclass(frozen=True)
class Tuning:
    """What is tried: values by dotted name, in the order given, and the seeds to try them with (None: the first)."""

    grid: Mapping[str, tuple[Any, ...]]
    seeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Validation:
    """score and loss of a run's last round on all validation shares, weighted by examples; None where not finite."""

    score: float | None
    loss: float | None
    examples: int


@dataclass(frozen=True)
class Tried:
    """Settings that were tried, and what came of them by seed: None where the run failed."""

    settings: Settings
    by_seed: Mapping[int, Validation | None]

    @property
    def score(self) -> float | None:
        """The mean over seeds; None unless every seed has one."""
        return _mean([None if one is None else one.score for one in self.by_seed.values()])

    @property
    def loss(self) -> float | None:
        """The mean over seeds; None unless every seed has one."""
        return _mean([None if one is None else one.loss for one in self.by_seed.values()])


def read_tuning(lrs: str | None, grids: Sequence[str], seeds: Sequence[int] | None) -> Tuning | None:
    """What `--lrs 1e-3,3e-3`, `--tune options.lam=0.1,1` and `--tune-seeds` ask for; None for nothing.

    Raises:
        ConfigError: no values, a value twice, a name twice, or what cannot be tuned.
    """
    grid: dict[str, tuple[Any, ...]] = {}
    for text in [*([] if lrs is None else [f"train.lr={lrs}"]), *grids]:
        name, equals, listed = text.partition("=")
        name = name.strip()
        if not equals or name.partition(".")[0] not in SECTIONS or name.count(".") != 1:
            raise ConfigError(
                f"{text!r} cannot be tuned; settings of {', '.join(SECTIONS)} can, such as train.lr=1e-3,3e-3"
            )
        values = tuple(_value(part.strip()) for part in listed.split(",") if part.strip())
        if not values or len({written(value) for value in values}) != len(values):
            raise ConfigError(f"{name} needs different values with commas between, such as 0.1,1, not {listed!r}")
        if name in grid:
            raise ConfigError(f"{name} is to be tuned twice; give all its values at once")
        grid[name] = values
    if not grid and seeds is not None:
        raise ConfigError("--tune-seeds needs something to tune, such as --lrs 1e-3,3e-3")
    return Tuning(grid, None if seeds is None else tuple(seeds)) if grid else None


def candidates(method: str, tuning: Tuning) -> list[dict[str, Any]]:
    """All combinations for this method, of the options only those that it has; one empty one where none is left."""
    declared: dict[str, dataclasses.Field[Any]] = getattr(method_class(method), "__dataclass_fields__", {})
    own = {f"options.{name}" for name, field in declared.items() if field.init}
    names = [name for name in tuning.grid if not name.startswith("options.") or name in own]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(tuning.grid[n] for n in names))]


def check_options(methods: Sequence[str], tuning: Tuning) -> None:
    """Raises ConfigError for an option that none of the methods has."""
    tried = {name for method in methods for combination in candidates(method, tuning) for name in combination}
    for name in tuning.grid:
        if name not in tried:
            raise ConfigError(f"none of the methods has an option {name.partition('.')[2]!r} to tune")


def label(settings: Settings) -> str:
    """The settings in a run's name: {"train.lr": 0.003} as -lr0.003."""
    return "".join(f"-{name.partition('.')[2]}{written(value)}" for name, value in settings.items())


def written(value: Any) -> str:
    """A value as it may stand in a file name."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", str(value))


def choose(tried: Sequence[Tried], grid: Mapping[str, Sequence[Any]]) -> Tried | None:
    """The settings of the best validation score; of equal ones those of the lower loss, then of the smaller values.

    Values that are not all numbers are ordered as they were given. None when no settings have a score.
    """

    def order(one: Tried) -> tuple[float, float, list[float]]:
        assert one.score is not None
        values = [_place(value, grid[name]) for name, value in one.settings.items()]
        return -one.score, math.inf if one.loss is None else one.loss, values

    return min((one for one in tried if one.score is not None), key=order, default=None)


def record(tried: Mapping[str, Sequence[Tried]], tuning: Tuning, seeds: Sequence[int]) -> dict[str, Any]:
    """What was tried for each method, its validation scores, and what was chosen: a part of comparison.json."""
    return {
        "rule": RULE,
        "seeds": list(seeds),
        "methods": {method: _recorded(all_of_it, tuning.grid) for method, all_of_it in tried.items()},
    }


def _recorded(tried: Sequence[Tried], grid: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    chosen = choose(tried, grid)
    return {
        "chosen": None if chosen is None else dict(chosen.settings),
        "at_edge": [] if chosen is None else _at_edge(chosen.settings, grid),
        "tried": [
            {
                "settings": dict(one.settings),
                "score": one.score,
                "loss": one.loss,
                "by_seed": {
                    str(seed): None if found is None else dataclasses.asdict(found)
                    for seed, found in one.by_seed.items()
                },
            }
            for one in tried
        ],
    }


def _at_edge(settings: Settings, grid: Mapping[str, Sequence[Any]]) -> list[str]:
    """Which numbers are the smallest or largest of at least two that were tried: a better one may lie beyond."""
    return [
        name
        for name, value in settings.items()
        if len(grid[name]) > 1 and _numbers(grid[name]) and value in (min(grid[name]), max(grid[name]))
    ]


def _value(text: str) -> Any:
    """A value in YAML, which takes 1e-3 for a text: that is a number here."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r} is no value that can be tried") from error
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _place(value: Any, values: Sequence[Any]) -> float:
    return float(value) if _numbers(values) else float(list(values).index(value))


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return mean(known) if known and len(known) == len(values) else None
