"""Which linear layers of a network can be adapted, and which of them a user means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from torch import nn

from coterie.compress.factored import FactoredLinear
from coterie.errors import ModelError
from coterie.protocol import Layer

HEADS = ("classifier", "score", "pre_classifier", "classification_head")
_QUERY_AND_VALUE = ("q_proj", "v_proj", "query", "value")  # transformers renamed these layers of image encoders

DEFAULTS = {
    "mpnet": ("attn.q", "attn.v"),
    **dict.fromkeys(("vit", "deit", "dinov2", "dinov2_with_registers", "clip", "siglip", "siglip2"), _QUERY_AND_VALUE),
}
"""Default target names of model types for which PEFT has none: those of them that a network has."""

Targets = str | Sequence[str] | None


def linears(network: nn.Module) -> dict[str, Layer]:
    """Every linear-like layer by its name, in network order, with shapes (d_out, d_in).

    The head and the output layer are none of them; nor is what lies inside another linear-like layer.
    """
    output = output_layer(network)
    found: dict[str, Layer] = {}
    last = "."
    for name, module in network.named_modules():
        layer = shape_of(module)
        if layer is not None and not in_head(name) and name != output and not name.startswith(last):
            found[name], last = layer, f"{name}."
    return found


def output_layer(network: nn.Module) -> str | None:
    """The name of a language model's output layer; None where there is none."""
    layer = network.get_output_embeddings() if hasattr(network, "get_output_embeddings") else None  # type: ignore[operator]
    return next((name for name, module in network.named_modules() if module is layer), None)


def head_layers(network: nn.Module) -> list[str]:
    """The names of the head's linear layers, in network order."""
    return [name for name, module in network.named_modules() if in_head(name) and isinstance(module, nn.Linear)]


def in_head(name: str) -> bool:
    """Whether a module or parameter of that name belongs to the head."""
    return name.partition(".")[0] in HEADS


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is GPT-2's Conv1D, which stores W transposed, (d_in, d_out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def shape_of(module: nn.Module) -> Layer | None:
    """(d_out, d_in) of a linear-like module, and the rank of a factored one; None for others.

    Linear-like is nn.Linear, GPT-2's Conv1D, and whatever has `in_features` and `out_features`, such as a quantised
    layer, in whatever form it keeps its weights.
    """
    if is_conv1d(module):
        d_in, d_out = module.weight.shape  # type: ignore[misc]
        return Layer(int(d_out), int(d_in))
    d_in, d_out = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(d_in, int) and isinstance(d_out, int):
        return Layer(d_out, d_in, module.inner if isinstance(module, FactoredLinear) else None)
    return None


def select_layers(network: nn.Module, targets: Targets) -> dict[str, Layer]:
    """The layers that `targets` name, in network order, never of the head.

    targets: names or name endings at a dot, as PEFT reads a list ("query" names every `….query`); "all-linear"; a
    single string that ends no name, but as a regular expression matches whole names, as PEFT reads a string; or None
    for PEFT's default for the model's type.

    Raises:
        ModelError: a name that ends no linear layer's name, or no default for this model type.
    """
    known = linears(network)
    matched = _full_matches(targets, known) if isinstance(targets, str) else {}
    if targets == "all-linear":
        wanted = dict(known)
    elif matched:
        wanted = matched
    else:
        names = _default(network, known) if targets is None else [targets] if isinstance(targets, str) else targets
        for name in names:
            if not any(_ends(layer, name) for layer in known):
                raise ModelError(f"no linear layer is called {name!r}; {_alike(name, known)}")
        wanted = {layer: shape for layer, shape in known.items() if any(_ends(layer, name) for name in names)}
    if not wanted:
        raise ModelError("no layer was chosen; name some target layers, or write all-linear")
    return wanted


def check_rank(layers: Mapping[str, Layer], rank: int, who: str) -> None:
    """Raises ModelError when `rank` is below one or above what some layer allows, min(d_out, d_in)."""
    if rank < 1:
        raise ModelError(f"{who}: rank {rank}; it must be at least 1")
    for name, layer in layers.items():
        if rank > min(layer.d_out, layer.d_in):
            raise ModelError(
                f"{who}: rank {rank} is above what layer {name} ({layer.d_out} x {layer.d_in}) allows; "
                f"use at most {min(layer.d_out, layer.d_in)}"
            )


def _full_matches(pattern: str, known: Mapping[str, Layer]) -> dict[str, Layer]:
    """The layers whose whole name matches a regular expression; none where it is the ending of some name."""
    if any(_ends(layer, pattern) for layer in known):
        return {}
    try:
        return {layer: shape for layer, shape in known.items() if re.fullmatch(pattern, layer)}
    except re.error:
        return {}


def _ends(layer: str, name: str) -> bool:
    return layer == name or layer.endswith(f".{name}")


def _last_parts(known: Mapping[str, Layer]) -> list[str]:
    return list(dict.fromkeys(layer.rpartition(".")[2] for layer in known))


def _alike(name: str, known: Mapping[str, Layer]) -> str:
    close = difflib.get_close_matches(name, [*_last_parts(known), *known], n=3, cutoff=0.5)
    return f"nearest: {', '.join(close)}" if close else f"there are: {', '.join(_last_parts(known))}"


def _default(network: nn.Module, known: Mapping[str, Layer]) -> list[str]:
    """PEFT's default target names for this model type, or our own where it has none."""
    kind = getattr(getattr(network, "config", None), "model_type", "?")
    if kind in DEFAULTS:
        return [name for name in DEFAULTS[kind] if any(_ends(layer, name) for layer in known)]
    advice = f"name some of: {', '.join(_last_parts(known))}"
    try:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as defaults
    except ImportError as error:
        raise ModelError(f"target layers have a default only where peft is installed; {advice}") from error
    if kind not in defaults:
        raise ModelError(f"there are no default target layers for model type {kind!r}; {advice}")
    return list(defaults[kind])
