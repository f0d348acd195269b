"""The models that a run ends with, as PEFT folders: one of the server, one of each site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from coterie.adapters.peft_folder import save_peft
from coterie.engines.evaluation import Evaluation, head_name, site_models
from coterie.engines.in_process import InProcess, Progress
from coterie.engines.traffic import Traffic
from coterie.errors import ModelError
from coterie.models.loading import Base
from coterie.models.targets import is_conv1d
from coterie.protocol import Adapter, BaseLog, LowRank, Model
from coterie.training.asks import Head
from coterie.wire.ledger import Ledger

GLOBAL = "global"


def write_adapters(
    engine: InProcess, progress: Progress, base: Base, base_name: str, labels: Sequence[str], place: Path
) -> None:
    """Fills `place` with `global` (where the method has one) and `client-<id>` for every site, heads included.

    base_name: where users of the adapter find the base model. labels: the names of the classes. With local
    heads the global adapter carries the initial one, which nobody trained.

    Raises:
        RunError: the disk refuses; resuming the run writes what is missing.
        ModelError: a model that PEFT's LoRA cannot express.
    """
    setting = engine.setting
    transposed = any(is_conv1d(slot.base) for slot in base.slots.layers.values())
    log = getattr(progress.state, "base", None)
    patches = log if isinstance(log, BaseLog) else BaseLog()

    def save(name: str, model: Model, head: Head | None) -> None:
        save_peft(
            place / name,
            flattened(model, patches, name),
            base_name=base_name,
            head=head,
            task_type="SEQ_CLS",
            label_names=tuple(labels),
            fan_in_fan_out=transposed,
        )

    deployed = setting.algorithm.global_model(progress.state)
    if deployed is not None:
        save(GLOBAL, deployed, progress.heads.get(head_name(setting.server_spec, "all")))
    traffic = Traffic(Ledger(), progress.round, "export", setting.strict)
    view = Evaluation(setting, engine.executor, engine.store, progress.round, "export", traffic)
    for name, model, head in site_models(view, progress.state, progress.heads, {}):
        save(f"client-{name}", model, head)


def flattened(model: Model, log: BaseLog, who: str) -> Adapter:
    """One low-rank term for each layer: the model's terms and the base's patches, side by side if several.

    Raises:
        ModelError: a term that is not low-rank.
    """
    by_layer: dict[str, list[LowRank]] = {}
    for name, layers in model.terms.items():
        for layer, term in layers.items():
            if not isinstance(term, LowRank):
                kind = type(term).__name__
                raise ModelError(f"{who}: the term {name!r} is a {kind}, which PEFT's LoRA cannot express")
            by_layer.setdefault(layer, []).append(term)
    for patch in log.patches:
        for layer, term in patch.items():
            by_layer.setdefault(layer, []).append(term)
    return {layer: _side_by_side(terms) for layer, terms in by_layer.items()}


def _side_by_side(terms: Sequence[LowRank]) -> LowRank:
    """One term with the sum of the products."""
    if len(terms) == 1:
        return terms[0]
    B = torch.cat([float(term.scale) * term.left for term in terms], dim=-1)
    return LowRank(B, torch.cat([term.A for term in terms], dim=-2), 1.0)
