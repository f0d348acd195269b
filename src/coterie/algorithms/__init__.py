"""Every method by its name on the command line."""

from __future__ import annotations

from coterie.algorithms.base import Algorithm
from coterie.algorithms.fedit import FedIT
from coterie.algorithms.fedpa_lora import FedPALoRA
from coterie.algorithms.flexlora import FlexLoRA
from coterie.algorithms.local_only import LocalOnly

METHODS: dict[str, type[Algorithm]] = {
    "fedit": FedIT,
    "fedpa-lora": FedPALoRA,
    "flexlora": FlexLoRA,
    "local-only": LocalOnly,
}

__all__ = ["METHODS", "Algorithm", "FedIT", "FedPALoRA", "FlexLoRA", "LocalOnly"]
