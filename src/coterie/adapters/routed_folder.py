"""Folders of models in which a router weights experts for each token: a PEFT folder for each expert, and the routers.

    <folder>/experts-0/  <folder>/experts-1/ ...   PEFT folders, which PEFT loads one at a time
    <folder>/shared/ ...                           those of terms that are not routed, where the model has such
    <folder>/routers.safetensors                   each layer's router and whom its outputs reach
    <folder>/routed.json                           what belongs together (`coterie.protocol.Routed`), written last

PEFT itself adds adapters in fixed shares only; the whole is read by `coterie.load`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie.adapters.peft_folder import PeftFolder, load_peft
from coterie.errors import ModelError, RunError
from coterie.protocol import Adapter, Model, Routed, Term, copied

RULE = "routed.json"
ROUTERS = "routers.safetensors"
FIELDS = ("router", "bias", "outputs", "allowed")
"""What of a routed term is no expert's."""


@dataclass(frozen=True)
class RoutedFolder:
    """What a folder holds: the PEFT folders by name, and the model that they make together."""

    parts: dict[str, PeftFolder]
    model: Model


def is_routed(folder: Path) -> bool:
    """Whether a folder holds such a model."""
    return (folder / RULE).is_file()


def routed_terms(model: Model) -> dict[str, dict[str, Routed]]:
    """The terms of a model whose layers all have routed experts, by name."""
    found = {}
    for name, layers in model.terms.items():
        routed = {layer: term for layer, term in layers.items() if isinstance(term, Routed)}
        if routed and len(routed) == len(layers):
            found[name] = routed
    return found


def save_routed(
    folder: Path,
    routed: Mapping[str, Mapping[str, Routed]],
    plain: Mapping[str, Adapter],
    save: Callable[[str, Adapter], None],
) -> None:
    """Writes experts and plain terms by `save` (name of a PEFT folder, adapter), then the routers and the rule.

    routed: terms by name and layer, with equally many experts in all layers. plain: low-rank terms by name.

    Raises:
        RunError: the disk refuses.
        ModelError: as `save` does.
    """
    rule: dict[str, object] = {"format": 1, "terms": list(plain)}
    about, tensors = {}, dict[str, Tensor]()
    for name, layers in routed.items():
        first = next(iter(layers.values()))
        for expert in range(first.experts):
            save(f"{name}-{expert}", {layer: term.expert(expert) for layer, term in layers.items()})
        about[name] = {"experts": first.experts, "common_A": len(first.A) == 1, "top": first.top}
        for layer, term in layers.items():
            held = {part: getattr(term, part) for part in FIELDS}
            tensors |= {f"{name}/{layer}/{part}": value for part, value in held.items() if value is not None}
    for name, adapter in plain.items():
        save(name, adapter)
    try:
        stored = {name: copied(value).cpu() for name, value in tensors.items()}  # layers may share one
        save_file(stored, folder / ROUTERS, metadata={"format": "pt"})
        (folder / RULE).write_text(json.dumps(rule | {"routed": about}, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise RunError(f"{folder}: the routers cannot be written ({error}); free space, then try again") from error


def load_routed(folder: Path) -> RoutedFolder:
    """Reads such a folder.

    Raises:
        ModelError: what is missing, damaged or of another format, in one line.
    """
    parts: dict[str, PeftFolder] = {}
    terms: dict[str, Mapping[str, Term]] = {}
    try:
        rule = json.loads((folder / RULE).read_text(encoding="utf-8"))
        tensors = load_file(folder / ROUTERS)
        if rule["format"] != 1 or not rule["routed"]:
            raise ValueError(f"format {rule['format']!r}, {len(rule['routed'])} routed terms")
        for name, about in rule["routed"].items():
            experts = [f"{name}-{expert}" for expert in range(int(about["experts"]))]
            parts |= {part: load_peft(folder / part) for part in experts}
            adapters = [parts[part].adapter for part in experts]
            terms[name] = {layer: _term(name, layer, adapters, tensors, about) for layer in adapters[0]}
        for name in rule["terms"]:
            parts[name] = load_peft(folder / name)
            terms[name] = parts[name].adapter
    except (OSError, ValueError, KeyError, TypeError, IndexError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{folder / RULE}: cannot be read ({reason}); copy the folder again") from error
    return RoutedFolder(parts, Model(**terms))  # type: ignore[arg-type]


def _term(
    name: str, layer: str, adapters: list[Adapter], tensors: Mapping[str, Tensor], about: Mapping[str, object]
) -> Routed:
    held = {part: tensors.get(f"{name}/{layer}/{part}") for part in FIELDS}
    router, top = held["router"], about["top"]
    if router is None or not (top is None or isinstance(top, int)):
        raise ValueError(f"no router of layer {layer}, or top {top!r}")
    terms = [adapter[layer] for adapter in adapters]
    return Routed(
        B=tuple(term.B for term in terms),
        A=tuple(term.A for term in (terms[:1] if about["common_A"] else terms)),
        router=router,
        scale=terms[0].scale,
        bias=held["bias"],
        outputs=held["outputs"],
        allowed=held["allowed"],
        top=top,
    )
