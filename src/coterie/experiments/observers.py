"""Who watches a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class About:
    """A run that begins or goes on: `first` is the first round still to be played."""

    folder: Path
    title: str
    first: int
    rounds: int


class Observer(Protocol):
    """What a run tells while it goes on; nothing that is told changes what is computed."""

    def begin(self, about: About) -> None:
        """Before the first round still to be played."""

    def round(self, metrics: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        """After every round; `metrics` is its line of metrics.jsonl."""

    def note(self, text: str) -> None:
        """Something worth knowing."""

    def end(self) -> None:
        """After the last round, and when the run breaks off."""


class Silent:
    """Tells nobody."""

    def begin(self, about: About) -> None:
        pass

    def round(self, metrics: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def end(self) -> None:
        pass
