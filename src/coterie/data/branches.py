"""Questions laid out so that their prompt is computed once: all options stand behind it, and none sees another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from coterie.data.sequences import IGNORED, ChoiceSet


@dataclass(frozen=True, eq=False)
class Branches:
    """A row for each question of `choices`: its prompt, then the tokens of its options, one option after another.

    Every token has the position that it has in a sequence of the prompt and its own option, and sees no other tokens
    than there; so what a network with attention over all earlier tokens says of an option is what it says of that
    sequence, to rounding. Where an option follows another prompt than the one before it, that stands in the row too.

    tokens: (5, T) int64, row after row: each token's id and position; where in its row an option's token is predicted,
    else -1; the number of the prompt that it belongs to or follows; that of its option in the question, -1 of a prompt.
    offsets: (n + 1,) int64, row i is tokens[:, offsets[i]:offsets[i + 1]].
    """

    choices: ChoiceSet
    tokens: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, (n,) int64."""
        return self.offsets[1:] - self.offsets[:-1]

    def batch(self, indices: ArrayLike, pad_to: int) -> dict[str, Tensor]:
        """The rows of the questions at `indices` (b,), padded on the right to `pad_to` = L tokens.

        Returns input_ids, position_ids and labels as `SequenceSet.batch`, before, the place in its row where a labelled
        token is predicted, and branches, the number of the option that it belongs to, else -1, all (b, L) int64; and
        attention_mask, (b, 1, L, L) bool, whether a token (third) sees another (fourth); padding sees the first token
        alone, not even itself.
        """
        places = torch.as_tensor(np.asarray(indices, dtype=np.int64))
        starts = self.offsets[places]
        columns = torch.arange(pad_to)
        there = columns < self.lengths[places][:, None]
        found = self.tokens[:, (starts[:, None] + columns).clamp_(max=self.tokens.shape[1] - 1)]
        ids, positions, before, stems, branches = found
        earlier = columns[:, None] >= columns
        same_stem = stems[:, :, None] == stems[:, None, :]
        on_path = (branches[:, None, :] < 0) | (branches[:, :, None] == branches[:, None, :])
        seen = earlier & same_stem & on_path & there[:, :, None] & there[:, None, :]
        seen[:, :, 0] |= ~there  # lest a softmax were over nothing
        labelled = there & (before >= 0)
        return {
            "input_ids": torch.where(there, ids, self.choices.options.pad_id),
            "position_ids": torch.where(there, positions, 0),
            "attention_mask": seen[:, None],
            "labels": torch.where(labelled, ids, IGNORED),
            "before": torch.where(labelled, before, -1),
            "branches": torch.where(labelled, branches, -1),
        }


def branched(choices: ChoiceSet) -> Branches:
    """The questions of this set as rows, in its order."""
    options = choices.sequences()
    ids, prompts = options.ids.numpy(), options.prompts[options.rows].tolist()
    starts, ends = options.offsets[options.rows].tolist(), options.offsets[options.rows + 1].tolist()
    spans = zip(starts, prompts, ends, strict=True)
    sequences = [(ids[start : start + prompt], ids[start + prompt : end]) for start, prompt, end in spans]
    rows: list[np.ndarray] = []
    first = 0
    for count in choices.counts.tolist():
        rows.append(np.concatenate(list(_row(sequences[first : first + count])), axis=1))
        first += count
    tokens = torch.from_numpy(np.concatenate(rows, axis=1) if rows else np.empty((5, 0), np.int64))
    return Branches(choices, tokens, torch.tensor([0, *np.cumsum([row.shape[1] for row in rows])], dtype=torch.int64))


def _row(sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> Iterator[np.ndarray]:
    """The tokens of a question, (5, ·) int64 piece by piece: a prompt once for all options in a row that have it."""
    known: np.ndarray | None = None
    stem, written, last = -1, 0, 0
    for branch, (prompt, option) in enumerate(sequences):
        if known is None or not np.array_equal(prompt, known):
            known, stem = prompt, stem + 1
            size = len(prompt)
            yield np.stack([prompt, np.arange(size), np.full(size, -1), np.full(size, stem), np.full(size, -1)])
            written += size
            last = written - 1
        size = len(option)
        before = np.concatenate([[last], np.arange(written, written + size - 1)])
        positions = np.arange(len(prompt), len(prompt) + size)
        yield np.stack([option, positions, before, np.full(size, stem), np.full(size, branch)])
        written += size
