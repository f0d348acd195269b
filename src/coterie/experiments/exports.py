"""Adapters out of a finished run: as they are, or merged into a whole model."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from coterie.adapters.core_folder import is_cores, load_cores, save_cores
from coterie.adapters.inject import eject
from coterie.adapters.mixture_folder import is_mixture, load_mixture, save_mixture
from coterie.adapters.peft_folder import PeftFolder, load_peft, save_peft
from coterie.adapters.routed_folder import RoutedFolder, is_routed, load_routed, routed_terms, save_routed
from coterie.compress.factored import FactoredLinear
from coterie.compress.folder import read_notes, save
from coterie.errors import ConfigError, ModelError, RunError, nearest
from coterie.experiments.adapters import GLOBAL, flattened
from coterie.experiments.bases import model_place, open_base, open_image_base, open_seeing_base
from coterie.experiments.folders import ADAPTERS, SUMMARY, read_config, read_lines
from coterie.maths.keys import root_key
from coterie.models.loading import load_base, load_whole
from coterie.protocol import Adapter, BaseLog, InnerCore, LowRank, Model, Routed

LANGUAGE = "CAUSAL_LM"
"""PEFT's name of the task of language models."""


def export(
    run: str | Path, destination: str | Path, *, client: str | None = None, merged: bool = False, static: bool = False
) -> None:
    """Writes the global adapter of a finished run, or a client's, to a new folder.

    merged: a model in the transformers format with the adapter added to its weights, head and tokeniser
    included, instead of a PEFT folder; of cores inside a compressed model, that model with U H in place of U. static:
    of a model with routed experts, one PEFT folder in which every input gets the experts in the shares that the client
    contributed to them (FedSEE's c̃), beside what is not routed.

    Raises:
        ConfigError: no run, a run that is not finished, or no such model in it; `static` of what is not routed, or of
            a method that tells no shares.
        ModelError: a destination that holds something else, an adapter or base model that is damaged, or merging
            into a base that the run quantised.
        RunError: the disk refuses.
    """
    source, target = adapter_folder(Path(run), client), Path(destination)
    if static and (merged or not is_routed(source)):
        reason = "excludes --merged" if merged else f"is for routed experts, and {source} has none; leave it out"
        raise ConfigError(f"--static {reason}")
    if merged:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{target} is there already; name a new folder")
        if is_cores(source):
            _merge_cores(source, target)
        else:
            _merge(Path(run), source, target)
        return
    if is_cores(source):
        inner = load_cores(source)
        terms = {name: InnerCore(core) for name, core in inner.cores.items()}
        save_cores(target, terms, inner.base_name, inner.head, inner.labels)
        return
    longest = read_config(Path(run))[0].model.max_length

    def write(folder: Path, adapter: Adapter, held: PeftFolder) -> None:
        save_peft(
            folder,
            adapter,
            base_name=held.base_name or "",
            head=held.head,
            task_type="CAUSAL_LM" if held.task_type == LANGUAGE else "SEQ_CLS" if held.task_type else None,
            label_names=held.labels,
            max_length=longest,
            image_size=held.image_size,
            fan_in_fan_out=bool(held.config.get("fan_in_fan_out")),
        )

    if is_mixture(source):
        mixed = load_mixture(source)
        parts = {name: part.adapter for name, part in mixed.parts.items()}
        save_mixture(target, parts, mixed.mix, lambda place, adapter: write(place, adapter, mixed.parts[place.name]))
        return
    if is_routed(source):
        found = load_routed(source)
        routed = routed_terms(found.model)
        if static:
            shares = _shares(Path(run), source.name.removeprefix("client-"))
            write(target, flattened(_in_shares(found.model, shares), BaseLog(), source.name), _any_part(found))
            return
        plain = {name: found.parts[name].adapter for name in found.model.terms if name not in routed}
        save_routed(target, routed, plain, lambda part, adapter: write(target / part, adapter, found.parts[part]))
        return
    held = load_peft(source)
    write(target, held.adapter, held)


def _shares(run: Path, client: str) -> list[float]:
    """What a client contributed to each expert in the end, in their order.

    Raises:
        ConfigError: a method that does not tell.
    """
    rows = read_lines(run / "metrics.jsonl")
    told = rows[-1].get("measures", {}).get("contributions", {}) if rows else {}
    if client not in told:
        raise ConfigError(f"{run}: its method does not tell in which shares client {client} is to use its experts")
    return list(told[client].values())


def _in_shares(model: Model, shares: Sequence[float]) -> Model:
    """The model with each routed term as the mixture of its experts in these shares, whatever the input."""
    mixed = {
        name: {layer: _mixed(term, shares) for layer, term in layers.items()}
        for name, layers in routed_terms(model).items()
    }
    return Model(**{**model.terms, **mixed})  # type: ignore[arg-type]


def _mixed(term: Routed, shares: Sequence[float]) -> LowRank:
    """s sum_m c_m B_m A_m over the allowed experts, c their shares of one; of rank r where A is common, else M r."""
    usable = [True] * term.experts if term.allowed is None else term.allowed.tolist()
    kept = [share if may else 0.0 for share, may in zip(shares, usable, strict=True)]
    if sum(kept) == 0:  # it contributed to none of them, so that none is preferred
        kept = [float(may) for may in usable]
    weighed = [share / sum(kept) * B for share, B in zip(kept, term.B, strict=True)]
    if len(term.A) == 1:
        return LowRank(torch.stack(weighed).sum(dim=0), term.A[0], term.scale)
    return LowRank(torch.cat(weighed, dim=-1), torch.cat(term.A, dim=-2), term.scale)


def _any_part(found: RoutedFolder) -> PeftFolder:
    """One of the folder's adapters, which all name the same base, head and labels."""
    return next(iter(found.parts.values()))


def adapter_folder(run: Path, client: str | None) -> Path:
    """The adapter of a client in a finished run, or the global one; raises ConfigError when it is not there."""
    config, _ = read_config(run)
    if not (run / SUMMARY).is_file():
        raise ConfigError(f"{run} is not finished; coterie resume {run}")
    name = GLOBAL if client is None else f"client-{client}"
    if not (run / ADAPTERS / name).is_dir():
        clients = [path.name.removeprefix("client-") for path in (run / ADAPTERS).glob("client-*")]
        if client is None:
            raise ConfigError(f"{config.method} has no global model; choose a client's with --client ID")
        raise ConfigError(f"there is no client {client!r}{nearest(client, clients)}")
    return run / ADAPTERS / name


def _merge_cores(source: Path, target: Path) -> None:
    """The compressed base model with U H in place of U, as a folder that loads like any compressed model."""
    held = load_cores(source)
    if held.labels is None:
        network, tokenizer = load_whole(held.base_name)
    else:
        base = load_base(
            held.base_name, targets="all-linear", num_labels=len(held.labels), head_key=root_key(0).fold("head")
        )
        network, tokenizer = base.network, base.tokenizer
        eject(network)
        parameters = dict(network.named_parameters())
        for name, value in (held.head or {}).items():
            parameters[name].data.copy_(value)
        _name_classes(network, held.labels)
    prefix = f"{getattr(network, 'base_model_prefix', '')}."
    modules = dict(network.named_modules())
    for name, H in held.cores.items():
        linear = modules.get(name) or modules.get(name.removeprefix(prefix))
        if not isinstance(linear, FactoredLinear) or linear.inner != len(H):
            raise ModelError(f"{source}: {held.base_name} has no layer {name} of rank {len(H)}; put the model back")
        linear.U.data = linear.U.data @ H.to(linear.U.dtype)
    save(target, network, tokenizer, read_notes(held.base_name))


def _name_classes(network: nn.Module, labels: Sequence[str]) -> None:
    names = dict(enumerate(labels))
    network.config.id2label = names  # type: ignore[union-attr]
    network.config.label2id = {label: index for index, label in names.items()}  # type: ignore[union-attr]


def _merge(run: Path, source: Path, target: Path) -> None:
    """The base model of the run with W + s B A in place of W, and the adapter's head if it has one."""
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    config, _ = read_config(run)
    if is_mixture(source) or is_routed(source):
        raise ModelError(
            f"{source}: each input takes its own share of several adapters, which no single model holds; export "
            "without merging"
        )
    held = load_peft(source)
    if config.model.quantization is not None:
        raise ModelError(
            f"never merge into a quantised base: this run trained on {config.model.base} in "
            f"{config.model.quantization}; export the adapter instead"
        )
    head, labels = held.head or {}, held.labels or ()
    classes = None if held.task_type == LANGUAGE else len(labels)
    head_key = root_key(config.seed).fold("head")
    if held.image_size is None:
        base = open_base(config.model, classes, head_key)
    else:
        base = open_seeing_base(config.model) if classes is None else open_image_base(config.model, classes, head_key)
    base.set_log(BaseLog((held.adapter,)))
    eject(base.network)
    parameters = dict(base.network.named_parameters())
    for name, value in head.items():
        parameters[name].data.copy_(value)
    settings = base.network.config
    if classes is not None:
        _name_classes(base.network, labels)
        # So that who classifies with it cuts texts where training cut them.
        if base.vision is None:
            base.tokenizer.model_max_length = config.model.max_length
    # Training went without the cache of keys and values; whoever generates wants what the base model says of it.
    original = AutoConfig.from_pretrained(model_place(config.model.base))
    parts = ((settings, original), (getattr(settings, "text_config", None), getattr(original, "text_config", None)))
    for part, said in parts:
        if hasattr(said, "use_cache"):
            part.use_cache = said.use_cache  # type: ignore[union-attr]
    fresh = target.with_name(f".{target.name}.new")
    disable_progress_bar()
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        base.network.save_pretrained(fresh)  # type: ignore[operator]
        for companion in (base.vision, base.tokenizer):
            if companion is not None:
                companion.save_pretrained(str(fresh))
        if target.exists():
            target.rmdir()
        fresh.rename(target)
    except OSError as error:
        raise RunError(
            f"{target}: cannot be written ({error.strerror or error}); free space, then export again"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
