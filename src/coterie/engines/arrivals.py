"""What arrives is checked before it counts: shapes, ranks and finiteness of every term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.errors import ModelError, nearest
from coterie.protocol import Card, Term, map_tensors
from coterie.protocol.messages import leaves


def check_arrival(payload: Any, card: Card) -> None:
    """Raises ModelError, naming client and layer, for terms that do not fit the card and values that are not finite."""
    _check_terms(payload, card, "")
    for path, leaf in leaves(payload):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
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
    elif is_dataclass(tree) and not isinstance(tree, type | Term):
        for field in fields(tree):
            _check_terms(getattr(tree, field.name), card, f"{path}.{field.name}")


def poisoned(payload: Any) -> Any:
    """The same message with NaN in every tensor (a rehearsed fault)."""
    return map_tensors(payload, lambda tensor: torch.full_like(tensor, float("nan")))


def misshapen(payload: Any) -> Any:
    """The same message with the last column of every tensor missing (a rehearsed fault)."""
    return map_tensors(payload, lambda tensor: tensor[..., :-1].clone() if tensor.dim() else tensor)
