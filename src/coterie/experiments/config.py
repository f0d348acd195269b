"""What a run is, as data: one schema for YAML files, the command line and Python.

`load(path, overrides)` reads a file with dotted overrides (`train.lr=1e-3`), `parse(mapping)` a dict. Everything has
a default but `method` and `task`. An unknown key is an error that names the nearest known one. The settings are in
`coterie.experiments.config_sections`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from coterie.errors import ConfigError
from coterie.experiments.config_errors import dotted_keys, findings
from coterie.experiments.config_sections import (
    Columns,
    CompressionSection,
    Config,
    EvaluateSection,
    FaultSection,
    LoraSection,
    ModelSection,
    PartitionSection,
    PartSection,
    Section,
    ServerDataSection,
    ServerOptimizerSection,
    TaskSection,
    TrainSection,
)

__all__ = [
    "RECORDED",
    "Columns",
    "CompressionSection",
    "Config",
    "EvaluateSection",
    "FaultSection",
    "LoraSection",
    "ModelSection",
    "PartSection",
    "PartitionSection",
    "Section",
    "ServerDataSection",
    "ServerOptimizerSection",
    "TaskSection",
    "TrainSection",
    "dotted_keys",
    "dump",
    "load",
    "merged",
    "parse",
    "parse_override",
    "read_mapping",
    "resolve",
    "with_overrides",
]

RECORDED = "recorded"
"""The key under which a run's config.yaml holds what is no setting (versions, plan); ignored on reading."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """A configuration from a YAML file; `overrides` are `dotted.key=value`, values in YAML.

    What `per_method` says of the chosen method comes before the overrides. Paths are relative to the working folder.

    Raises:
        ConfigError: no such file, not YAML, or a setting that cannot be meant.
    """
    raw = read_mapping(path)
    raw.setdefault("name", Path(path).stem)
    return resolve(raw, [parse_override(text) for text in overrides])


def parse(mapping: Mapping[str, Any]) -> Config:
    """A configuration from a dict; raises ConfigError for a setting that cannot be meant."""
    return resolve(mapping, [])


def read_mapping(path: str | Path) -> dict[str, Any]:
    """A YAML file's mapping, less what a run recorded in it."""
    place = Path(path)
    try:
        content = yaml.safe_load(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8; save the file as UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{place}{line}: not YAML ({getattr(error, 'problem', None) or 'unreadable'})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{place}: a mapping of settings is expected, such as method: fedit")
    return {key: value for key, value in content.items() if key != RECORDED}


def parse_override(text: str) -> tuple[list[str], Any]:
    """`train.lr=1e-3` as (["train", "lr"], value); raises ConfigError for anything else."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{text!r} is no setting; write key=value, such as train.lr=1e-3")
    try:
        return key.strip().split("."), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {value!r} is not YAML; put it in quotation marks") from error


def resolve(raw: Mapping[str, Any], overrides: Sequence[tuple[list[str], Any]]) -> Config:
    """The configuration of `raw`, then of `per_method` for its method, then of the overrides."""
    chosen = with_overrides(raw, overrides)
    special = chosen.pop("per_method", None) or {}
    if not isinstance(special, dict) or not all(isinstance(part, dict) for part in special.values()):
        raise ConfigError("per_method: a mapping from method names to sections is expected")
    for method, part in special.items():  # a mistake in any of them is told at once
        _validated(merged({"method": method, "task": {"name": "file"}}, part), f"per_method.{method}: ")
    own = special.get(str(chosen.get("method")), {})
    return _validated(with_overrides(merged({**raw, "per_method": {}}, own), overrides), "")


def merged(base: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `part` in place of its own, mapping by mapping; other values are replaced whole."""
    made = copy.deepcopy(dict(base))
    for key, value in part.items():
        under = made.get(key)
        if isinstance(under, dict) and isinstance(value, Mapping):
            made[key] = merged(under, value)
        else:
            made[key] = copy.deepcopy(value)
    return made


def with_overrides(raw: Mapping[str, Any], overrides: Sequence[tuple[list[str], Any]]) -> dict[str, Any]:
    """`raw` with each value put at its dotted path."""
    made = dict(raw)
    for path, value in overrides:
        nested: Any = value
        for key in reversed(path[1:]):
            nested = {key: nested}
        made = merged(made, {path[0]: nested})
    return made


def dump(config: Config) -> dict[str, Any]:
    """Plain values, ready for YAML."""
    return config.model_dump(mode="json")


def _validated(raw: Mapping[str, Any], prefix: str) -> Config:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        told = findings(error.errors(include_url=False))
        more = f" (and {len(told) - 3} more)" if len(told) > 3 else ""
        raise ConfigError(prefix + "; ".join(told[:3]) + more) from None
