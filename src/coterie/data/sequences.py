"""Tokenised prompts with their answers, for language models: what is predicted, and options to choose between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from coterie.data.images import ImageSet
from coterie.data.text import TextSet
from coterie.data.tiles import TiledSet
from coterie.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of a token that is not to be predicted: of the prompt, or padding."""

_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class SequenceSet:
    """Prompts, each followed by its answer: rows of a shared flat store.

    ids: (tokens,) int32, all sequences of the store one after another; offsets: (stored + 1,) int64, sequence i is
    ids[offsets[i]:offsets[i + 1]]; prompts: (stored,) int64, how many of its first tokens are the prompt, at least
    one; rows: (n,) int64, the sequences that this set holds. stored_classes: (stored,) int64, of answers that are
    options their place among them; None where they are none. pictures, picture_of: images, and which of them each
    sequence is about, (stored,) int64; its places are among the prompt's tokens. A selection shares all but `rows`.

    Raises:
        DataError: a sequence without a prompt, whose first token nothing could predict.
    """

    ids: Tensor
    offsets: Tensor
    prompts: Tensor
    rows: Tensor
    pad_id: int = 0
    stored_classes: Tensor | None = None
    pictures: ImageSet | TiledSet | None = None
    picture_of: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.prompts) and int(self.prompts.min()) < 1:
            raise DataError(f"sequence {int(self.prompts.argmin())} has no prompt; begin it with one token at least")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, prompt and answer, (n,) int64."""
        return self.offsets[self.rows + 1] - self.offsets[self.rows]

    @property
    def labelled(self) -> Tensor:
        """Tokens of each answer, (n,) int64: those to be predicted."""
        return self.lengths - self.prompts[self.rows]

    @property
    def classes(self) -> Tensor | None:
        """Of answers that are options, which one each is, (n,) int64."""
        return None if self.stored_classes is None else self.stored_classes[self.rows]

    def select(self, indices: ArrayLike | Tensor) -> SequenceSet:
        """The sequences at `indices` (positions in this set, in this order) as a set over the same storage."""
        return replace(self, rows=self.rows[_positions(indices, len(self))])

    def batch(self, indices: ArrayLike | Tensor, pad_to: int) -> dict[str, Tensor]:
        """The sequences at `indices` (b,), padded on the right to `pad_to` = L tokens.

        On the right whatever the tokeniser prefers: there, no token that counts sees the padding, and every token has
        the position that it has alone.

        Returns input_ids, attention_mask and labels, all (b, L) int64; a label is the token itself where it belongs
        to an answer, else -100. Of answers that are options also classes (b,); where sequences are about images also
        what `shown` gives.

        Raises:
            DataError: an index outside the set, or a sequence longer than `pad_to`.
        """
        places = _positions(indices, len(self))
        rows = self.rows[places]
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        longest = int(lengths.max()) if len(rows) else 0
        if longest > pad_to:
            raise DataError(f"a sequence of {longest} tokens does not fit a batch padded to {pad_to}")
        columns = torch.arange(pad_to)
        mask = columns < lengths[:, None]
        # Places beyond a sequence's end read some other token, which the mask then replaces.
        tokens = self.ids[(starts[:, None] + columns).clamp_(max=max(len(self.ids) - 1, 0))].long()
        made = {
            "input_ids": torch.where(mask, tokens, self.pad_id),
            "attention_mask": mask.long(),
            "labels": torch.where(mask & (columns >= self.prompts[rows][:, None]), tokens, IGNORED),
        }
        if self.stored_classes is not None:
            made["classes"] = self.stored_classes[rows]
        return made | self.shown(places)

    def shown(self, indices: ArrayLike | Tensor) -> dict[str, Tensor]:
        """The images of the sequences at `indices` as a model takes them: see `ImageSet.inputs`, `TiledSet.inputs`.

        Nothing where sequences are about none.
        """
        if self.pictures is None or self.picture_of is None:
            return {}
        return self.pictures.inputs(self.picture_of[self.rows[_positions(indices, len(self))]])


@dataclass(frozen=True, eq=False)
class ChoiceSet:
    """Questions with options, answered by the option whose tokens the model finds likeliest after the prompt.

    options: all options of the store, each a sequence of the prompt and the option's text; first: (stored + 1,) int64,
    question i has options first[i] … first[i + 1] - 1; stored_labels: (stored,) int64, the right one's place among
    them, -1 where it is not known; rows: (n,) int64, the questions that this set holds. score: the sum of the option's
    token log-probabilities, or their mean, which does not favour short options.
    """

    options: SequenceSet
    first: Tensor
    stored_labels: Tensor
    rows: Tensor
    score: Literal["sum", "mean"] = "sum"

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Tensor:
        """The right option's place for each question, (n,) int64."""
        return self.stored_labels[self.rows]

    @property
    def counts(self) -> Tensor:
        """How many options each question has, (n,) int64."""
        return self.first[self.rows + 1] - self.first[self.rows]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each question's longest option, its prompt included, (n,) int64."""
        lengths = self.options.lengths
        return torch.tensor([int(lengths[part].max()) for part in self._spans()], dtype=torch.int64)

    def select(self, indices: ArrayLike | Tensor) -> ChoiceSet:
        """The questions at `indices` (positions in this set, in this order) as a set over the same storage."""
        return replace(self, rows=self.rows[_positions(indices, len(self))])

    def sequences(self) -> SequenceSet:
        """All options of this set's questions, question after question."""
        places = [torch.arange(part.start, part.stop) for part in self._spans()]
        return self.options.select(torch.cat(places) if places else [])

    def answers(self) -> SequenceSet:
        """The right option of each question: what a model is trained on.

        Raises:
            DataError: a question whose right option is not known (-1).
        """
        if len(self) and int(self.labels.min()) < 0:
            raise DataError("which option is right is not known here, so there are no answers to train on")
        places = torch.cat([torch.arange(int(count)) for count in torch.diff(self.first)])
        classes = torch.zeros_like(self.options.prompts).index_put((self.options.rows,), places)
        return replace(self.options, stored_classes=classes).select(self.first[self.rows] + self.labels)

    def batch(self, indices: ArrayLike | Tensor, pad_to: int) -> dict[str, Tensor]:
        """All options of the questions at `indices`, question after question, as `SequenceSet.batch` pads them."""
        options = self.select(indices).sequences()
        return options.batch(range(len(options)), pad_to)

    def arranged(self, values: Tensor, indices: ArrayLike | Tensor | None = None) -> Tensor:
        """Each option's score, (b, C), -inf where a question has no such option; differentiable.

        values: (m,) summed log-probabilities of the options of the questions at `indices` (None: of all), in the
        order of `batch`; where the set says so, they are divided by the options' tokens.
        """
        chosen = self if indices is None else self.select(indices)
        if self.score == "mean":
            values = values / chosen.sequences().labelled.to(values.device)
        # As many columns as the set needs, whatever the batch.
        exists = (torch.arange(int(self.counts.max())) < chosen.counts[:, None]).to(values.device)
        return torch.full(exists.shape, -torch.inf, dtype=values.dtype, device=values.device).masked_scatter(
            exists, values
        )

    def _spans(self) -> list[slice]:
        starts, ends = self.first[self.rows].tolist(), self.first[self.rows + 1].tolist()
        return [slice(*span) for span in zip(starts, ends, strict=True)]


Classified = TextSet | ImageSet
"""Examples that have a class each."""

DataSet = Classified | SequenceSet | ChoiceSet
"""What a party may hold under a data set's name."""


def tokenise_sequences(
    prompts: Sequence[str],
    answers: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    cut: bool = False,
) -> SequenceSet:
    """Tokenise prompts and answers apart and join them as tokens, with the end token after the answer.

    So a space that belongs between the two belongs to the answer's beginning. A begin token comes first where the
    tokeniser sets one. A prompt that leaves no room within `max_length` tokens loses its beginning (not the begin
    token). An answer is never cut, unless `cut`: then it loses its end where the prompt would keep less than half of
    `max_length` (or less than all of itself). An empty prompt without a begin token is the end token, lest the
    answer's first token had nothing to be predicted from.

    Raises:
        DataError: not as many prompts as answers, an answer that leaves no room for a prompt's token, an example
            without an answer where the tokeniser has no end token, or without any prompt likewise.
    """
    if len(prompts) != len(answers):
        raise DataError(f"{len(prompts)} prompts and {len(answers)} answers: there must be equally many")
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    texts = [[*answer, *end] for answer in _encode(answers, tokenizer)]
    return _joined(_encode(prompts, tokenizer), texts, tokenizer, max_length, range(len(prompts)), cut)


def tokenise_choices(
    prompts: Sequence[str],
    choices: Sequence[Sequence[str]],
    labels: ArrayLike,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    score: Literal["sum", "mean"] = "sum",
) -> ChoiceSet:
    """Tokenise questions with options as `tokenise_sequences` does, but without an end token: an option goes on.

    All options of a question follow the same prompt: as much of it as the longest of them leaves within `max_length`.

    labels: (n,) integers, the place of the right option.

    Raises:
        DataError: prompts, choices and labels of unequal number, a question of fewer than two options, a label that
            is no option, an option without tokens, or one that leaves no room for a prompt's token.
    """
    right = np.asarray(labels, dtype=np.int64).reshape(-1)
    if not len(prompts) == len(choices) == len(right):
        counts = f"{len(prompts)} prompts, {len(choices)} lists of options and {len(right)} labels"
        raise DataError(f"{counts}: there must be equally many")
    for number, (options, label) in enumerate(zip(choices, right, strict=True)):
        if len(options) < 2:
            raise DataError(f"example {number} has {len(options)} option(s); a choice needs two at least")
        if not 0 <= label < len(options):
            raise DataError(f"example {number} has the label {label}, but only options 0 … {len(options) - 1}")
    owners = [number for number, options in enumerate(choices) for _ in options]
    heads = _encode(prompts, tokenizer)
    texts = _encode([option for options in choices for option in options], tokenizer)
    longest = [0] * len(choices)
    for owner, text in zip(owners, texts, strict=True):
        longest[owner] = max(longest[owner], len(text))
    joined = _joined(
        [heads[owner] for owner in owners], texts, tokenizer, max_length, owners, room_for=[longest[o] for o in owners]
    )
    first = torch.tensor([0, *np.cumsum([len(options) for options in choices])], dtype=torch.int64)
    return ChoiceSet(joined, first, torch.from_numpy(right.copy()), torch.arange(len(prompts)), score)


def _begin(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The begin token where the tokeniser sets one by itself."""
    alone: list[int] = list(tokenizer("")["input_ids"])
    return alone[:1] if tokenizer.bos_token_id is not None and alone[:1] == [tokenizer.bos_token_id] else []


def _joined(
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    owners: Sequence[int],
    cut: bool = False,
    room_for: Sequence[int] | None = None,
) -> SequenceSet:
    """Prompts cut on the left to what the answers leave of `max_length`, and the answers; owners: for messages.

    cut: see `tokenise_sequences`. room_for: how many tokens each prompt leaves for an answer, if it is not its own.
    """
    begin, end = _begin(tokenizer), tokenizer.eos_token_id
    stand_in = [] if end is None else [int(end)]
    parts: list[np.ndarray] = []
    kept: list[int] = []
    rooms = room_for if room_for is not None else [0] * len(answers)
    for owner, prompt, answer, wanted in zip(owners, prompts, answers, rooms, strict=True):
        whole = [*begin, *prompt] or stand_in
        if not answer or not whole:
            raise DataError(f"example {owner} has no {'prompt' if answer else 'answer'}; drop it or fill it in")
        if cut:
            answer = answer[: max_length - max(1, min(len(whole), max_length // 2))]
        length = max(len(answer), wanted)
        room = max_length - length
        if room < 1:
            raise DataError(
                f"example {owner}: its answer of {length} tokens leaves no room for a prompt within max_length "
                f"{max_length}; raise max_length or drop the example"
            )
        first = begin if room > len(begin) else []
        head = whole if len(whole) <= room else [*first, *whole[len(whole) - room + len(first) :]]
        parts.append(np.asarray([*head, *answer], dtype=np.int32))
        kept.append(len(head))
    ids = torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.int32))
    offsets = torch.tensor([0, *np.cumsum([len(part) for part in parts])], dtype=torch.int64)
    pad = tokenizer.pad_token_id
    return SequenceSet(
        ids=ids,
        offsets=offsets,
        prompts=torch.tensor(kept, dtype=torch.int64),
        rows=torch.arange(len(parts)),
        pad_id=pad if isinstance(pad, int) else 0,
    )


def _encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The token ids of each text, without any special token."""
    found: list[list[int]] = []
    for start in range(0, len(texts), _CHUNK):
        part: Any = tokenizer(
            list(texts[start : start + _CHUNK]),
            add_special_tokens=False,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            verbose=False,  # of its warning that a text is long, before it is cut
        )
        found += part["input_ids"]
    return found


def _positions(indices: ArrayLike | Tensor, count: int) -> Tensor:
    places = torch.as_tensor(np.asarray(indices), dtype=torch.int64).reshape(-1)
    if len(places) and (int(places.min()) < 0 or int(places.max()) >= count):
        raise DataError(f"indices run from {int(places.min())} to {int(places.max())} in a set of {count} examples")
    return places
