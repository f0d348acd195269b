"""What arrives is checked before it counts: shapes, ranks and finiteness of every term."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.errors import ModelError, nearest
from coterie.protocol import Card, Sparse, Term, map_tensors
from coterie.protocol.messages import leaves
from coterie.training.asks import Head


def check_arrival(payload: Any, card: Card) -> None:
    """Raises ModelError, naming client and layer, for terms that do not fit the card and values that are not finite."""
    _check_terms(payload, card, "")
    for path, leaf in leaves(payload):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            raise ModelError(f"client {card.id}: {path or 'upload'} is {leaf}")
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            continue
        if leaf.dtype not in (torch.float32, torch.float64):
            raise ModelError(f"client {card.id}: {path or 'upload'} is {leaf.dtype}; float32 or float64 is expected")
        if not bool(torch.isfinite(leaf).all()):
            raise ModelError(f"client {card.id}: {path or 'upload'} holds values that are not finite")


def _check_terms(tree: Any, card: Card, path: str) -> None:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if isinstance(value, Term):
                if name not in card.layers:
                    raise ModelError(f"client {card.id}: no adapted layer {name!r}{nearest(name, card.layers)}")
                value.check(f"client {card.id}, layer {name}", card.layers[name], card.rank)
            else:
                _check_terms(value, card, f"{path}.{name}")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            _check_terms(value, card, f"{path}.{index}")
    elif isinstance(tree, Sparse):
        tree.check(f"client {card.id}, {path.removeprefix('.') or 'upload'}")
    elif is_dataclass(tree) and not isinstance(tree, type | Term):
        for field in fields(tree):
            _check_terms(getattr(tree, field.name), card, f"{path}.{field.name}")


def check_head(head: Head | None, like: Head | None, card: Card) -> None:
    """Raises ModelError unless a head that came back has the names and shapes of the one that was sent."""
    check_arrival(head, card)
    shapes = [None if h is None else {name: tuple(value.shape) for name, value in h.items()} for h in (head, like)]
    if shapes[0] != shapes[1]:
        raise ModelError(f"client {card.id}: the head that came back has other tensors than the one sent")


def poisoned(payload: Any) -> Any:
    """The same message with NaN in every tensor (a rehearsed fault)."""
    return map_tensors(
        payload, lambda tensor: torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor
    )


def misshapen(payload: Any) -> Any:
    """The same message with the last column of every tensor missing (a rehearsed fault)."""
    return map_tensors(payload, lambda tensor: tensor[..., :-1].clone() if tensor.dim() else tensor)
