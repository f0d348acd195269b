"""Folders of what was trained inside a compressed base model: one small matrix a layer, between its two factors.

    <folder>/cores.safetensors   H (k, k) of each layer (`coterie.protocol.InnerCore`)
    <folder>/head.safetensors    the head, where the model has one
    <folder>/cores.json          the folder of the base model, written last

PEFT has no such adapters. `coterie export --merged` writes the whole model, U H in place of U.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie.errors import ModelError, RunError
from coterie.protocol import InnerCore, Model

RULE = "cores.json"
WEIGHTS = "cores.safetensors"
HEAD = "head.safetensors"


@dataclass(frozen=True)
class CoreFolder:
    """H by layer, the head by parameter name, the base model that they belong to, and the names of its classes."""

    cores: dict[str, Tensor]
    head: dict[str, Tensor] | None
    base_name: str
    labels: tuple[str, ...] | None


def inner_cores(model: Model) -> dict[str, InnerCore]:
    """The cores of a model that has nothing else; none of other models."""
    found = {layer: term for layers in model.terms.values() for layer, term in layers.items()}
    cores = {layer: term for layer, term in found.items() if isinstance(term, InnerCore)}
    return cores if len(cores) == sum(map(len, model.terms.values())) else {}


def is_cores(folder: Path) -> bool:
    """Whether a folder holds such a model."""
    return (folder / RULE).is_file()


def save_cores(
    folder: Path,
    cores: Mapping[str, InnerCore],
    base_name: str,
    head: Mapping[str, Tensor] | None,
    labels: tuple[str, ...] | None,
) -> None:
    """Writes such a folder; raises RunError where the disk refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: _plain(term.core) for name, term in cores.items()}, folder / WEIGHTS, {"format": "pt"})
        if head:
            save_file({name: _plain(value) for name, value in head.items()}, folder / HEAD, {"format": "pt"})
        rule = {"format": 1, "base": base_name, "labels": None if labels is None else list(labels)}
        (folder / RULE).write_text(json.dumps(rule, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise RunError(f"{folder}: the cores cannot be written ({error}); free space, then try again") from error


def load_cores(folder: Path) -> CoreFolder:
    """Reads such a folder; raises ModelError for what is missing, damaged or of another format, in one line."""
    try:
        rule = json.loads((folder / RULE).read_text(encoding="utf-8"))
        if rule["format"] != 1:
            raise ValueError(f"format {rule['format']!r}")
        head = load_file(folder / HEAD) if (folder / HEAD).is_file() else None
        labels = None if rule["labels"] is None else tuple(map(str, rule["labels"]))
        return CoreFolder(load_file(folder / WEIGHTS), head, str(rule["base"]), labels)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{folder / RULE}: cannot be read ({reason}); copy the folder again") from error


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().clone()
