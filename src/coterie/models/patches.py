"""The patched weights of a base: W_0 + sum of low-rank patches, the same bits whatever the path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from coterie.errors import ModelError
from coterie.protocol import BaseLog, Layer, LowRank, Patch, as_adapters
from coterie.protocol.messages import leaves


@dataclass
class Patches:
    """Masters of the patched layers only. original: W_0; current: W at `log`'s version; both float32 or float64.

    A patch is added to the master in order of the log, so that version v has the same bits for one who followed
    every version and for one who jumped, and a bfloat16 network does not lose small patches one by one.
    """

    log: BaseLog = field(default_factory=BaseLog)
    original: dict[str, Tensor] = field(default_factory=dict)
    current: dict[str, Tensor] = field(default_factory=dict)

    def move_to(self, log: BaseLog, weight: Callable[[str], Tensor], layers: Mapping[str, Layer]) -> dict[str, Tensor]:
        """Move to `log`; returns the changed layers' new W (d_out, d_in). `weight` reads a layer never patched yet.

        Raises:
            ModelError: a patch that does not fit; nothing has changed then.
        """
        if log is self.log:
            return {}
        start = self.log.version if _extends(self.log, log) else 0
        added = as_adapters(log.patches[start:])
        for patch in added:
            for name, term in patch.items():
                _check(name, term, layers)
        changed: set[str] = set()
        if start == 0 and self.log.version:
            self.current = {name: value.clone() for name, value in self.original.items()}
            changed |= set(self.current)
        for patch in added:
            for name, term in patch.items():
                if name not in self.original:
                    value = weight(name).detach()
                    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
                    self.original[name] = value.to(wide, copy=True)
                    self.current[name] = self.original[name].clone()
                self.current[name] += _product(term, self.current[name])
                changed.add(name)
        self.log = log
        return {name: self.current[name] for name in changed}


def _product(term: LowRank, like: Tensor) -> Tensor:
    """s B A, computed in float64, in the dtype and on the device of `like`."""
    wide = LowRank(
        term.B.to(like.device, torch.float64),
        term.A.to(like.device, torch.float64),
        float(term.scale),
        None if term.diagonal is None else term.diagonal.to(like.device, torch.float64),
    )
    return wide.product().to(like.dtype)


def _check(name: str, term: LowRank, layers: Mapping[str, Layer]) -> None:
    if name not in layers:
        raise ModelError(f"a base patch names {name!r}, which is no adapted layer of this base")
    term.check(f"base patch of {name}", layers[name], None)


def _extends(short: BaseLog, long: BaseLog) -> bool:
    """Whether `long` begins with all patches of `short`."""
    if short.version > long.version:
        return False
    return all(_same(a, b) for a, b in zip(short.patches, long.patches, strict=False))


def _same(a: Patch, b: Patch) -> bool:
    if a is b:
        return True
    pairs = zip_longest(leaves(a), leaves(b), fillvalue=("", None))
    return type(a) is type(b) and all(path == where and _equal(x, y) for (path, x), (where, y) in pairs)


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x is y or torch.equal(x, y)
    return type(x) is type(y) and bool(x == y)
