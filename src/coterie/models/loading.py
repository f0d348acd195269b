"""Base models: a frozen network with slots for adapters and heads, loaded once and shared by all clients."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coterie.adapters.frozen import fuse
from coterie.adapters.inject import Slots, inject
from coterie.adapters.packed import pack
from coterie.compress.factored import FactoredLinear
from coterie.compress.folder import finish, is_compressed, read_notes, reading
from coterie.errors import ModelError
from coterie.maths.keys import Key, root_key
from coterie.models.hub import require_reachable
from coterie.models.language import additive, is_language_network, takes_branches
from coterie.models.patches import Patches
from coterie.models.quantisation import Quantization, keep_trainable, quantised_options
from coterie.models.seeing import Seeing, is_seeing, read_companion, sight_of
from coterie.models.targets import Targets, head_layers, in_head, output_layer, select_layers
from coterie.models.vision import Vision, read_settings, vision_of
from coterie.models.weights import PLAIN_DTYPES, cast, digest, draw, plain_weight
from coterie.protocol import BaseLog, Layer
from coterie.protocol.base_log import layers_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class Base:
    """A frozen network in eval mode (its own dropout stays off), wrapped so that terms and heads can be bound.

    layers: the adaptable layers by name, shapes (d_out, d_in). head: the initial head, float32 on the CPU, by
    parameter name; empty for a language model. slots: where terms and heads are bound. digest: a hash of the base's
    weights as loaded, the head apart. inputs: the names that the network's forward takes. vision: what images it takes;
    None of a model of texts. branches: whether `Branches` of questions suit it. packs: whether passes compute no
    padding. Only `set_log` and `prepare` change a Base.
    """

    network: nn.Module
    tokenizer: Any
    layers: dict[str, Layer]
    head: dict[str, Tensor]
    digest: str
    slots: Slots
    inputs: frozenset[str]
    vision: Vision | None = None
    branches: bool = False
    packs: bool = False
    patches: Patches = field(default_factory=Patches)

    @property
    def is_language(self) -> bool:
        """Whether this is a language model, which predicts tokens and has no head."""
        return self.slots.output is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the network computes: that of its plain frozen weights."""
        return self._witness.dtype

    @property
    def device(self) -> torch.device:
        """Where the network lies."""
        return self._witness.device

    @property
    def width(self) -> int:
        """The size of its features: of what enters the head's last linear layer, or the output layer."""
        if self.slots.heads:
            return next(reversed(self.slots.heads.values())).base.in_features
        assert self.slots.output is not None
        return int(self.slots.output.weight.shape[-1])

    @property
    def _witness(self) -> Tensor:
        """A weight that is never quantised: the last head layer's, or a language model's embeddings."""
        if self.slots.heads:
            return next(reversed(self.slots.heads.values())).base.weight
        weight = self.network.get_input_embeddings().weight  # type: ignore[operator]
        assert isinstance(weight, Tensor)
        return weight

    @property
    def quantised(self) -> list[str]:
        """The adapted layers that hold no numbers as they stand: they take no patch and give no weights."""
        return [
            name
            for name, slot in self.slots.layers.items()
            if plain_weight(slot.base) is None and not isinstance(slot.base, FactoredLinear)
        ]

    @property
    def factored(self) -> list[str]:
        """The adapted layers that hold two factors: they take no patch, and `weight` gives the factors."""
        return [name for name, slot in self.slots.layers.items() if isinstance(slot.base, FactoredLinear)]

    @property
    def version(self) -> int:
        """How many patches the weights hold."""
        return self.patches.log.version

    def weight(self, name: str) -> Tensor | tuple[Tensor, Tensor]:
        """W of an adapted layer, (d_out, d_in), patches included; U (d_out, k) and V (k, d_in) of a factored one.

        Copies on the CPU, float32 or float64.

        Raises:
            ModelError: no adapted layer of that name, or one that is quantised.
        """
        if name not in self.layers:
            raise ModelError(f"{name!r} is no adapted layer of this base")
        linear = self.slots.layers[name].base
        if isinstance(linear, FactoredLinear):
            return _copied(linear.U), _copied(linear.V)
        stored = self.patches.current.get(name)
        return _copied(self._plain(name, "weights") if stored is None else stored)

    def set_log(self, log: BaseLog) -> None:
        """Make the weights W_0 + the patches of `log`, in order; the same bits by whatever path one gets there.

        Raises:
            ModelError: a patch for a layer that is not adapted here, is quantised or factored, or has another shape;
                nothing has changed then.
        """
        for name in {name for patch in log.patches for name in layers_of(patch) if name in self.layers}:
            self._plain(name, "merge")
        changed = self.patches.move_to(log, lambda name: self._plain(name, "merge"), self.layers)
        for name, value in changed.items():
            self._plain(name, "merge").data.copy_(value)
        if changed:
            fuse(self.network)

    def prepare(self, dtype: str, attention: str, device: str = "cpu") -> None:
        """Cast the frozen weights, choose the attention, move to the device; nothing happens where all is so already.

        Layers that are quantised keep their own dtypes.

        Raises:
            ModelError: weights would have to be widened from bfloat16 (load the base again), the model does not
                know this attention, or the device cannot be used.
        """
        wanted = DTYPES[dtype]
        if wanted != self.dtype:
            if self.dtype == torch.bfloat16:
                raise ModelError(f"the base was loaded in bfloat16; load it again to run in {dtype}")
            log = self.patches.log
            self.set_log(BaseLog())
            cast(self.network, wanted)
            self.patches = Patches()
            self.set_log(log)
        if not _is_there(self.device, device):
            try:
                self.network.to(device)
            except (RuntimeError, AssertionError, ValueError) as error:
                raise ModelError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
        _set_attention(self.network, attention)
        fuse(self.network)

    def _plain(self, name: str, purpose: Literal["weights", "merge"]) -> Tensor:
        """A view (d_out, d_in) of a layer's matrix; a quantised layer's is never formed."""
        linear = self.slots.layers[name].base
        plain = plain_weight(linear)
        if plain is not None:
            return plain
        if isinstance(linear, FactoredLinear):
            raise ModelError(
                f"never merge into a compressed base: layer {name} holds factors of rank {linear.inner}; train cores "
                "or adapters on it, or take the model that it was compressed from"
            )
        what = f"layer {name} is a {type(linear).__name__}, which holds no plain matrix"
        if purpose == "merge":
            raise ModelError(f"never merge into a quantised base: {what}; export the adapter instead")
        raise ModelError(f"a quantised base gives no weights: {what}; load the base unquantised for this method")


def load_base(
    name_or_path: str | Path,
    *,
    targets: Targets,
    num_labels: int,
    attention: str = "eager",
    dtype: str = "float32",
    head_key: Key,
    quantization: Quantization | None = None,
) -> Base:
    """A classification model and its tokeniser from a folder, or from the hub where it can be reached.

    Args:
        name_or_path: a folder in the transformers format, or a hub name.
        targets: see `select_layers`.
        num_labels: classes of the head, which is drawn from `head_key` whatever the checkpoint holds.
        attention: "eager" or "sdpa".
        dtype: "float32", "bfloat16" or "float64", of the frozen weights.
        quantization: see `quantised_options`; the head is never quantised.

    Raises:
        ModelError: no such folder or name, files that do not load, targets that match nothing, a tokeniser that has
            neither a padding nor an end token, quantisation without its library.
    """
    from transformers import AutoModelForSequenceClassification

    options = {"num_labels": num_labels} | quantised_options(quantization, dtype)
    network, tokenizer, missing = load_network(
        AutoModelForSequenceClassification, str(name_or_path), attention, dtype, **options
    )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"the tokeniser of {str(name_or_path)!r} has no padding token; name one in its folder")
        tokenizer.pad_token = tokenizer.eos_token
    return from_network(network, tokenizer, targets, head_key, attention=attention, missing=missing)


def load_language_base(
    name_or_path: str | Path,
    *,
    targets: Targets,
    attention: str = "eager",
    dtype: str = "float32",
    quantization: Quantization | None = None,
) -> Base:
    """A causal language model and its tokeniser, from where `load_base` finds classification models.

    A tokeniser without a padding token stays so: padded places are known by their mask alone. quantization: see
    `quantised_options`.

    Raises:
        ModelError: as `load_base`, or a model that is no causal language model.
    """
    from transformers import AutoModelForCausalLM

    options = quantised_options(quantization, dtype)
    network, tokenizer, missing = load_network(AutoModelForCausalLM, str(name_or_path), attention, dtype, **options)
    output = output_layer(network)
    if output is not None and any(name.startswith(f"{output}.") for name in missing):
        raise ModelError(f"{str(name_or_path)!r} is no language model: it has no weights of an output layer")
    return from_language_network(network, tokenizer, targets, attention=attention, missing=missing)


def from_network(
    network: nn.Module,
    tokenizer: Any,
    targets: Targets,
    head_key: Key,
    *,
    attention: str | None = None,
    missing: Sequence[str] = (),
) -> Base:
    """A Base around any classification network, which is frozen, put in eval mode and wrapped in place.

    missing: base parameters that no checkpoint gave; they are drawn anew from a fixed key, since transformers
    drew them from torch's global generator.

    Raises:
        ModelError: targets that match nothing, or no head (`classifier`, `score`, …).
    """
    std = _frozen(network, tokenizer, attention, missing)
    layers = select_layers(network, targets)
    heads = head_layers(network)
    if not heads:
        raise ModelError(f"{type(network).__name__} has no classification head that is known here")
    _unquantised(network, heads)
    hashed = digest(network)
    names = [name for name, _ in network.named_parameters() if name.rpartition(".")[0] in set(heads)]
    draw(network, names, head_key, std)
    parameters = dict(network.named_parameters())
    head = {name: parameters[name].detach().to("cpu", torch.float32, copy=True) for name in names}
    slots = inject(network, layers, heads)
    return Base(network, tokenizer, layers, head, hashed, slots, _inputs(network), packs=pack(network, slots))


def from_language_network(
    network: nn.Module,
    tokenizer: Any,
    targets: Targets,
    *,
    attention: str | None = None,
    missing: Sequence[str] = (),
) -> Base:
    """A Base without a head around any causal language model; see `from_network`.

    Raises:
        ModelError: targets that match nothing, no output layer, or predictions that look at later tokens.
    """
    _frozen(network, tokenizer, attention, missing)
    layers = select_layers(network, targets)
    output = output_layer(network)
    if output is None or not is_language_network(network):
        raise ModelError(f"{type(network).__name__} is no causal language model; choose a decoder, such as smollm2")
    hashed, branches = digest(network), takes_branches(network)
    slots = inject(network, layers, (), output)
    return Base(network, tokenizer, layers, {}, hashed, slots, _inputs(network), branches=branches)


def load_whole(name_or_path: str | Path, dtype: str = "float32") -> tuple[nn.Module, Any]:
    """A network of the class that its configuration names, frozen and in eval mode, without slots; its tokeniser.

    What a compressor takes: a causal language model, an encoder, or a classifier with its head. Of a model of images,
    what it says of these (`Vision`) stands for the tokeniser, of a language model that sees, both (`Seeing`).

    Raises:
        ModelError: as `load_base`, weights that no file gives, or images in a form that is not known here.
    """
    import transformers

    name = str(name_or_path)
    require_reachable(name)
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # as in `load_network`
        raise ModelError(_cannot_load(name, error)) from error
    named = (getattr(config, "architectures", None) or ["AutoModel"])[0]
    kind = getattr(transformers, named, transformers.AutoModel)
    sees = getattr(kind, "main_input_name", "input_ids") == "pixel_values"
    reads = is_seeing(config) and not sees
    read = read_settings if sees else read_companion if reads else None
    network, tokenizer, missing = load_network(kind, name, "eager", dtype, read)
    if sees:
        tokenizer = vision_of(network, tokenizer, None, name)
    elif reads:
        words, settings = tokenizer
        tokenizer = Seeing(words, sight_of(network, settings, name))
    # An encoder's checkpoint may lack a pooler, which nothing here asks for.
    lacking = [parameter for parameter in missing if not parameter.startswith("pooler.")]
    if lacking:
        raise ModelError(f"{name!r} is no whole model: its files give no {lacking[0]}")
    return network.eval().requires_grad_(False), tokenizer


def load_network(
    auto: Any, name: str, attention: str, dtype: str, read: Callable[[str], Any] | None = None, **options: Any
) -> tuple[nn.Module, Any, list[str]]:
    """The network as transformers' class `auto` gives it, its tokeniser, and which parameters no file gave.

    read: gives what else is read of that name in place of the tokeniser.

    Raises:
        ModelError: as `load_base`.
    """
    from transformers import AutoTokenizer

    companion = AutoTokenizer.from_pretrained if read is None else read
    require_reachable(name)
    if is_compressed(name):
        return _load_compressed(auto, name, attention, dtype, companion, **options)
    with _quiet(), torch.random.fork_rng(devices=[]):
        try:
            tokenizer = companion(name)
            network, report = auto.from_pretrained(
                name,
                attn_implementation=attention,
                dtype=DTYPES[dtype],
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
        except Exception as error:  # transformers raises many kinds; a user needs the one line
            raise ModelError(_cannot_load(name, error)) from error
    keep_trainable(network)
    _require_shapes(name, report)
    return network, tokenizer, sorted(report["missing_keys"])


def _require_shapes(name: str, report: Mapping[str, Any]) -> None:
    """Raises ModelError where files and configuration differ in a shape, but for the head's, which is drawn anew."""
    odd = sorted((key, tuple(held), tuple(built)) for key, held, built in report["mismatched_keys"])
    for key, held, built in odd:
        if not in_head(key):
            raise ModelError(
                f"{name!r} is damaged: its files give {key} the shape {held}, its configuration {built}; copy it again"
            )


def _load_compressed(
    auto: Any, name: str, attention: str, dtype: str, companion: Callable[[str], Any], **options: Any
) -> tuple[nn.Module, Any, list[str]]:
    """As `load_network`, of a folder that `coterie compress` wrote."""
    from transformers import AutoConfig

    if "quantization_config" in options:
        raise ModelError(f"{name!r} is compressed: its factors are not quantised as well; leave model.quantization out")
    notes = read_notes(name)
    with _quiet(), torch.random.fork_rng(devices=[]):
        try:
            tokenizer = companion(name)
            settings = AutoConfig.from_pretrained(name)
            kind = auto._model_mapping[type(settings)] if hasattr(auto, "_model_mapping") else auto
            network, report = reading(kind, notes).from_pretrained(  # type: ignore[attr-defined]
                name,
                attn_implementation=attention,
                dtype=DTYPES[dtype],
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
            missing = finish(network, kind, notes, report)
        except Exception as error:  # as in `load_network`
            raise ModelError(_cannot_load(name, error)) from error
    _require_shapes(name, report)
    return network, tokenizer, missing


def _frozen(network: nn.Module, tokenizer: Any, attention: str | None, missing: Sequence[str]) -> float:
    """Prepare a network in place; returns the standard deviation for parameters that are drawn."""
    network.eval().requires_grad_(False)
    config = getattr(network, "config", None)
    if config is not None and tokenizer is not None and tokenizer.pad_token_id is not None:
        # Classifying decoders look for the last token that is no padding.
        config.pad_token_id = tokenizer.pad_token_id
    parts: list[Any] = [config, getattr(config, "text_config", None)]
    for part in parts:
        if hasattr(part, "use_cache"):
            part.use_cache = False
    if attention is not None:
        _set_attention(network, attention)
    std = float(getattr(config, "initializer_range", None) or 0.02)
    draw(network, [name for name in missing if not in_head(name)], root_key(0).fold("missing"), std)
    return std


def _unquantised(network: nn.Module, heads: Sequence[str]) -> None:
    """Put plain layers in the place of quantised ones of the head, which is drawn anew and trained."""
    for name in heads:
        linear = network.get_submodule(name)
        if plain_weight(linear) is None:
            assert isinstance(linear, nn.Linear)
            like = next(value for value in network.parameters() if value.dtype in PLAIN_DTYPES)
            fresh = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
            parent, _, child = name.rpartition(".")
            setattr(network.get_submodule(parent), child, fresh.to(like.device, like.dtype).requires_grad_(False))


def _copied(value: Tensor) -> Tensor:
    """A copy on the CPU in float32, or float64 where it is that."""
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    return value.detach().to("cpu", wide, copy=True)


def _inputs(network: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(network.forward).parameters)


def _set_attention(network: nn.Module, attention: str) -> None:
    config = getattr(network, "config", None)
    if config is None or getattr(config, "_attn_implementation", attention) == attention:
        return
    try:
        network.set_attn_implementation(attention)  # type: ignore[operator]
    except (AttributeError, ValueError, ImportError) as error:
        raise ModelError(f"{type(network).__name__} has no {attention!r} attention; choose another") from error


def _is_there(here: torch.device, wanted: str) -> bool:
    """Whether `wanted` names the device `here`; "cuda" names any of its kind."""
    return wanted in (str(here), here.type)


def _cannot_load(name: str, error: Exception) -> str:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if Path(name).is_dir():
        return f"the model folder {name!r} does not load: {reason}"
    return f"there is no model folder {name!r}, and no model of that name could be fetched from the hub: {reason}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' notes on fresh heads and its progress bars: both are meant here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def moved(value: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device; to a GPU out of pinned memory, so that nothing waits for what is queued there."""
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=device.type == "cuda")


def inputs_of(base: Base, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a batch that the network's forward takes, labels apart, on its device; floats in its dtype."""
    given = {n: moved(value, base.device) for n, value in batch.items() if n in base.inputs and n != "labels"}
    if "pixel_values" in given:
        given["pixel_values"] = given["pixel_values"].to(base.dtype)
    mask = given.get("attention_mask")
    if mask is not None and mask.dim() == 4:
        given["attention_mask"] = additive(mask, base.network)
    return given
