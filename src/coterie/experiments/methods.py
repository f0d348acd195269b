"""From a method's name and options in a configuration to the algorithm object."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from coterie.algorithms import METHODS, Algorithm
from coterie.algorithms.proximal import Proximal
from coterie.algorithms.server_optimised import ServerOptimised
from coterie.errors import ConfigError, nearest
from coterie.experiments.config import Config
from coterie.maths.server_optim import ServerOptimizer


def configured(config: Config) -> Algorithm:
    """The configuration's method with its options, within the proximal term and server optimiser that it sets.

    Raises:
        ConfigError: as `algorithm`, and for a method that these do not fit.
    """
    made, section = algorithm(config.method, config.options), config.federation
    if section.proximal > 0:
        with _about("proximal"):
            made = Proximal(made, section.proximal)
    if section.server_optimizer is not None:
        with _about("server_optimizer"):
            made = ServerOptimised(made, ServerOptimizer(**section.server_optimizer.model_dump()))
    return made


def algorithm(method: str, options: Mapping[str, Any]) -> Algorithm:
    """The algorithm with its options; values are converted to the types that its dataclass declares.

    Raises:
        ConfigError: no such method or option, or a value of another type.
    """
    kind = method_class(method)
    hints = get_type_hints(kind)
    declared: dict[str, dataclasses.Field[Any]] = getattr(kind, "__dataclass_fields__", {})
    known = {name: hints[name] for name, field in declared.items() if field.init and name in hints}
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            there = nearest(name, known) if known else "; it has none"
            raise ConfigError(f"method {method!r} has no option {name!r}{there}")
        try:
            values[name] = TypeAdapter(known[name]).validate_python(value)
        except ValidationError as error:
            said = error.errors(include_url=False)[0]["msg"].removeprefix("Input should be ")
            raise ConfigError(f"options.{name} of {method!r}: must be {said}, not {value!r}") from None
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"method {method!r}: {error}") from error


def options_of(kind: type[Algorithm]) -> dict[str, str]:
    """A method's options with their defaults, as written."""
    fields: dict[str, dataclasses.Field[Any]] = getattr(kind, "__dataclass_fields__", {})
    return {name: repr(field.default) for name, field in fields.items() if field.init}


def method_class(method: str) -> type[Algorithm]:
    """The class that a method's name, `path/to/file.py:Class` or `package.module:Class` stands for."""
    if ":" not in method:
        if method not in METHODS:
            raise ConfigError(f"there is no method {method!r}{nearest(method, METHODS)} (coterie list shows all)")
        return METHODS[method]
    place, _, name = method.rpartition(":")
    module = _from_file(Path(place).expanduser()) if place.endswith(".py") else _from_import(place)
    kind = getattr(module, name, None)
    if not isinstance(kind, type):
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Algorithm)]
        raise ConfigError(f"{place} has no class {name!r}{nearest(name, classes)}")
    if not issubclass(kind, Algorithm):
        raise ConfigError(f"{place}: {name} is no method; derive it from coterie.algorithms.Algorithm")
    return kind


def short_name(method: str) -> str:
    """The method in a file name: the class alone where a user's own is meant."""
    return method.rpartition(":")[2]


@contextmanager
def _about(setting: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"federation.{setting}: {error}, or leave this setting out") from None


def _from_file(path: Path) -> ModuleType:
    """The module in a file. Its name is the file's alone, so that a run's checkpoints survive a move of the file."""
    if not path.is_file():
        raise ConfigError(f"method: there is no file {path}")
    name = f"coterie_method_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"method: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"method: {path} does not load ({type(error).__name__}: {error})") from error
    return module


def _from_import(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise ConfigError(f"method: {place} cannot be imported ({error})") from error
