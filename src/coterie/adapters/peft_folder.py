"""PEFT adapter folders out and in: `adapter_config.json` and `adapter_model.safetensors`, head included.

PEFT computes W x + (alpha / r) B (A x) with A (r, d_in), B (d_out, r), for GPT-2's Conv1D too, where only W
is stored the other way round. Layers are named in full, `bert.encoder.layer.0.attention.self.query`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie.errors import ModelError, RunError
from coterie.protocol.terms import Adapter, LowRank

TaskType = Literal["SEQ_CLS", "TOKEN_CLS", "CAUSAL_LM", "SEQ_2_SEQ_LM", "QUESTION_ANS", "FEATURE_EXTRACTION"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
NOTES = "coterie.json"
PREFIX = "base_model.model."
HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""Modules that PEFT itself saves whole, and expects in the folder, by task."""

_UNDERSTOOD = {
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "fan_in_fan_out",
    "modules_to_save",
    "bias",
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "peft_version",
    "inference_mode",
    "auto_mapping",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "lora_dropout",
    "init_lora_weights",
    "eva_config",
    "ensure_weight_tying",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
}
"""What does not change W + s B A once A and B are in the file; any other option that is on is refused."""

_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base weights alone."""


class Tokenizer(Protocol):
    """What can write itself into a folder."""

    def save_pretrained(self, folder: str, /) -> Any: ...


@dataclass(frozen=True)
class PeftFolder:
    """What a folder holds.

    adapter: by full layer name, dtype as stored. head: by parameter name in the network, None when there is
    none. labels: class names in the order of the logits; max_length: tokens after which texts were cut; image_size:
    the side in pixels at which images were shown; all when known. dtype: of the factors, None when they differ.
    config: adapter_config.json as it stands.
    """

    adapter: Adapter
    head: dict[str, Tensor] | None
    base_name: str | None
    task_type: str | None
    labels: tuple[str, ...] | None
    dtype: torch.dtype | None
    config: dict[str, Any]
    max_length: int | None = None
    image_size: int | None = None


def save_peft(
    folder: Path | str,
    adapter: Adapter,
    *,
    base_name: str,
    head: Mapping[str, Tensor] | None,
    task_type: TaskType | None,
    label_names: list[str] | tuple[str, ...] | None = None,
    max_length: int | None = None,
    image_size: int | None = None,
    prefix: str = PREFIX,
    fan_in_fan_out: bool = False,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained(base, folder)` loads, with the same outputs.

    adapter: {full layer name: LowRank of B (d_out, r), A (r, d_in)}; ranks and scales may differ by layer, a
    diagonal is folded into B. head: {parameter name in the network: Tensor}, whole modules. fan_in_fan_out:
    True for a base of Conv1D layers. task_type: None for what PEFT has no type for, such as classes of images.
    label_names, max_length, image_size: noted for `load_peft`. Tensors keep their dtype.

    The folder appears whole or not at all, and replaces only one that this function wrote. Raises ModelError
    for an adapter that PEFT cannot express or a folder of someone else's, RunError when the disk refuses.
    """
    target = Path(folder)
    if not adapter:
        raise ModelError(f"{target}: nothing to export, the adapter has no layer")
    if task_type in HEADS and not head:
        raise ModelError(f"{target}: PEFT expects the head in a {task_type} folder; give it, a frozen one too")
    plain = {name: _plain(name, term) for name, term in adapter.items()}
    config = _config(plain, head, base_name, task_type, fan_in_fan_out)
    tensors = {f"{prefix}{name}.lora_A.weight": plain[name].term.A for name in plain}
    tensors |= {f"{prefix}{name}.lora_B.weight": plain[name].term.B for name in plain}
    tensors |= {f"{prefix}{name}": value for name, value in (head or {}).items()}
    _refuse_foreign(target)
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        stored = {name: _stored(tensor) for name, tensor in tensors.items()}
        save_file(stored, fresh / WEIGHTS, metadata={"format": "pt"})
        (fresh / CONFIG).write_text(_json(config))
        (fresh / "README.md").write_text(_readme(base_name, task_type, plain, label_names))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(fresh))
        files = sorted([NOTES, *(path.name for path in fresh.iterdir())])
        labels = None if label_names is None else list(label_names)
        notes = {"format": 1, "labels": labels, "max_length": max_length, "prefix": prefix, "files": files}
        notes |= {} if image_size is None else {"image_size": image_size}
        (fresh / NOTES).write_text(_json(notes))
        _swap(fresh, target)
    except (OSError, SafetensorError) as error:
        reason = f"cannot be written ({_reason(error)}); what was there is kept"
        raise RunError(f"{target}: the adapter {reason}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def load_peft(folder: Path | str) -> PeftFolder:
    """Reads a LoRA folder, made here or by PEFT itself.

    Raises ModelError for what is missing, damaged, or more than plain LoRA. Understood: r, lora_alpha,
    rank_pattern, alpha_pattern, use_rslora, fan_in_fan_out, modules_to_save, bias="none".
    """
    source = Path(folder)
    config = _read_json(source, CONFIG)
    _refuse_unsupported(source, config)
    notes = _read_json(source, NOTES) if (source / NOTES).is_file() else {}
    prefix = str(notes.get("prefix", PREFIX))
    factors: dict[str, dict[str, Tensor]] = {}
    head: dict[str, Tensor] = {}
    for key, tensor in _read_weights(source).items():
        name = key.removeprefix(prefix)
        found = re.fullmatch(r"(.+)\.lora_([AB])(?:\.default)?\.weight", name)
        if found:
            factors.setdefault(found[1], {})[found[2]] = tensor
        elif "lora_" in name:
            raise ModelError(f"{source}: {key} is no LoRA factor of a linear layer; only these are read")
        elif _is_saved_module(name, config):
            head[re.sub(r"\.modules_to_save\.default\.", ".", name)] = tensor
        else:
            raise ModelError(f"{source}: {key} is neither a LoRA factor nor in modules_to_save; it is not read")
    if not factors:
        raise ModelError(f"{source / WEIGHTS}: holds no LoRA factors; is it an adapter?")
    labels, longest, size = notes.get("labels"), notes.get("max_length"), notes.get("image_size")
    dtypes = {tensor.dtype for pair in factors.values() for tensor in pair.values()}
    return PeftFolder(
        adapter={name: _term(source, name, pair, config) for name, pair in sorted(factors.items())},
        head=head or None,
        base_name=config.get("base_model_name_or_path"),
        task_type=config.get("task_type"),
        labels=tuple(labels) if isinstance(labels, list) else None,
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
        config=config,
        max_length=longest if isinstance(longest, int) else None,
        image_size=size if isinstance(size, int) else None,
    )


@dataclass(frozen=True)
class _Plain:
    """A term as PEFT writes it: no diagonal, rank of one at least, and alpha / rank exactly the scale."""

    term: LowRank
    alpha: float


def _plain(name: str, term: LowRank) -> _Plain:
    if not isinstance(term, LowRank):
        raise ModelError(f"{name}: a {type(term).__name__} is no pair of factors; PEFT folders hold only these")
    if term.A.dim() != 2 or term.B.dim() != 2 or term.B.shape[1] != term.A.shape[0]:
        shapes = f"B {tuple(term.B.shape)} and A {tuple(term.A.shape)}"
        raise ModelError(f"{name}: {shapes} are not (d_out, r) and (r, d_in); export one client at a time")
    scale = float(term.scale)
    if not math.isfinite(scale * term.rank):
        raise ModelError(f"{name}: a scale of {scale} cannot be written as alpha / r; check the training")
    term = term.padded(1)
    B = term.B.double()
    if term.diagonal is not None:
        B = B * term.diagonal.double()
    alpha = alpha_for(scale, term.rank)
    if alpha is None:  # no alpha gives this very scale: B takes up the last bit
        alpha = scale * term.rank
        B = B * (scale / (alpha / term.rank))
    return _Plain(LowRank(B.to(term.B.dtype), term.A, alpha / term.rank), alpha)


def alpha_for(scale: float, rank: int) -> float | None:
    """An alpha whose quotient alpha / rank is exactly `scale` in double precision; None if there is none."""
    guess = scale * rank
    for alpha in (guess, math.nextafter(guess, math.inf), math.nextafter(guess, -math.inf)):
        if alpha / rank == scale:
            return alpha
    return None


def _config(
    plain: Mapping[str, _Plain],
    head: Mapping[str, Tensor] | None,
    base_name: str,
    task_type: str | None,
    fan_in_fan_out: bool,
) -> dict[str, Any]:
    """adapter_config.json: the commonest rank and alpha as defaults, the others by layer."""
    ranks = {name: one.term.rank for name, one in plain.items()}
    alphas = {name: _number(one.alpha) for name, one in plain.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    modules = sorted({_module(name, task_type) for name in head or {}})
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": _pattern(ranks, rank),
        "alpha_pattern": _pattern(alphas, alpha),
        "target_modules": sorted(plain),
        "modules_to_save": modules or None,
        "fan_in_fan_out": fan_in_fan_out,
        "bias": "none",
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }


def _pattern(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """PEFT's table of what differs from the default, by layer.

    Its keys are regular expressions for the end of a name. Plain names nearly always do; where one layer's
    name would match another's, all are listed, escaped and the longest first.
    """
    brief = {name: value for name, value in values.items() if value != default}
    with contextlib.suppress(re.error):
        if all(_pick(brief, default, name) == value for name, value in values.items()):
            return brief
    return {re.escape(name): values[name] for name in sorted(values, key=len, reverse=True)}


def _pick(pattern: Mapping[str, Any] | None, default: Any, name: str) -> Any:
    """What PEFT takes for a layer: the first entry that matches the end of its name, else the default."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return default


def _module(parameter: str, task_type: str | None) -> str:
    """The module to save for a parameter of the head: what PEFT takes as a whole, else the parameter's owner."""
    first = parameter.split(".")[0]
    return first if first in HEADS.get(str(task_type), ()) else parameter.rpartition(".")[0]


def _is_saved_module(name: str, config: Mapping[str, Any]) -> bool:
    saved = [*(config.get("modules_to_save") or []), *HEADS.get(str(config.get("task_type")), ())]
    path = name.rpartition(".")[0].split(".")
    owners = [".".join(path[: end + 1]) for end in range(len(path))]
    return any(owner.endswith(module) for owner in owners for module in saved)


def _term(source: Path, name: str, pair: Mapping[str, Tensor], config: Mapping[str, Any]) -> LowRank:
    if set(pair) != {"A", "B"}:
        raise ModelError(f"{source / WEIGHTS}: {name} has only lora_{min(pair)}; the file is incomplete")
    try:
        rank = _pick(config.get("rank_pattern"), config["r"], name)
        alpha = _pick(config.get("alpha_pattern"), config["lora_alpha"], name)
        scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, re.error) as error:
        reason = f"gives {name} no rank and alpha ({type(error).__name__}: {_reason(error)})"
        raise ModelError(f"{source / CONFIG}: {reason}") from error
    A, B = pair["A"], pair["B"]
    if A.dim() != 2 or B.dim() != 2 or A.shape[0] != rank or B.shape[1] != rank:
        shapes = f"A {tuple(A.shape)} and B {tuple(B.shape)}"
        raise ModelError(f"{source}: {name} has {shapes} where the configuration says rank {rank}")
    return LowRank(B, A, scale)


def _refuse_unsupported(source: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{source / CONFIG}: peft_type {config.get('peft_type')!r} is not read, only LORA")
    if config.get("bias", "none") != "none":
        reason = "trains biases, which are not read; use 'none'"
        raise ModelError(f"{source / CONFIG}: bias={config['bias']!r} {reason}")
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        reason = "changes the base weights too; have PEFT convert it to plain LoRA when saving"
        raise ModelError(f"{source / CONFIG}: init_lora_weights={start!r} {reason}")
    for option, value in config.items():
        if value and option not in _UNDERSTOOD:
            reason = "is more than W + s B A and is not read; merge it into the base, or train plain LoRA"
            raise ModelError(f"{source / CONFIG}: {option}={_short(value)} {reason}")


def _read_json(source: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((source / name).read_text())
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError as error:
        raise ModelError(f"{source}: has no {name}; give the folder of a PEFT adapter") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{source / name}: cannot be read ({_reason(error)})") from error
    return content


def _read_weights(source: Path) -> dict[str, Tensor]:
    path = source / WEIGHTS
    if not path.is_file():
        if (source / "adapter_model.bin").is_file():
            raise ModelError(f"{source}: has adapter_model.bin only, a pickle; save it again as safetensors")
        raise ModelError(f"{source}: has no {WEIGHTS}; give the folder of a PEFT adapter")
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({_reason(error)}); copy the folder again") from error


def _refuse_foreign(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ModelError(f"{target}: is a file; name a folder for the adapter")
    present = {path.name for path in target.iterdir()}
    try:
        own = set(json.loads((target / NOTES).read_text())["files"]) if NOTES in present else set()
    except (OSError, ValueError, KeyError, TypeError):
        own = set()
    if present - own:
        some = ", ".join(sorted(present - own)[:3])
        raise ModelError(f"{target}: holds files of something else ({some}); name another folder")


def _swap(fresh: Path, target: Path) -> None:
    """Puts the new folder in place of an empty, missing or earlier one."""
    if not target.exists() or not any(target.iterdir()):
        if target.exists():
            target.rmdir()
        fresh.rename(target)
        return
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _stored(tensor: Tensor) -> Tensor:
    """A copy of its own on the CPU: safetensors refuses shared storage."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _number(value: float) -> int | float:
    """Whole numbers as such: other readers of the file expect an integer alpha."""
    return int(value) if value.is_integer() else value


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _readme(
    base_name: str, task_type: str | None, plain: Mapping[str, _Plain], labels: list[str] | tuple[str, ...] | None
) -> str:
    ranks = sorted({one.term.rank for one in plain.values()})
    networks = {"SEQ_CLS": "AutoModelForSequenceClassification", "CAUSAL_LM": "AutoModelForCausalLM"}
    network = networks.get(str(task_type), "AutoModelForImageClassification" if labels else "AutoModel")
    count = f", num_labels={len(labels)}" if labels else ""
    named = f"\nClasses, in the order of the logits: {', '.join(labels)}.\n" if labels else ""
    return f"""---
library_name: peft
---

A LoRA adapter of {len(plain)} layers, rank {", ".join(map(str, ranks))}, for `{base_name}`.
{named}
```
from peft import PeftModel
from transformers import {network}

base = {network}.from_pretrained("{base_name}"{count})
model = PeftModel.from_pretrained(base, "path/to/this/folder")
```
"""


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:200]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
