"""Which base model each client has, and all of them loaded: the server's own, smaller ones cut from it, or others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.compress.factored import FactoredLinear
from coterie.data.tasks import Images, Task
from coterie.engines.setting import require_bases
from coterie.errors import ConfigError
from coterie.experiments.bases import base_for, model_place
from coterie.experiments.calibrating import Material, seen
from coterie.experiments.config import Config
from coterie.experiments.nested import nested_models
from coterie.experiments.shares import client_ids, dealt
from coterie.maths.keys import Key
from coterie.models.emulator import emulator
from coterie.models.loading import Base
from coterie.protocol import Traits

EMULATOR = "emulator"
"""The spec of what clients have of model.base where a method has them train around an emulator of it."""

SERVER = "base"
"""The spec of model.base, which the server has, and every client that the configuration gives no other."""

_CUT = "ratio-"
"""What the specs of models that are cut from model.base begin with."""


def specs_of(config: Config) -> dict[str, str]:
    """The name of each client's base model, by id: "base" for model.base, "ratio-0.4", or as clients.bases has it."""
    ids, section = client_ids(config), config.clients
    if section.ratios is not None:
        names = [SERVER if ratio == "full" else _ratio_name(ratio) for ratio in section.ratios]
    elif section.bases is not None:
        found = _base_names(config)
        names = [found[base] for base in section.bases]
    else:
        names = [SERVER]
    return dict(zip(ids, dealt(names, len(ids)), strict=True))


def taking_part(config: Config, specs: Mapping[str, str]) -> list[str]:
    """The clients of the federation, in the configuration's order; see `FederationSection.only`.

    Raises:
        ConfigError: nobody is left.
    """
    if config.federation.only is None:
        return list(specs)
    kept = [name for name, spec in specs.items() if spec == SERVER]
    if not kept:
        raise ConfigError("federation.only=full leaves no client; give some of them model.base, as clients.ratios=full")
    return kept


def check_bases(traits: Traits, specs: Mapping[str, str]) -> None:
    """Refuse base models among which the method cannot mediate.

    Raises:
        ConfigError: naming a client, or two whose base models differ.
    """
    require_bases(traits, specs)
    if traits.bases == "compressed" and (
        foreign := [name for name, spec in specs.items() if spec != SERVER and not spec.startswith(_CUT)]
    ):
        raise ConfigError(
            f"{traits.title} fuses models that were cut from the server's, but {foreign[0]} has {specs[foreign[0]]!r}; "
            "use clients.ratios in place of clients.bases"
        )


@dataclass(frozen=True)
class Opened:
    """Base models by spec, the server's among them, and the folder or hub name of each."""

    bases: dict[str, Base]
    places: dict[str, str]


def open_bases(config: Config, task: Task, specs: Collection[str], head_key: Key) -> Opened:
    """The server's base model and those of these names, each with its own tokeniser; equal content is held once.

    Raises:
        ConfigError, DataError, ModelError, RunError: as `base_for` and `nested_models`.
    """
    bases = {SERVER: base_for(task, config.model, head_key)}
    places = _places(config, task, set(specs) - {SERVER})
    for spec, place in sorted(places.items()):
        opened = base_for(task, config.model.model_copy(update={"base": place}), head_key)
        bases[spec] = next((one for one in bases.values() if one.digest == opened.digest), opened)
    return Opened(bases, {SERVER: model_place(config.model.base)} | places)


def emulated(
    opened: Opened, shape: tuple[float, int], config: Config, specs: Mapping[str, str], head_key: Key
) -> tuple[Opened, dict[str, str]]:
    """With an emulator of the server's base model, of the shape (drop, outer), which then all clients have.

    Raises:
        ConfigError: the configuration gives clients base models of their own.
        ModelError: as `emulator`.
    """
    if set(specs.values()) != {SERVER}:
        raise ConfigError(
            f"{config.method} makes the clients' base model itself, out of model.base; leave clients.bases and "
            "clients.ratios out"
        )
    made = emulator(opened.bases[SERVER], config.model.targets, *shape, head_key)
    bases, places = opened.bases | {EMULATOR: made}, opened.places | {EMULATOR: opened.places[SERVER]}
    return Opened(bases, places), dict.fromkeys(specs, EMULATOR)


def check_factored(traits: Traits, bases: Mapping[str, Base]) -> None:
    """Refuse compressed layers that a method which fuses bases would never see.

    Raises:
        ConfigError: naming one that is not among the adapted layers.
    """
    for base in bases.values():
        found = (name for name, module in base.network.named_modules() if isinstance(module, FactoredLinear))
        hidden = [name.removesuffix(".base") for name in found if name.removesuffix(".base") not in base.layers]
        if traits.bases == "compressed" and hidden:
            raise ConfigError(
                f"{traits.title} fuses all compressed layers, and {hidden[0]} is not among model.targets; write "
                "model.targets=all-linear, or name fewer compression.layers"
            )


def set_up_bytes(base: Base) -> int:
    """What a client is sent of a compressed base at the start, in fp32: the factors, k (m + n) a layer.

    The layers that are not compressed are those of the model that all know (FedSLM's specification, section 3.2).
    """
    layers = [module for module in base.network.modules() if isinstance(module, FactoredLinear)]
    factors = {id(part): part for layer in layers for part in (layer.U, layer.V)}  # a shared V counts once
    return sum(4 * part.numel() for part in factors.values())


def _places(config: Config, task: Task, specs: Collection[str]) -> dict[str, str]:
    """The folder or hub name of each of these base models."""
    section = config.clients
    if not specs:
        return {}
    if section.ratios is not None:
        ratios = {_ratio_name(ratio): ratio for ratio in section.ratios if ratio != "full"}
        folders = nested_models(config.model.base, ratios.values(), config.compression, _material(task))
        return {spec: str(folders[ratios[spec]]) for spec in specs}
    return {spec: model_place(base) for base, spec in _base_names(config).items() if spec in specs}


def _material(task: Task) -> Material:
    """The task's own training texts, images, or questions about images, to compress along."""
    if isinstance(task.train, Images):
        return task.train.pictures
    if pairs := seen(task.train):
        return pairs
    texts = [" ".join(part for part in content if part) for content in task.train.contents()]
    return [f"{text}\n" for text in texts if text.strip()]


def _base_names(config: Config) -> dict[str, str]:
    """A short name for each model of clients.bases; model.base keeps its own."""
    names: dict[str, str] = {}
    for base in dict.fromkeys(config.clients.bases or ()):
        if model_place(base) == model_place(config.model.base):
            names[base] = SERVER
            continue
        short = Path(base).name
        if short == EMULATOR or short.startswith(_CUT):  # which say of a model that it was made from the server's
            short = f"own-{short}"
        taken = set(names.values()) | {SERVER}
        names[base] = short if short not in taken else f"{short}-{len(names) + 1}"
    return names


def _ratio_name(ratio: float) -> str:
    return f"{_CUT}{ratio:g}"
