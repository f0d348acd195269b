"""Gradient checkpointing: of each layer of a network only the input is kept; the rest is computed again backwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from coterie.adapters.inject import AdaptedLinear
from coterie.errors import ModelError


def repeated_layers(network: nn.Module) -> list[nn.Module]:
    """The members of the outermost module lists that hold adapted layers: a transformer's blocks, in order.

    Raises:
        ModelError: there are none.
    """
    found: list[nn.Module] = []
    last = "."
    for name, module in network.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(last) and _is_adapted(module):
            found += module
            last = f"{name}."
    if not found:
        raise ModelError(f"{type(network).__name__} has no list of layers to recompute; leave checkpointing off")
    return found


@contextmanager
def recomputed(network: nn.Module, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """For forward and backward passes inside. What is drawn from `generators` within a layer is drawn again alike.

    Raises:
        ModelError: see `repeated_layers`.
    """
    layers = repeated_layers(network)
    own = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(_replayed, generators),
        )
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _replayed(
    generators: Sequence[torch.Generator],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a layer's first pass and of the pass that repeats it, which leaves the generators as they were."""
    before: list[torch.Tensor] = []

    def states() -> list[torch.Tensor]:
        return [generator.get_state() for generator in generators]

    @contextmanager
    def first() -> Iterator[None]:
        before[:] = states()
        yield

    @contextmanager
    def again() -> Iterator[None]:
        now = states()
        _restore(generators, before)
        try:
            yield
        finally:
            _restore(generators, now)

    return first(), again()


def _restore(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _is_adapted(module: nn.Module) -> bool:
    return any(isinstance(part, AdaptedLinear) for part in module.modules())
