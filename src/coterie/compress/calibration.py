"""Text that runs through a network block by block: memory holds the hidden states of one place, not of all layers.

Every window of text has the same length and no padding, so that what the first block is called with, positions and
masks, suits every batch. After one block the states replace those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coterie.compress.inputs import Inputs, Moments, moments
from coterie.errors import ModelError

BATCH_TOKENS = 1024
"""A batch is as many windows as hold about this many tokens, and at least one."""

LANGUAGE = "language_model"
"""How networks with several parts call the language model among them."""

Advance = Callable[[int, int], None]
"""Called with the blocks done and all blocks."""


class _Stop(Exception):
    """A forward pass that has shown what it was wanted for."""


@dataclass(frozen=True)
class Call:
    """What a block is called with beside its hidden states."""

    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    by_name: bool

    def on(self, block: nn.Module, states: Tensor) -> Tensor:
        """The block's hidden states after it."""
        if self.by_name:
            return _hidden(block(*self.arguments, **{**self.named, "hidden_states": states}))
        return _hidden(block(states, *self.arguments, **self.named))


def blocks(network: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a transformer by name, in the order in which they run: its longest list of modules.

    Of a language model beside a vision tower, its own.

    Raises:
        ModelError: no list of modules, or two lists of blocks (an encoder with a decoder).
    """
    lists = {name: module for name, module in network.named_modules() if isinstance(module, nn.ModuleList)}
    outer = {name: m for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    if not outer:
        raise ModelError(f"{type(network).__name__} has no list of blocks that could be compressed one by one")
    if len(outer) > 1:
        outer = {name: m for name, m in outer.items() if LANGUAGE in name.split(".")} or outer
    if len(outer) > 1:
        raise ModelError(
            f"{type(network).__name__} has several lists of blocks ({', '.join(outer)}); only models with one, a "
            "decoder or an encoder, can be compressed"
        )
    ((name, found),) = outer.items()
    return {f"{name}.{index}": block for index, block in enumerate(found)}


class Stream:
    """All windows of text as hidden states before the next block.

    windows: (N, L) token ids, or images (N, 3, h, w). Raises ModelError where the blocks, run by themselves, do not
    give what the whole network gives.
    """

    def __init__(self, network: nn.Module, windows: Tensor) -> None:
        self.network, self.blocks = network, blocks(network)
        device = next(network.parameters()).device
        batches = [batch.to(device) for batch in batched(windows)]
        with torch.no_grad(), _without_cache(network):
            self._calls = self._probed(batches[0])
            # What a block was called with suits the batch that showed it in any case, so another one has to tell.
            self._require_equal(batches[-1] if len(batches) > 1 else batches[0].flip(-1))
            self.states = [self._entering(batch) for batch in batches]

    def watch(self, name: str, watched: Mapping[str, Inputs]) -> None:
        """Show the inputs of some layers of a block to their `Inputs`; the states stay where they are."""
        block, calls = self.blocks[name], self._calls[name]
        with torch.no_grad(), _watching(self.network, watched) as fresh:
            for states in self.states:
                fresh()
                calls.on(block, states)

    def step(self, name: str, watched: Mapping[str, Inputs] | None = None) -> None:
        """Move all states through a block, which shows the inputs of some layers on the way."""
        block, calls = self.blocks[name], self._calls[name]
        with torch.no_grad(), _watching(self.network, watched or {}) as fresh:
            for index, states in enumerate(self.states):
                fresh()
                self.states[index] = calls.on(block, states)

    def _probed(self, batch: Tensor) -> dict[str, Call]:
        """How each block is called in a whole pass."""
        calls: dict[str, Call] = {}
        order: list[str] = []

        def before(name: str) -> Any:
            def hook(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
                by_name = not arguments
                rest = {key: value for key, value in named.items() if not (by_name and key == "hidden_states")}
                calls[name] = Call(arguments[1:], rest, by_name)
                order.append(name)

            return hook

        def stop(*_: Any) -> None:
            raise _Stop

        hooks = [block.register_forward_pre_hook(before(name), with_kwargs=True) for name, block in self.blocks.items()]
        output = self.network.get_output_embeddings() if hasattr(self.network, "get_output_embeddings") else None  # type: ignore[operator]
        if output is not None:  # logits of a large vocabulary would be the largest tensor of all
            hooks.append(output.register_forward_pre_hook(stop))
        _stopped(self.network, batch, hooks)
        if order != list(self.blocks):
            raise ModelError(f"{type(self.network).__name__} does not run each of its blocks once, one after another")
        return calls

    def _require_equal(self, batch: Tensor) -> None:
        """Raises ModelError unless the blocks, one by one, make of a batch what the whole network makes of it."""
        last: list[Tensor] = []

        def after(_: nn.Module, __: Any, output: Any) -> None:
            last.append(_hidden(output))
            raise _Stop

        *_, final = self.blocks.values()
        _stopped(self.network, batch, [final.register_forward_hook(after)])
        states = self._entering(batch)
        for name, block in self.blocks.items():
            states = self._calls[name].on(block, states)
        if not torch.allclose(states, last[0], rtol=1e-2, atol=1e-3):
            raise ModelError(
                f"{type(self.network).__name__} cannot be run block by block: its blocks give other hidden states alone"
            )

    def _entering(self, batch: Tensor) -> Tensor:
        """The hidden states of a batch before the first block."""
        seen: list[Tensor] = []

        def hook(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen.append(arguments[0] if arguments else named["hidden_states"])
            raise _Stop

        first = next(iter(self.blocks.values()))
        _stopped(self.network, batch, [first.register_forward_pre_hook(hook, with_kwargs=True)])
        return seen[0]


def batched(windows: Tensor) -> list[Tensor]:
    """Windows (N, L) in batches of one size: the largest divisor of N that keeps within `BATCH_TOKENS`.

    Of images (N, 3, h, w), a token is taken to be 16 x 16 pixels.
    """
    count = len(windows)
    length = windows.shape[1] if windows.dim() == 2 else -(-windows.shape[-2] * windows.shape[-1] // 256)
    most = max(1, BATCH_TOKENS // length)
    size = next(size for size in range(min(most, count), 0, -1) if count % size == 0)
    return list(torch.split(windows, size))


def main_input(network: nn.Module) -> str:
    """What the network's forward calls the windows: input_ids, or pixel_values."""
    return str(getattr(network, "main_input_name", "input_ids"))


def _hidden(output: Any) -> Tensor:
    """The hidden states in what a block returns: a tensor, or the first of several things."""
    hidden = output[0] if isinstance(output, tuple | list) else output
    assert isinstance(hidden, Tensor)
    return hidden


def _stopped(network: nn.Module, batch: Tensor, hooks: Sequence[Any]) -> None:
    """A forward pass up to where a hook stops it; the hooks are taken off again."""
    try:
        network(**{main_input(network): batch})
    except _Stop:
        pass
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _watching(network: nn.Module, watched: Mapping[str, Inputs]) -> Iterator[Callable[[], None]]:
    """Show inputs while inside; what is given is to be called before each batch."""
    seen: list[tuple[Tensor, Moments]] = []

    def hook(inputs: Inputs) -> Any:
        def before(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0]
            # Query, key and value share one input: its moments are computed once.
            found = next((made for other, made in seen if other is x), None)
            if found is None:
                found = moments(x.reshape(-1, x.shape[-1]))
                seen[:] = [(x, found)]
            inputs.add(found)

        return before

    hooks = [network.get_submodule(name).register_forward_pre_hook(hook(inputs)) for name, inputs in watched.items()]
    try:
        yield seen.clear
    finally:
        for handle in hooks:
            handle.remove()


@contextmanager
def _without_cache(network: nn.Module) -> Iterator[None]:
    """Without the cache of keys and values, which would let a block be called with what it has seen before."""
    config = getattr(network, "config", None)
    parts: list[Any] = [part for part in (config, getattr(config, "text_config", None)) if hasattr(part, "use_cache")]
    before = [part.use_cache for part in parts]
    for part in parts:
        part.use_cache = False
    try:
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            part.use_cache = value
