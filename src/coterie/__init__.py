"""Federated fine-tuning of foundation models among unequal clients.

Playing:
    run, resume       a configuration in a folder of its own; a run that was broken off
    load_config       a YAML file, with overrides, as a checked `Config`
    load              what a run left (or an export, or PEFT) as a Predictor, which names classes or goes on with text

Methods, each one file in `coterie.algorithms`:
    LocalOnly         every client by itself: the lower bound
    Centralised       the clients' data in one place; CentralisedPerTask with a model for each group: references
    FedIT             average the factors (arXiv 2305.05644)
    FFALoRA           freeze A, average B (arXiv 2403.12313)
    RoLoRA            train B and A in turns (arXiv 2502.01755)
    FedRotLoRA        turn factors onto the common ones, then average (arXiv 2602.23638); FedRotSoft part of the way
    FedExLoRA         average, and add to the base what that loses (arXiv 2410.09432); FedExTruncated the most of it
    FedSRD            send the entries that matter, reconstruct, decompose (arXiv 2510.04601); FedSRDe without SVDs
    FedRACLoRA        train one factor beside a new random one, merge it, over and over (arXiv 2410.08305)
    LoRAFAIR          average, correct B towards the products (arXiv 2411.14961); LoRAFAIRClosed in closed form, ours
    FLoRANA           combine the factors so that their product fits (arXiv 2509.26399)
    FlexLoRA          average the products, hand out truncations (arXiv 2402.11505)
    FlexLoRAAdaptive  the same with SeFoRA's rank update, FLoRAAdaptive FLoRA with it
    FLoRA             stack all factors into the base, start afresh (arXiv 2409.05976)
    HetLoRA           zero-pad, weight by norm, prune ranks (arXiv 2401.06432)
    FSLoRA            train random directions of the global pair (arXiv 2501.19389)
    FedPLoRA          train some modules of rank one, fold the others away (arXiv 2602.16936)
    Ravan             small cores between frozen bases (arXiv 2506.05568)
    FedPALoRA         keep your own factors, be drawn towards the common product (arXiv 2608.15381)
    FedPAFactors      the same with factors regularised, FedPAOverwritten without preservation (its Table 4)
    FedPALoss, FedPAGradient, FedPADirection
                      the same with each client's own weight of alignment, found every round (its Appendix F)
    FedSALoRA         average A, keep B (arXiv 2410.01463)
    FedDPAF, FedDPAT  a global and a local adapter, mixed for each input (arXiv 2403.19211)
    FedLEASE          experts by cluster, chosen token by token (arXiv 2509.15087)
    FedSEE            an expert for each public task, extracted from mixed updates and routed to (FedSEE)
    FedSLM            cores in compressed models, fused to teach the full one (arXiv 2607.29071)
    FedProto          exchange class means of features, of any models (arXiv 2105.00243)
    FedMKT            teach each other by predictions on a pool, whatever the tokens (arXiv 2406.02224)
    FedBiOT           train the outer blocks around an emulator of the middle ones (arXiv 2406.17706)
    IFCA              one adapter for each cluster, chosen by loss (arXiv 2006.04088)
    SLoRA             sparse fine-tuning first, then LoRA from its SVD (arXiv 2308.06522)
    SeFoRA            upload linear sketches of the products (arXiv 2608.10144); SeFoRAHo at one rank for all
    SeFoRAPlus        the same sketches read with less loss; ours
    SketchPA          FedPALoRA on sketches, so that the server sees no factor; ours
    METHODS           all of them by their names on the command line

Around a method that averages factors (in a configuration: federation.server_optimizer, federation.proximal):
    ServerOptimised   FedAvgM, FedAdagrad, FedAdam, FedYogi (arXiv 2003.00295)
    Proximal          FedProx (arXiv 1812.06127)

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
    from coterie.serve import Predictor, load

_HOMES = {
    "METHODS": ("coterie.algorithms", "METHODS"),
    "Algorithm": ("coterie.algorithms", "Algorithm"),
    "CoterieError": ("coterie.errors", "CoterieError"),
    "FFALoRA": ("coterie.algorithms", "FFALoRA"),
    "FedIT": ("coterie.algorithms", "FedIT"),
    "FedPALoRA": ("coterie.algorithms", "FedPALoRA"),
    "FlexLoRA": ("coterie.algorithms", "FlexLoRA"),
    "LocalOnly": ("coterie.algorithms", "LocalOnly"),
    "Predictor": ("coterie.serve", "Predictor"),
    "RunResult": ("coterie.experiments.runs", "RunResult"),
    "load": ("coterie.serve", "load"),
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
    "Predictor",
    "RunResult",
    "load",
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
