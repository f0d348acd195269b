"""What language models are trained on and tested with: questions with choices, prompts with answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from coterie.data.images import Picture, fingerprint
from coterie.errors import ConfigError

ChoiceScore = Literal["sum", "mean"]
"""How a choice is scored: by the sum of its tokens' log-probabilities, or by their mean."""


@dataclass(frozen=True, eq=False)
class Questions:
    """Multiple choice, answered by the likeliest choice: `choices[i][labels[i]]` is what should follow `prompts[i]`.

    labels: (n,) int64. groups: as of `Examples`. A space between prompt and choice is part of neither (`spaced`).
    pictures: the image that each question is about, for models that see; None of plain text.
    """

    kind: ClassVar[Literal["choices"]] = "choices"

    prompts: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...]
    labels: np.ndarray
    groups: tuple[str, ...] | None = None
    score: ChoiceScore = "sum"
    pictures: Sequence[Picture] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, indices: ArrayLike) -> Questions:
        """The questions at `indices` (m,), in that order."""
        places = np.asarray(indices, dtype=np.int64).reshape(-1)
        groups = None if self.groups is None else tuple(self.groups[i] for i in places)
        prompts, choices = tuple(self.prompts[i] for i in places), tuple(self.choices[i] for i in places)
        pictures = None if self.pictures is None else [self.pictures[i] for i in places.tolist()]
        return Questions(prompts, choices, self.labels[places], groups, self.score, pictures)

    def contents(self) -> list[tuple[str, str]]:
        """What makes a question the same as another: its image, its prompt and all its choices, in their order."""
        return _seen(self.told(), self.pictures)

    def told(self) -> list[tuple[str, str]]:
        """Each prompt, and all its choices in one text."""
        return [(prompt, "\x1f".join(options)) for prompt, options in zip(self.prompts, self.choices, strict=True)]


@dataclass(frozen=True, eq=False)
class Instructions:
    """Prompts, which may be empty, and the answers whose tokens are learnt.

    labels: (n,) int64, the place of each example's group among the task's `label_names`, 0 where there are no groups:
    what partitioners by label share out by. references: what a generated answer is compared with, where that is more
    than the answer; which texts these are depends on the task's `judged`. pictures: as of `Questions`.
    """

    kind: ClassVar[Literal["instructions"]] = "instructions"

    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    labels: np.ndarray
    groups: tuple[str, ...] | None = None
    references: tuple[tuple[str, ...], ...] | None = None
    pictures: Sequence[Picture] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, indices: ArrayLike) -> Instructions:
        """The examples at `indices` (m,), in that order."""
        places = np.asarray(indices, dtype=np.int64).reshape(-1)
        groups = None if self.groups is None else tuple(self.groups[i] for i in places)
        prompts, answers = tuple(self.prompts[i] for i in places), tuple(self.answers[i] for i in places)
        references = None if self.references is None else tuple(self.references[i] for i in places)
        pictures = None if self.pictures is None else [self.pictures[i] for i in places.tolist()]
        return Instructions(prompts, answers, self.labels[places], groups, references, pictures)

    def contents(self) -> list[tuple[str, str]]:
        """What makes an example the same as another: its image, its prompt and its answer."""
        return _seen(self.told(), self.pictures)

    def told(self) -> list[tuple[str, str]]:
        """Each prompt and its answer."""
        return list(zip(self.prompts, self.answers, strict=True))


def _seen(told: list[tuple[str, str]], pictures: Sequence[Picture] | None) -> list[tuple[str, str]]:
    if pictures is None:
        return told
    return [(f"{fingerprint(own)} {first}", second) for own, (first, second) in zip(pictures, told, strict=True)]


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
