"""An emulator of a base model: some of its middle blocks let everything pass (FedBiOT)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from coterie.adapters.inject import eject
from coterie.errors import ModelError
from coterie.maths.blocks import block_name, block_of, kept_blocks
from coterie.maths.keys import Key
from coterie.models.loading import Base, from_language_network, from_network
from coterie.models.seeing import language_layers
from coterie.models.targets import Targets


class Passing(nn.Module):
    """In the place of a block: its input, as the block itself would give it back, alone or in a tuple."""

    def __init__(self, replaced: nn.Module, in_tuple: bool) -> None:
        super().__init__()
        self.in_tuple = in_tuple
        kind = getattr(replaced, "attention_type", None)  # some networks choose a block's mask by it
        if kind is not None:
            self.attention_type = kind

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if self.in_tuple else hidden_states


def emulator(base: Base, targets: Targets, drop: float, outer: int, head_key: Key) -> Base:
    """The base with a part of its middle blocks passed over: all but the first and last `outer`, see `kept_blocks`.

    Blocks keep their names, so that adapters of the outer ones fit both. Weights are copies. targets and head_key are
    those that the base was loaded with: the head is the same.

    Raises:
        ModelError: fewer blocks than the outer ones. Without any between, the emulator is like the base.
    """
    blocks, count = _blocks(base)
    middle = count - 2 * outer
    if outer < 1 or middle < 0:
        raise ModelError(f"an emulator needs outer blocks on both sides, and {count} are too few for outer={outer}")
    kept = {outer + i for i in kept_blocks(middle, drop)} | set(range(outer)) | set(range(count - outer, count))
    dropped = [f"{blocks}.{i}" for i in range(count) if i not in kept]
    in_tuple = _in_tuple(base, dropped)
    network = copy.deepcopy(base.network)
    eject(network)
    for name in dropped:
        parent, _, place = name.rpartition(".")
        network.get_submodule(parent)[int(place)] = Passing(network.get_submodule(name), in_tuple)  # type: ignore[operator]
    if base.is_language:
        named = targets if base.vision is None else language_layers(network, targets)
        made = from_language_network(network, base.tokenizer, named)
        made.vision = base.vision
        return made
    return from_network(network, base.tokenizer, targets, head_key)


def _blocks(base: Base) -> tuple[str, int]:
    """The name of the list of blocks that holds the adapted layers, and its length."""
    lists = {block_name(layer).rpartition(".")[0] for layer in base.layers if block_of(layer) is not None}
    if len(lists) != 1:
        raise ModelError(f"an emulator needs one list of blocks, and the adapted layers lie in {len(lists)}")
    name = lists.pop()
    return name, len(base.network.get_submodule(name))  # type: ignore[arg-type]


@torch.no_grad()
def _in_tuple(base: Base, names: Iterable[str]) -> bool:
    """Whether these blocks give their output in a tuple, by a pass over a single token."""
    seen: list[bool] = []
    hooks = [
        base.network.get_submodule(name).register_forward_hook(lambda _, __, out: seen.append(isinstance(out, tuple)))
        for name in names
    ]
    ids = torch.zeros(1, 1, dtype=torch.int64, device=base.device)
    try:
        base.network(input_ids=ids, attention_mask=torch.ones_like(ids))
    finally:
        for hook in hooks:
            hook.remove()
    return any(seen)
