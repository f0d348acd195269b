"""From a folder to a Predictor: a run, a PEFT adapter of anybody's, or a whole model with the adapter merged in."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from coterie.adapters import peft_folder
from coterie.adapters.core_folder import is_cores, load_cores
from coterie.adapters.mixture_folder import is_mixture, load_mixture
from coterie.adapters.peft_folder import PeftFolder, load_peft
from coterie.adapters.routed_folder import is_routed, load_routed
from coterie.assets import ASSETS, fetch
from coterie.errors import CoterieError, ModelError, RunError, nearest
from coterie.experiments import folders
from coterie.experiments.config import Config
from coterie.experiments.exports import adapter_folder
from coterie.maths.keys import root_key
from coterie.models.hub import require_reachable
from coterie.models.image_bases import load_image_base, load_seeing_language_base
from coterie.models.loading import DTYPES, Base, load_base, load_language_base
from coterie.models.seeing import is_seeing
from coterie.protocol import InnerCore, Model
from coterie.serve.predictor import Predictor
from coterie.serve.rows import Form, form_of
from coterie.training.evaluation import check_model

_CONTEXT = 512
"""The longest text where neither the tokeniser nor the model's configuration says one."""

_UNSAID = 10**6
"""Tokenisers without a longest text say a number far above this."""


@dataclass(frozen=True)
class Found:
    """A result on disk. place: the folder of the adapter, or of the whole model (`whole`); form, max_length: of the
    run that it comes from, where that is known."""

    place: Path
    whole: bool
    form: Form = field(default_factory=Form)
    max_length: int | None = None


def load(
    folder: str | Path,
    base: str | Path | None = None,
    device: str = "cpu",
    dtype: str | torch.dtype | None = None,
    *,
    client: str | None = None,
) -> Predictor:
    """A trained model, ready to answer, out of a folder of any kind that a federation, an export or PEFT leaves.

    Args:
        folder: a finished run, of which the model of all clients is taken, or that of `client`; an adapter in PEFT's
            format, for classes or for a language model; or a whole model (`coterie export … --merged`).
        base: the base model under an adapter: a folder, an asset's name or a hub name. By default the one that the
            adapter's own configuration names.
        device: as torch names it.
        dtype: float32 (the default), bfloat16 or float64, of the frozen weights.
        client: the id of a client of the run.

    Texts are cut where the run cut them; where nothing says that, at what tokeniser and base allow. The adapter is not
    merged, so that the answers are those which were measured; but a base that the run quantised is loaded as it is.
    peft need not be installed.

    Raises:
        ConfigError: no such folder, a run that is not finished, or no such client in it.
        ModelError: a base that is not at hand or does not fit, files that are damaged, or more than these kinds.
    """
    return open_found(find(folder, client), base, device, dtype)


def find(folder: str | Path, client: str | None = None) -> Found:
    """What there is in a folder, without loading it; raises as `load`."""
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise ModelError(f"there is no folder {place}; give that of a run, an adapter or a model")
    adapted = (place / peft_folder.CONFIG).is_file() or is_mixture(place) or is_routed(place) or is_cores(place)
    if (place / folders.CONFIG).is_file() and not adapted:
        config, _ = folders.read_config(place)
        return _of_run(adapter_folder(place, client), place, config)
    if client is not None:
        raise ModelError(f"{place} is no run, so there is no client {client!r} in it; leave the client out")
    if adapted:
        run = place.absolute().parent.parent
        with contextlib.suppress(CoterieError):  # an adapter may lie anywhere
            if place.absolute().parent.name == folders.ADAPTERS:
                return _of_run(place, run, folders.read_config(run)[0])
        return Found(place, whole=False)
    if (place / "config.json").is_file():
        return Found(place, whole=True)
    runs = sorted(path.parent.name for path in place.glob(f"*/{folders.CONFIG}"))
    way = f"; choose one of the runs in it: {', '.join(runs[:6])}" if runs else "; give that of one of these"
    raise ModelError(f"{place} holds no run, no adapter and no model{way}")


def open_found(
    found: Found, base: str | Path | None = None, device: str = "cpu", dtype: str | torch.dtype | None = None
) -> Predictor:
    """The Predictor of what was found; raises as `load`."""
    precision = _precision(dtype)
    if found.whole:
        if base is not None:
            raise ModelError(f"{found.place} is a whole model with its base merged in; leave the base out")
        loaded, model, head, labels, noted = _whole(found.place, precision)
    else:
        loaded, model, head, labels, noted = _adapted(found.place, base, precision)
    loaded.prepare(precision, "eager", device)
    if loaded.is_language:
        _answer_greedily(loaded)
    context = _context(loaded)
    return Predictor(loaded, model, head, labels, min(found.max_length or noted or context, context), context)


Parts = tuple[Base, Model, dict[str, Tensor] | None, tuple[str, ...], int | None]
"""A base, what is added to it, the head and the classes' names (a language model has neither), the longest text."""


def _of_run(place: Path, run: Path, config: Config) -> Found:
    try:
        classes = json.loads((run / folders.PARTITION).read_text(encoding="utf-8"))["classes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{run / folders.PARTITION}: cannot be read; play the run again") from error
    return Found(place, False, form_of(config.task, classes), config.model.max_length)


def _adapted(place: Path, base: str | Path | None, dtype: str) -> Parts:
    """An adapter on its base, or several that inputs share, or cores inside a compressed base."""
    if is_cores(place):
        return _with_cores(place, base, dtype)
    several = load_mixture(place) if is_mixture(place) else load_routed(place) if is_routed(place) else None
    held = load_peft(place) if several is None else next(iter(several.parts.values()))
    model = Model(lora=held.adapter) if several is None else several.model
    layers = sorted({layer for terms in model.terms.values() for layer in terms})
    pictured = held.task_type is None and held.image_size is not None
    kind = held.task_type or ("SEQ_CLS" if held.head else "CAUSAL_LM")
    if kind not in ("SEQ_CLS", "CAUSAL_LM"):
        raise ModelError(f"{place}: an adapter for {kind} is not served, only SEQ_CLS and CAUSAL_LM")
    if (kind == "SEQ_CLS") != bool(held.head):
        more = "no head, so that it has no classes" if kind == "SEQ_CLS" else "layers trained whole, which are not read"
        raise ModelError(f"{place}: an adapter for {kind} with {more}; have PEFT merge it and give that folder")
    named = _base_name(place, held, base)
    try:
        if kind == "CAUSAL_LM":
            loaded = _language(named, layers, dtype)
        elif pictured:
            loaded = _of_images(named, layers, _classes(held), held.image_size, dtype)
        else:
            loaded = _classifier(named, layers, _classes(held), dtype)
        check_model(loaded, model, "the adapter")
        _check_head(loaded, held.head or {})
    except ModelError as error:
        raise ModelError(f"{place} on the base {named}: {error}") from error
    return loaded, model, held.head, _labels(loaded, held.labels), held.max_length


def _with_cores(place: Path, base: str | Path | None, dtype: str) -> Parts:
    """Cores inside a compressed base."""
    held = load_cores(place)
    named = held.base_name if base is None else str(base)
    layers = sorted(held.cores)
    model = Model(core={layer: InnerCore(core) for layer, core in held.cores.items()})
    try:
        if held.labels is None:
            loaded = _language(named, layers, dtype)
        else:
            loaded = _classifier(named, layers, len(held.labels), dtype)
        check_model(loaded, model, "the cores")
        _check_head(loaded, held.head or {})
    except ModelError as error:
        raise ModelError(f"{place} on the base {named}: {error}") from error
    return loaded, model, held.head, _labels(loaded, held.labels), None


def _whole(place: Path, dtype: str) -> Parts:
    """A model with everything in it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(place)
    except Exception as error:  # transformers raises many kinds; a user needs the one line
        raise ModelError(f"{place / 'config.json'}: cannot be read ({str(error).splitlines()[0]})") from error
    kind = (getattr(config, "architectures", None) or ["model of no architecture"])[0]
    if kind.endswith("ForSequenceClassification"):
        loaded = _classifier(str(place), "all-linear", len(config.id2label), dtype)
        head = _stored(place, loaded.slots.head_names)
        _check_head(loaded, head)
        return loaded, Model(), head, _labels(loaded, None), None
    if kind.endswith("ForImageClassification"):
        loaded = _of_images(str(place), "all-linear", len(config.id2label), None, dtype)
        head = _stored(place, loaded.slots.head_names)
        _check_head(loaded, head)
        return loaded, Model(), head, _labels(loaded, None), None
    if not kind.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        raise ModelError(f"{place}: a {kind} is not served; only classifiers and causal language models")
    return _language(str(place), "all-linear", dtype), Model(), None, (), None


def _language(name: str, targets: str | list[str], dtype: str) -> Base:
    opening = load_seeing_language_base if _sees(name) else load_language_base
    return opening(name, targets=targets, dtype=dtype)


def _classifier(name: str, targets: str | list[str], classes: int, dtype: str) -> Base:
    # The head is drawn, but never used: an adapter and a whole model bring their own.
    return load_base(name, targets=targets, num_labels=classes, dtype=dtype, head_key=root_key(0))


def _of_images(name: str, targets: str | list[str], classes: int, size: int | None, dtype: str) -> Base:
    return load_image_base(
        name, targets=targets, num_labels=classes, image_size=size, dtype=dtype, head_key=root_key(0)
    )


def _sees(name: str) -> bool:
    """Whether this is a language model that is shown images."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
    except Exception:  # whoever loads it says what is wrong
        return False
    return is_seeing(config)


def _base_name(place: Path, held: PeftFolder, base: str | Path | None) -> str:
    """Where the base is: as given, or as the adapter says; an asset by its name, or by its folder on any machine.

    Raises:
        ModelError: it is not on this machine, and no hub can be asked.
    """
    way = "give it as base=… (on the command line --base): a folder, an asset's name (coterie assets) or a hub name"
    named = str(base) if base is not None else held.base_name
    if not named:
        raise ModelError(f"{place} does not say which base model it is for; {way}")
    if Path(named).expanduser().is_dir():
        return str(Path(named).expanduser())
    asset = next((name for name, asset in ASSETS.items() if Path(named).name in (name, asset.key)), None)
    if asset is not None:
        return str(fetch(asset))
    try:
        require_reachable(named)
    except ModelError as error:
        if base is not None:
            raise
        raise ModelError(f"{place}: its base model {named!r} is not on this machine; {way}") from error
    return named


def _classes(held: PeftFolder) -> int:
    """How many classes the head has: the rows of its last matrix, which no other matrix takes as input."""
    if held.labels:
        return len(held.labels)
    matrices = [value.shape for value in (held.head or {}).values() if value.dim() == 2]
    taken = {columns for _, columns in matrices}
    return next((rows for rows, _ in matrices if rows not in taken), matrices[0][0] if matrices else 2)


def _labels(base: Base, named: tuple[str, ...] | None) -> tuple[str, ...]:
    """The classes' names: the folder's, or the configuration's, which is LABEL_0 … where nobody named them."""
    if base.is_language:
        return ()
    config: Any = base.network.config
    return named or tuple(str(config.id2label[place]) for place in range(len(config.id2label)))


def _check_head(base: Base, head: Mapping[str, Tensor]) -> None:
    """Raises ModelError when the head has other parameters, or other shapes, than that of the base."""
    for name in sorted(set(head) ^ set(base.head)):
        side = "the head" if name in head else "the base"
        raise ModelError(f"the head is of another kind of model: {name} is in {side} alone")
    for name, value in head.items():
        if value.shape != base.head[name].shape:
            shapes = f"{tuple(value.shape)}, not {tuple(base.head[name].shape)}"
            raise ModelError(f"the head does not fit: {name} is {shapes}")


def _stored(place: Path, names: set[str]) -> dict[str, Tensor]:
    """The named parameters out of a model folder's safetensors files; names that are in none are left out."""
    found = {}
    for path in sorted(place.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in names & set(file.keys()):
                    found[name] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: cannot be read ({error}); copy the folder again") from error
    return found


def _context(base: Base) -> int:
    """The most tokens that a base can see: what its tokeniser and its table of positions allow."""
    config: Any = base.network.config
    if base.vision is not None and not base.is_language:
        return base.vision.tokens
    config = getattr(config, "text_config", config)
    said = [base.tokenizer.model_max_length, getattr(config, "max_position_embeddings", None)]
    for name, module in base.network.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            # RoBERTa and its kin number positions from behind the padding token's.
            said.append(module.num_embeddings - module.padding_idx - 1)
    return min((int(number) for number in said if number and number < _UNSAID), default=_CONTEXT)


def _answer_greedily(base: Base) -> None:
    """Replace what the checkpoint recommends for generation, sampling above all, by the likeliest token each time."""
    from transformers import GenerationConfig

    network: Any = base.network
    recommended = network.generation_config.eos_token_id
    ends = {*(recommended if isinstance(recommended, list) else [recommended]), base.tokenizer.eos_token_id} - {None}
    network.generation_config = GenerationConfig(
        do_sample=False, use_cache=True, eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=None)
    )


def _precision(dtype: str | torch.dtype | None) -> str:
    named = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    if named not in DTYPES:
        raise ModelError(f"there is no dtype {named!r}{nearest(named, DTYPES)}")
    return named
