"""Requests that bring down the process in which they are answered."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.protocol import Model, Penalty


class Deadly(Penalty):
    """Adds nothing to the loss; kills its process at the third look if this file is there, which then goes."""

    def __init__(self, marks: Sequence[str]) -> None:
        self.marks = list(marks)
        self.looks = 0

    def value(self, model: Model) -> Tensor:
        self.looks += 1
        for mark in self.marks:
            if self.looks == 3 and Path(mark).exists():
                Path(mark).unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(len(next(iter(model.parameters.values()))))

    @property
    def signature(self) -> tuple[Any, ...]:
        return (Deadly,)

    @classmethod
    def stack(cls, penalties: Sequence[Deadly], rank: int) -> Deadly:
        return cls([mark for penalty in penalties for mark in penalty.marks])


class Always(Deadly):
    """Kills whatever process looks at it, but for the one that made it."""

    def __init__(self, home: int) -> None:
        super().__init__(())
        self.home = home

    def value(self, model: Model) -> Tensor:
        if os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().value(model)

    @classmethod
    def stack(cls, penalties: Sequence[Always], rank: int) -> Always:  # type: ignore[override]
        return cls(penalties[0].home)


class Refused(Exception):
    """An error that does not survive pickling: it is made of two things."""

    def __init__(self, who: str, what: str) -> None:
        super().__init__(f"{who} refuses {what}")


class Refusing(Always):
    """Raises in whatever process."""

    def value(self, model: Model) -> Tensor:
        raise Refused("the penalty", "this")
