"""Every method by its name on the command line."""

from __future__ import annotations

from coterie.algorithms.base import Algorithm
from coterie.algorithms.fedit import FedIT
from coterie.algorithms.fedpa_ablations import FedPAFactors, FedPAOverwritten
from coterie.algorithms.fedpa_lora import FedPALoRA
from coterie.algorithms.ffa_lora import FFALoRA
from coterie.algorithms.flexlora import FlexLoRA
from coterie.algorithms.local_only import LocalOnly

METHODS: dict[str, type[Algorithm]] = {
    "fedit": FedIT,
    "fedpa-factors": FedPAFactors,
    "fedpa-lora": FedPALoRA,
    "fedpa-overwritten": FedPAOverwritten,
    "ffa-lora": FFALoRA,
    "flexlora": FlexLoRA,
    "local-only": LocalOnly,
}

__all__ = [
    "METHODS",
    "Algorithm",
    "FFALoRA",
    "FedIT",
    "FedPAFactors",
    "FedPALoRA",
    "FedPAOverwritten",
    "FlexLoRA",
    "LocalOnly",
]
