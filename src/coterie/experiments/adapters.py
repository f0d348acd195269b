"""The models that a run ends with, as PEFT folders: one of the server, one of each site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from coterie.adapters.core_folder import inner_cores, save_cores
from coterie.adapters.mixture_folder import save_mixture
from coterie.adapters.peft_folder import save_peft
from coterie.adapters.routed_folder import routed_terms, save_routed
from coterie.engines.evaluation import site_models
from coterie.engines.heads import head_name
from coterie.engines.in_process import InProcess, Progress
from coterie.engines.scoring import Evaluation
from coterie.engines.traffic import Traffic
from coterie.errors import ModelError
from coterie.maths.lowrank import balanced, truncate
from coterie.models.targets import is_conv1d
from coterie.protocol import Adapter, BaseLog, Dense, LowRank, Model, Term, as_adapters
from coterie.training.asks import Head
from coterie.wire.ledger import Ledger

GLOBAL = "global"


def write_adapters(
    engine: InProcess, progress: Progress, base_names: Mapping[str, str], labels: Sequence[str], place: Path
) -> str | None:
    """Fills `place` with `global` (where the method has one) and `client-<id>` for every site, heads included.

    A site whose model adds nothing to the base gets no folder, such as one with another model for each of its tasks.

    base_names: where users of the adapters find each base model, by its spec. labels: the names of the classes, which a
    language model has none of. With local heads the global adapter carries the initial one, which nobody trained. A
    model whose terms are mixed for each input takes a PEFT folder for each term (`coterie.adapters.mixture_folder`),
    one with routed experts one for each expert (`coterie.adapters.routed_folder`), and cores inside a compressed base
    model are kept as such (`coterie.adapters.core_folder`).

    Returns one line on what is no plain PEFT folder; None when all are.

    Raises:
        RunError: the disk refuses; resuming the run writes what is missing.
        ModelError: a model that PEFT's LoRA cannot express.
    """
    setting = engine.setting
    bases = engine.executor.bases
    log = getattr(progress.state, "base", None)
    patches = log if isinstance(log, BaseLog) else BaseLog()
    several: list[str] = []

    def save(name: str, model: Model, head: Head | None, spec: str) -> None:
        base = bases[spec]
        classes = None if base.is_language else tuple(labels)
        if cores := inner_cores(model):
            save_cores(place / name, cores, base_names[spec], head, classes)
            return

        def write(folder: Path, adapter: Adapter) -> None:
            save_peft(
                folder,
                adapter,
                base_name=base_names[spec],
                head=head,
                task_type="CAUSAL_LM" if base.is_language else "SEQ_CLS" if base.vision is None else None,
                label_names=classes,
                image_size=None if base.vision is None else base.vision.size,
                fan_in_fan_out=any(is_conv1d(slot.base) for slot in base.slots.layers.values()),
            )

        routed = routed_terms(model) if model.mix is None else {}
        if model.mix is None and not routed:
            write(place / name, flattened(model, patches, name))
            return
        if patches.version:
            kind = "routed experts" if routed else "a mixture"
            raise ModelError(f"{name}: {kind} on a base that the method changed cannot be written as adapters")
        several.append(name)
        parts = {term: flattened(model.only(term), patches, name) for term in model.terms if term not in routed}
        if model.mix is not None:
            save_mixture(place / name, parts, model.mix, write)
        else:
            save_routed(place / name, routed, parts, lambda part, adapter: write(place / name / part, adapter))

    left_out: list[str] = []
    deployed = setting.algorithm.global_model(progress.state)
    if deployed is not None and "bottleneck" in deployed:
        left_out.append(f"{place.name}: PEFT knows no bottlenecks like these, so the run's checkpoint alone holds them")
    elif deployed is not None:
        head = progress.heads.get(head_name(setting.server_spec, "all"))
        save(GLOBAL, deployed, head, setting.server_spec)
    traffic = Traffic(Ledger(), progress.round, "export", setting.strict)
    view = Evaluation(setting, engine.executor, engine.store, progress.round, "export", traffic)
    if setting.algorithm.emulation() is not None:
        left_out.append(f"{place.name}: nothing of clients, whose base model is an emulator without a folder")
        return "; ".join(left_out)
    for name, model, head in site_models(view, progress.state, progress.heads, {}):
        if model.terms or patches.version:
            save(f"client-{name}", model, head, model.spec or setting.sites[name].card.spec)
    if not several:
        return None
    named = ", ".join(several[:3]) + (", …" if len(several) > 3 else "")
    return (
        f"{place.name}: several PEFT folders each for {named}, which every input weights anew; "
        "coterie.load and coterie predict use them together"
    )


def flattened(model: Model, log: BaseLog, who: str) -> Adapter:
    """One low-rank term for each layer: the model's terms and the base's patches, side by side if several.

    Where their ranks add up to more than half of what the layer can have, they are rewritten at the rank that their
    sum really has, so that an adapter does not grow with every round for ever; the sum is the same up to rounding.

    Raises:
        ModelError: a term that is not low-rank.
    """
    by_layer: dict[str, list[LowRank]] = {}
    for name, layers in model.terms.items():
        for layer, term in layers.items():
            factors = _factors_of(term)
            if factors is None:
                kind = type(term).__name__
                raise ModelError(f"{who}: the term {name!r} is a {kind}, which PEFT's LoRA cannot express")
            by_layer.setdefault(layer, []).append(factors)
    for patch in as_adapters(log.patches):
        for layer, term in patch.items():
            by_layer.setdefault(layer, []).append(term)
    return {layer: _side_by_side(terms) for layer, terms in by_layer.items()}


def _factors_of(term: Term) -> LowRank | None:
    """The term as factors; a matrix as itself and an identity, which loses nothing."""
    if not isinstance(term, Dense):
        return term.low_rank()
    rows, columns = term.W.shape
    if rows < columns:
        return LowRank(torch.eye(rows, dtype=term.W.dtype), term.W)
    return LowRank(term.W, torch.eye(columns, dtype=term.W.dtype))


def _side_by_side(terms: Sequence[LowRank]) -> LowRank:
    """One term with the sum of the products."""
    if len(terms) == 1:
        return terms[0]
    B = torch.cat([float(term.scale) * term.left for term in terms], dim=-1)
    A = torch.cat([term.A for term in terms], dim=-2)
    most = min(B.shape[-2], A.shape[-1])
    if 2 * B.shape[-1] > most:
        whole = truncate(B, A, most)
        rank = max(1, int((whole.singular_values > 0).sum()))
        B, A = balanced(whole)
        B, A = B[:, :rank], A[:rank]
    return LowRank(B, A, 1.0)
