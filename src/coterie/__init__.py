"""Federated fine-tuning of foundation models among unequal clients.

Playing:
    run, resume       a configuration in a folder of its own; a run that was broken off
    load_config       a YAML file, with overrides, as a checked `Config`

Methods, each one file in `coterie.algorithms`:
    LocalOnly         every client by itself: the lower bound
    FedIT             average the factors (arXiv 2305.05644)
    FFALoRA           freeze A, average B (arXiv 2403.12313)
    FlexLoRA          average the products, hand out truncations (arXiv 2402.11505)
    FedPALoRA         keep your own factors, be drawn towards the common product (arXiv 2608.15381)
    FedPAFactors      the same with factors regularised, FedPAOverwritten without preservation (its Table 4)
    METHODS           all of them by their names on the command line

Writing one: `coterie.algorithms.base` is the contract, `coterie.protocol` the vocabulary. Names are loaded when first
used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.algorithms import METHODS, Algorithm, FedIT, FedPALoRA, FFALoRA, FlexLoRA, LocalOnly
    from coterie.errors import CoterieError
    from coterie.experiments.config import load as load_config
    from coterie.experiments.runs import RunResult, resume, run

_HOMES = {
    "METHODS": ("coterie.algorithms", "METHODS"),
    "Algorithm": ("coterie.algorithms", "Algorithm"),
    "CoterieError": ("coterie.errors", "CoterieError"),
    "FFALoRA": ("coterie.algorithms", "FFALoRA"),
    "FedIT": ("coterie.algorithms", "FedIT"),
    "FedPALoRA": ("coterie.algorithms", "FedPALoRA"),
    "FlexLoRA": ("coterie.algorithms", "FlexLoRA"),
    "LocalOnly": ("coterie.algorithms", "LocalOnly"),
    "RunResult": ("coterie.experiments.runs", "RunResult"),
    "load_config": ("coterie.experiments.config", "load"),
    "resume": ("coterie.experiments.runs", "resume"),
    "run": ("coterie.experiments.runs", "run"),
}

__all__ = [
    "METHODS",
    "Algorithm",
    "CoterieError",
    "FFALoRA",
    "FedIT",
    "FedPALoRA",
    "FlexLoRA",
    "LocalOnly",
    "RunResult",
    "load_config",
    "resume",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
