"""Base models: a frozen network with slots for adapters and heads, loaded once and shared by all clients."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.adapters.inject import Slots, inject
from coterie.errors import ModelError
from coterie.maths.keys import Key, root_key
from coterie.models.patches import Patches
from coterie.models.targets import Targets, head_layers, in_head, is_conv1d, select_layers
from coterie.protocol import BaseLog, Layer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class Base:
    """A frozen network in eval mode (its own dropout stays off), wrapped so that terms and heads can be bound.

    layers: the adaptable layers by name, shapes (d_out, d_in). head: the initial head, float32 on the CPU, by
    parameter name. slots: where terms and heads are bound. digest: a hash of the base's weights as loaded, the
    head apart. inputs: the names that the network's forward takes. Only `set_log` and `prepare` change a Base.
    """

    network: nn.Module
    tokenizer: Any
    layers: dict[str, Layer]
    head: dict[str, Tensor]
    digest: str
    slots: Slots
    inputs: frozenset[str]
    patches: Patches = field(default_factory=Patches)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the frozen weights."""
        return self._witness.dtype

    @property
    def device(self) -> torch.device:
        """Where the network lies."""
        return self._witness.device

    @property
    def _witness(self) -> Tensor:
        """A weight that is never quantised: the last head layer's."""
        return next(reversed(self.slots.heads.values())).base.weight

    @property
    def version(self) -> int:
        """How many patches the weights hold."""
        return self.patches.log.version

    def weight(self, name: str) -> Tensor:
        """W of an adapted layer, (d_out, d_in), patches included; a copy on the CPU, float32 or float64.

        Raises:
            ModelError: no adapted layer of that name.
        """
        if name not in self.layers:
            raise ModelError(f"{name!r} is no adapted layer of this base")
        stored = self.patches.current.get(name)
        value = _oriented(self._linear(name)) if stored is None else stored
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        return value.detach().to("cpu", wide, copy=True)

    def set_log(self, log: BaseLog) -> None:
        """Make the weights W_0 + the patches of `log`, in order; the same bits by whatever path one gets there.

        Raises:
            ModelError: a patch for a layer that is not adapted here, or of another shape.
        """
        changed = self.patches.move_to(log, lambda name: _oriented(self._linear(name)), self.layers)
        for name, value in changed.items():
            _oriented(self._linear(name)).data.copy_(value)

    def prepare(self, dtype: str, attention: str, device: str = "cpu") -> None:
        """Cast the frozen weights, choose the attention, move to the device; nothing happens where all is so already.

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
            _cast(self.network, wanted)
            self.patches = Patches()
            self.set_log(log)
        if device != str(self.device):
            try:
                self.network.to(device)
            except (RuntimeError, AssertionError) as error:
                raise ModelError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
        _set_attention(self.network, attention)

    def _linear(self, name: str) -> nn.Module:
        return self.slots.layers[name].base


def load_base(
    name_or_path: str | Path,
    *,
    targets: Targets,
    num_labels: int,
    attention: str = "eager",
    dtype: str = "float32",
    head_key: Key,
) -> Base:
    """A classification model and its tokeniser from a folder, or from the hub where it can be reached.

    Args:
        name_or_path: a folder in the transformers format, or a hub name.
        targets: see `select_layers`.
        num_labels: classes of the head, which is drawn from `head_key` whatever the checkpoint holds.
        attention: "eager" or "sdpa".
        dtype: "float32", "bfloat16" or "float64", of the frozen weights.

    Raises:
        ModelError: no such folder or name, files that do not load, targets that match nothing.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    name = str(name_or_path)
    with _quiet(), torch.random.fork_rng(devices=[]):
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            network, report = AutoModelForSequenceClassification.from_pretrained(
                name,
                num_labels=num_labels,
                attn_implementation=attention,
                dtype=DTYPES[dtype],
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except Exception as error:  # transformers raises many kinds; a user needs the one line
            raise ModelError(_cannot_load(name, error)) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return from_network(
        network, tokenizer, targets, head_key, attention=attention, missing=sorted(report["missing_keys"])
    )


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
    network.eval().requires_grad_(False)
    config = getattr(network, "config", None)
    if config is not None and getattr(config, "pad_token_id", None) is None and tokenizer is not None:
        config.pad_token_id = tokenizer.pad_token_id
    if config is not None and hasattr(config, "use_cache"):
        config.use_cache = False
    if attention is not None:
        _set_attention(network, attention)
    layers = select_layers(network, targets)
    heads = head_layers(network)
    if not heads:
        raise ModelError(f"{type(network).__name__} has no classification head that is known here")
    std = float(getattr(config, "initializer_range", None) or 0.02)
    _draw(network, [name for name in missing if not in_head(name)], root_key(0).fold("missing"), std)
    digest = _digest(network)
    names = [name for name, _ in network.named_parameters() if name.rpartition(".")[0] in set(heads)]
    _draw(network, names, head_key, std)
    parameters = dict(network.named_parameters())
    head = {name: parameters[name].detach().to("cpu", torch.float32, copy=True) for name in names}
    inputs = frozenset(inspect.signature(network.forward).parameters)
    return Base(network, tokenizer, layers, head, digest, inject(network, layers, heads), inputs)


def _draw(network: nn.Module, names: Sequence[str], key: Key, std: float) -> None:
    """Fresh values: biases 0, one-dimensional weights (norms) 1, all else normal; each from its own stream."""
    parameters = dict(network.named_parameters())
    for name in names:
        value = parameters.get(name)
        if value is None:
            continue
        if name.endswith("bias"):
            fresh = torch.zeros(value.shape)
        elif value.dim() < 2:
            fresh = torch.ones(value.shape)
        else:
            fresh = key.fold(name).normal(value.shape, std, torch.float64)
        value.data.copy_(fresh)


def _digest(network: nn.Module) -> str:
    """blake2b over names, dtypes, shapes and bytes of all but the head."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(network.state_dict().items()):
        if not in_head(name):
            digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _oriented(linear: nn.Module) -> Tensor:
    """A view of the weight as (d_out, d_in)."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight.mT if is_conv1d(linear) else weight


def _cast(network: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and stored buffers; buffers computed at construction (rotary frequencies) keep precision."""
    stored = set(network.state_dict())
    for parameter in network.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for name, buffer in network.named_buffers():
        if name in stored and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _set_attention(network: nn.Module, attention: str) -> None:
    config = getattr(network, "config", None)
    if config is None or getattr(config, "_attn_implementation", attention) == attention:
        return
    try:
        network.set_attn_implementation(attention)  # type: ignore[operator]
    except (AttributeError, ValueError, ImportError) as error:
        raise ModelError(f"{type(network).__name__} has no {attention!r} attention; choose another") from error


def _cannot_load(name: str, error: Exception) -> str:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    local = Path(name)
    if local.is_dir():
        return f"the model folder {name!r} does not load: {reason}"
    if local.is_absolute() or name.startswith((".", "~")):
        return f"there is no model folder {name!r}"
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


def inputs_of(base: Base, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a batch that the network's forward takes, labels apart, on its device."""
    device = base.device
    return {name: value.to(device) for name, value in batch.items() if name in base.inputs and name != "labels"}
