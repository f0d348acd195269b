"""A compressed model on disk: transformers' own files, factors in place of matrices, and `compression.json`.

Such a folder loads by this package: transformers alone has no layers of two factors.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from coterie.compress.factored import FactoredLinear, put, shape
from coterie.errors import ModelError, RunError

CONFIG = "compression.json"
WEIGHTS = "model.safetensors"
_FORMAT = 1
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of numbers as they stand, by their names in a safetensors file."""


@dataclass(frozen=True)
class Notes:
    """What `compression.json` holds. ranks: by layer; shared: layers that have one V, which is stored once.

    figures: what was measured, for people.
    """

    method: str
    ratio: float
    ranks: dict[str, int]
    shared: list[list[str]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)


def is_compressed(folder: str | Path) -> bool:
    """Whether this is the folder of a compressed model."""
    return (Path(folder).expanduser() / CONFIG).is_file()


def read_notes(folder: str | Path) -> Notes:
    """Raises ModelError for a `compression.json` that cannot be read or is of a later format."""
    place = Path(folder).expanduser() / CONFIG
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise ModelError(f"{place} is of a later format; install a newer coterie")
        notes = Notes(**content)
        if not all(isinstance(rank, int) and rank > 0 for rank in notes.ranks.values()):
            raise ValueError("ranks")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{place} is damaged ({error}); compress the model again") from error
    return notes


def check_new(folder: Path) -> None:
    """Leaves nothing behind.

    Raises:
        ModelError: something is there already.
        RunError: no folder of that name can be made there.
    """
    if not folder.name:
        raise ModelError(f"{folder} is where you are; name a new folder")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ModelError(f"{folder} is there already; name a new folder")
        nearest = next(place for place in folder.absolute().parents if place.exists())
        Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=nearest)).rmdir()
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror or error}); name another place") from error


def stored_dtype(name: str) -> torch.dtype:
    """The dtype that most numbers of a model's safetensors files have; where it has none, what its configuration says.

    name: a folder, or a hub name whose files are in the hub's cache; the answer without any hint is float32.
    """
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoConfig

    def path(file: str) -> Path | None:
        place = Path(name).expanduser()
        found = place / file if place.is_dir() else try_to_load_from_cache(name, file)
        return Path(found) if isinstance(found, str | Path) and Path(found).is_file() else None

    index = path(f"{WEIGHTS}.index.json")
    shards = {WEIGHTS} if index is None else set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    counts: Counter[torch.dtype] = Counter()
    for file in filter(None, map(path, sorted(shards))):
        with safe_open(file, framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118
                part = stored.get_slice(key)
                dtype = _FLOATS.get(part.get_dtype())
                if dtype is not None:
                    counts[dtype] += math.prod(part.get_shape())
    if counts:
        return counts.most_common(1)[0][0]
    said = getattr(AutoConfig.from_pretrained(name), "dtype", None)
    return said if isinstance(said, torch.dtype) else torch.float32


def save(folder: Path, network: nn.Module, tokenizer: Any, notes: Notes) -> None:
    """Writes a new folder, by one rename at the end; tied and shared weights are stored once, in their dtype.

    Raises:
        ModelError: a folder that is there already.
        RunError: the disk refuses.
    """
    check_new(folder)
    fresh = folder.with_name(f".{folder.name}.new")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        network.config.architectures = [type(network).__name__]  # type: ignore[union-attr]
        network.config.dtype = next(network.parameters()).dtype
        network.config.save_pretrained(fresh)  # type: ignore[operator, union-attr]
        if getattr(network, "generation_config", None) is not None:
            network.generation_config.save_pretrained(fresh)  # type: ignore[operator, union-attr]
        tokenizer.save_pretrained(str(fresh))
        save_file(_tensors(network), fresh / WEIGHTS, metadata={"format": "pt"})
        (fresh / CONFIG).write_text(json.dumps({"format": _FORMAT, **asdict(notes)}, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        fresh.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{folder}: cannot be written ({reason}); free space, then try again") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def reading(kind: type, notes: Notes) -> type:
    """A class of transformers whose networks have factors of the noted ranks, for its `from_pretrained` to fill."""

    def build(self: Any, config: Any, *rest: Any, **named: Any) -> None:
        kind.__init__(self, config, *rest, **named)  # type: ignore[misc]
        for name, rank in _named_here(self, notes.ranks).items():
            module = self.get_submodule(name)
            put(self, name, FactoredLinear.empty(shape(module), rank, module.bias is not None))

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def finish(network: nn.Module, kind: type, notes: Notes, report: Mapping[str, Any]) -> list[str]:
    """After `from_pretrained` of a class of `reading`: tie what is shared; gives the parameters that no file gave.

    Raises:
        ModelError: factors that are missing in the files, or of another rank than noted.
    """
    network.__class__ = kind
    shared = {}
    for group in notes.shared:
        first, *others = _named_here(network, dict.fromkeys(group, 1))
        for name in others:
            network.get_submodule(name).V = network.get_submodule(first).V
            shared[f"{name}.V"] = first
    names = _named_here(network, notes.ranks)
    odd = [entry if isinstance(entry, str) else entry[0] for entry in report["mismatched_keys"]]
    missing = sorted(name for name in report["missing_keys"] if name not in shared)
    wrong = [name for name in [*odd, *missing] if name.rpartition(".")[0] in names]
    if wrong:
        raise ModelError(f"the compressed weights lack {wrong[0]} of the noted rank; compress the model again")
    return missing


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and stored buffers, each storage once."""
    stored = network.state_dict(keep_vars=True)
    seen: set[int] = set()
    kept: dict[str, Tensor] = {}
    for name, value in stored.items():
        if id(value) not in seen:
            seen.add(id(value))
            kept[name] = value.detach().cpu().contiguous()
    return kept


def _named_here(network: nn.Module, ranks: Mapping[str, int]) -> dict[str, int]:
    """The noted layers by the names that they have in this network, which may hold the model under a prefix or not.

    Raises:
        ModelError: a layer that is not there.
    """
    prefix = f"{getattr(network, 'base_model_prefix', '')}."
    modules = {name for name, _ in network.named_modules()}
    found = {}
    for name, rank in ranks.items():
        choices = (name, prefix + name, name.removeprefix(prefix))
        here = next((choice for choice in choices if choice in modules), None)
        if here is None:
            raise ModelError(f"{type(network).__name__} has no layer {name}, which the folder holds compressed")
        found[here] = rank
    return found
