"""Folders of models of which each input takes its own share of two terms: a PEFT folder for each term, and the rule.

    <folder>/lora/  <folder>/local/ ...   PEFT folders, which PEFT loads one at a time
    <folder>/anchors.safetensors          the features with which an input's are compared
    <folder>/mix.json                     the rule (`coterie.protocol.Mix`), written last

PEFT itself adds adapters in fixed shares only; the mixture is read by `coterie.load`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from coterie.adapters.peft_folder import PeftFolder, load_peft
from coterie.errors import ModelError, RunError
from coterie.protocol import Adapter, Mix, Model

RULE = "mix.json"
ANCHORS = "anchors.safetensors"


@dataclass(frozen=True)
class MixtureFolder:
    """What a folder holds: the terms by their names in the model, and how inputs share them."""

    parts: dict[str, PeftFolder]
    mix: Mix

    @property
    def model(self) -> Model:
        """The model as it was saved."""
        return Model(mix=self.mix, **{name: part.adapter for name, part in self.parts.items()})  # type: ignore[arg-type]


def is_mixture(folder: Path) -> bool:
    """Whether a folder holds such a model."""
    return (folder / RULE).is_file()


def save_mixture(folder: Path, parts: Mapping[str, Adapter], mix: Mix, save: Callable[[Path, Adapter], None]) -> None:
    """Writes the terms by `save` (a PEFT folder each), then the rule, without which the folder is no mixture.

    Raises:
        RunError: the disk refuses.
        ModelError: as `save` does.
    """
    for name, adapter in parts.items():
        save(folder / name, adapter)
    rule = {"format": 1, "terms": list(parts), "weight": float(mix.weight)}
    rule |= {"near": mix.near, "far": mix.far, "by": mix.by}
    try:
        save_file({"anchors": mix.anchors.detach().cpu().contiguous()}, folder / ANCHORS, metadata={"format": "pt"})
        (folder / RULE).write_text(json.dumps(rule, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise RunError(f"{folder}: the mixture cannot be written ({error}); free space, then try again") from error


def load_mixture(folder: Path) -> MixtureFolder:
    """Reads such a folder.

    Raises:
        ModelError: what is missing, damaged or of another format, in one line.
    """
    try:
        rule = json.loads((folder / RULE).read_text(encoding="utf-8"))
        anchors = load_file(folder / ANCHORS)["anchors"]
        if rule["format"] != 1 or anchors.dim() != 2:
            raise ValueError(f"format {rule['format']!r}, anchors {tuple(anchors.shape)}")
        mix = Mix(anchors, float(rule["weight"]), rule["near"], rule["far"], rule["by"])
        terms = [str(name) for name in rule["terms"]]
        missing = set(mix.names) - set(terms)
        if missing:
            raise ValueError(f"it speaks of {min(missing)!r}, which is not among its terms")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{folder / RULE}: cannot be read ({reason}); copy the folder again") from error
    return MixtureFolder({name: load_peft(folder / name) for name in terms}, mix)
