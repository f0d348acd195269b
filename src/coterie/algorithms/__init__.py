"""Every method by its name on the command line."""

from __future__ import annotations

from coterie.algorithms.base import Algorithm
from coterie.algorithms.centralised import Centralised
from coterie.algorithms.centralised_per_task import CentralisedPerTask
from coterie.algorithms.fed_plora import FedPLoRA
from coterie.algorithms.fed_rac_lora import FedRACLoRA
from coterie.algorithms.fedbiot import FedBiOT
from coterie.algorithms.feddpa_f import FedDPAF
from coterie.algorithms.feddpa_t import FedDPAT
from coterie.algorithms.fedex_lora import FedExLoRA, FedExTruncated
from coterie.algorithms.fedit import FedIT
from coterie.algorithms.fedlease import FedLEASE
from coterie.algorithms.fedmkt import FedMKT
from coterie.algorithms.fedpa_ablations import FedPAFactors, FedPAOverwritten
from coterie.algorithms.fedpa_adaptive import FedPADirection, FedPAGradient, FedPALoss
from coterie.algorithms.fedpa_lora import FedPALoRA
from coterie.algorithms.fedproto import FedProto
from coterie.algorithms.fedrot_lora import FedRotLoRA, FedRotSoft
from coterie.algorithms.fedsa_lora import FedSALoRA
from coterie.algorithms.fedsee import FedSEE
from coterie.algorithms.fedslm import FedSLM
from coterie.algorithms.fedsrd import FedSRD
from coterie.algorithms.fedsrd_e import FedSRDe
from coterie.algorithms.ffa_lora import FFALoRA
from coterie.algorithms.flexlora import FlexLoRA
from coterie.algorithms.flexlora_adaptive import FlexLoRAAdaptive
from coterie.algorithms.flora import FLoRA
from coterie.algorithms.flora_adaptive import FLoRAAdaptive
from coterie.algorithms.flora_na import FLoRANA
from coterie.algorithms.fslora import FSLoRA
from coterie.algorithms.hetlora import HetLoRA
from coterie.algorithms.ifca import IFCA
from coterie.algorithms.local_only import LocalOnly
from coterie.algorithms.lora_fair import LoRAFAIR, LoRAFAIRClosed
from coterie.algorithms.proximal import Proximal
from coterie.algorithms.ravan import Ravan
from coterie.algorithms.rolora import RoLoRA
from coterie.algorithms.sefora import SeFoRA
from coterie.algorithms.sefora_ho import SeFoRAHo
from coterie.algorithms.sefora_plus import SeFoRAPlus
from coterie.algorithms.server_optimised import ServerOptimised
from coterie.algorithms.sketch_pa import SketchPA
from coterie.algorithms.slora import SLoRA

METHODS: dict[str, type[Algorithm]] = {
    "centralised": Centralised,
    "centralised-per-task": CentralisedPerTask,
    "fed-plora": FedPLoRA,
    "fed-rac-lora": FedRACLoRA,
    "fedbiot": FedBiOT,
    "feddpa-f": FedDPAF,
    "feddpa-t": FedDPAT,
    "fedex-lora": FedExLoRA,
    "fedex-lora-truncated": FedExTruncated,
    "fedit": FedIT,
    "fedlease": FedLEASE,
    "fedmkt": FedMKT,
    "fedpa-factors": FedPAFactors,
    "fedpa-lora": FedPALoRA,
    "fedpa-lora-direction": FedPADirection,
    "fedpa-lora-gradient": FedPAGradient,
    "fedpa-lora-loss": FedPALoss,
    "fedpa-overwritten": FedPAOverwritten,
    "fedproto": FedProto,
    "fedrot-lora": FedRotLoRA,
    "fedrot-lora-soft": FedRotSoft,
    "fedsa-lora": FedSALoRA,
    "fedsee": FedSEE,
    "fedslm": FedSLM,
    "fedsrd": FedSRD,
    "fedsrd-e": FedSRDe,
    "ffa-lora": FFALoRA,
    "flexlora": FlexLoRA,
    "flexlora-adaptive": FlexLoRAAdaptive,
    "flora": FLoRA,
    "flora-adaptive": FLoRAAdaptive,
    "flora-na": FLoRANA,
    "fslora": FSLoRA,
    "hetlora": HetLoRA,
    "ifca": IFCA,
    "local-only": LocalOnly,
    "lora-fair": LoRAFAIR,
    "lora-fair-closed": LoRAFAIRClosed,
    "ravan": Ravan,
    "rolora": RoLoRA,
    "sefora": SeFoRA,
    "sefora-ho": SeFoRAHo,
    "sefora-plus": SeFoRAPlus,
    "sketch-pa": SketchPA,
    "slora": SLoRA,
}

__all__ = [
    "IFCA",
    "METHODS",
    "Algorithm",
    "Centralised",
    "CentralisedPerTask",
    "FFALoRA",
    "FLoRA",
    "FLoRAAdaptive",
    "FLoRANA",
    "FSLoRA",
    "FedBiOT",
    "FedDPAF",
    "FedDPAT",
    "FedExLoRA",
    "FedExTruncated",
    "FedIT",
    "FedLEASE",
    "FedMKT",
    "FedPADirection",
    "FedPAFactors",
    "FedPAGradient",
    "FedPALoRA",
    "FedPALoss",
    "FedPAOverwritten",
    "FedPLoRA",
    "FedProto",
    "FedRACLoRA",
    "FedRotLoRA",
    "FedRotSoft",
    "FedSALoRA",
    "FedSEE",
    "FedSLM",
    "FedSRD",
    "FedSRDe",
    "FlexLoRA",
    "FlexLoRAAdaptive",
    "HetLoRA",
    "LoRAFAIR",
    "LoRAFAIRClosed",
    "LocalOnly",
    "Proximal",
    "Ravan",
    "RoLoRA",
    "SLoRA",
    "SeFoRA",
    "SeFoRAHo",
    "SeFoRAPlus",
    "ServerOptimised",
    "SketchPA",
]
