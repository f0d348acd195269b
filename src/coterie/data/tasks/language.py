"""What language models are trained on and tested with: questions with choices, prompts with answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from coterie.errors import ConfigError

ChoiceScore = Literal["sum", "mean"]
"""How a choice is scored: by the sum of its tokens' log-probabilities, or by their mean."""


@dataclass(frozen=True, eq=False)
class Questions:
    """Multiple choice, answered by the likeliest choice: `choices[i][labels[i]]` is what should follow `prompts[i]`.

    labels: (n,) int64. groups: as of `Examples`. A space between prompt and choice is part of neither (`spaced`).
    """

    kind: ClassVar[Literal["choices"]] = "choices"

    prompts: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...]
    labels: np.ndarray
    groups: tuple[str, ...] | None = None
    score: ChoiceScore = "sum"

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, indices: ArrayLike) -> Questions:
        """The questions at `indices` (m,), in that order."""
        places = np.asarray(indices, dtype=np.int64).reshape(-1)
        groups = None if self.groups is None else tuple(self.groups[i] for i in places)
        prompts, choices = tuple(self.prompts[i] for i in places), tuple(self.choices[i] for i in places)
        return Questions(prompts, choices, self.labels[places], groups, self.score)

    def contents(self) -> list[tuple[str, str]]:
        """What makes a question the same as another: its prompt and all its choices, in their order."""
        return [(prompt, "\x1f".join(options)) for prompt, options in zip(self.prompts, self.choices, strict=True)]


@dataclass(frozen=True, eq=False)
class Instructions:
    """Prompts, which may be empty, and the answers whose tokens are learnt.

    labels: (n,) int64, the place of each example's group among the task's `label_names`, 0 where there are no groups:
    what partitioners by label share out by.
    """

    kind: ClassVar[Literal["instructions"]] = "instructions"

    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    labels: np.ndarray
    groups: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, indices: ArrayLike) -> Instructions:
        """The examples at `indices` (m,), in that order."""
        places = np.asarray(indices, dtype=np.int64).reshape(-1)
        groups = None if self.groups is None else tuple(self.groups[i] for i in places)
        prompts, answers = tuple(self.prompts[i] for i in places), tuple(self.answers[i] for i in places)
        return Instructions(prompts, answers, self.labels[places], groups)

    def contents(self) -> list[tuple[str, str]]:
        """What makes an example the same as another: its prompt and its answer."""
        return list(zip(self.prompts, self.answers, strict=True))


def spaced(prompt: str, answer: str) -> str:
    """The answer as it follows the prompt: with a space before it, unless one of the two brings white space there."""
    apart = not prompt or prompt[-1].isspace() or answer[:1].isspace()
    return answer if apart else f" {answer}"


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with the text of each `{name}` in its place; texts are not looked at for further names."""
    pattern = "|".join(re.escape(name) for name in values)
    return re.sub(rf"\{{({pattern})\}}", lambda found: values[found[1]], template)


def check_template(template: str, names: Sequence[str]) -> None:
    """Raises ConfigError for a template that holds the first of `names` nowhere."""
    if f"{{{names[0]}}}" not in template:
        others = "".join(f", and may hold {{{name}}}" for name in names[1:])
        raise ConfigError(f"task.template is {template[:40]!r}; it must hold {{{names[0]}}}{others}")
