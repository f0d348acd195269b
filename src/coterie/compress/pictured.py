"""Images among the tokens of windows: token -1 - k stands for row k of a table of features, whatever they are of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def with_images(network: nn.Module, features: Tensor | None) -> Iterator[None]:
    """For passes of a language model inside: what stands in the place of an embedding for tokens below 0.

    features: (K, d), on any device; None where windows are of text alone, and nothing changes.
    """
    if features is None:
        yield
        return

    def before(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids, *rest = given
        asked.append(ids)
        return ids.clamp(min=0), *rest

    def after(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
        ids = asked.pop()
        table = features.to(embedded.device, embedded.dtype)
        return embedded.where((ids >= 0)[..., None], table[(-1 - ids).clamp(min=0)])

    asked: list[Tensor] = []
    embedding = network.get_input_embeddings()  # type: ignore[operator]
    hooks = [embedding.register_forward_pre_hook(before), embedding.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
