"""The base model as a log of low-rank patches, so that a client that missed rounds can catch up exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coterie.protocol.messages import message
from coterie.protocol.terms import Adapter, LowRank


@message
class BaseLog:
    """W = W_0 + sum of patches, in order; version v has the first v patches."""

    patches: tuple[Adapter, ...] = ()

    @property
    def version(self) -> int:
        return len(self.patches)

    def add(self, patch: Mapping[str, LowRank]) -> BaseLog:
        """The next version, W + s B A on the layers of the patch."""
        return replace(self, patches=(*self.patches, dict(patch)))

    def since(self, version: int) -> tuple[Adapter, ...]:
        """The patches that a holder of `version` lacks."""
        if not 0 <= version <= self.version:
            raise ValueError(f"version {version} of a base that has {self.version}")
        return self.patches[version:]
