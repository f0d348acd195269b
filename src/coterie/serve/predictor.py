"""A trained model that answers: classes of texts or images, or what a language model goes on with or chooses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.data.batches import evaluation_batches
from coterie.data.images import Picture, image_set
from coterie.data.sequences import SequenceSet, tokenise_choices, tokenise_sequences
from coterie.data.tasks.language import spaced
from coterie.data.text import tokenise
from coterie.errors import DataError, ModelError
from coterie.experiments.bases import images_for, questions_shown, shown, sight_for
from coterie.models.loading import Base, inputs_of
from coterie.protocol import Model
from coterie.training.evaluation import alone, predict
from coterie.training.mixing import share_out

BATCH = 32

Shown = str | Path | Picture
"""A text; or, for a model of images, the path of an image file, what is in one, or pixels."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """A base with an adapter and, of a classifier, a head. Made by `coterie.load`; for one thread at a time.

    labels: the classes' names in the order of the logits, none of a language model. max_length: tokens after which a
    text is cut, of a pair the longer text first, of a prompt at its beginning. context: the most tokens that the base
    can see. Texts are batched by length, and answers come in the order of the texts: neither the batch size nor the
    company changes one beyond the rounding of its dtype. Nothing is written to disk.
    """

    base: Base = field(repr=False)
    model: Model = field(repr=False)
    head: Mapping[str, Tensor] | None = field(repr=False)
    labels: tuple[str, ...]
    max_length: int
    context: int

    @property
    def is_language(self) -> bool:
        """Whether this goes on with prompts (`generate`, `choose`) instead of naming classes (`predict`)."""
        return self.base.is_language

    def logits(self, texts: Iterable[Shown], pairs: Iterable[str] | None = None, *, batch_size: int = BATCH) -> Tensor:
        """Logits (n, C) float32 of n texts, or of texts with their second texts `pairs`; on the CPU.

        White space round a text is dropped, as it was in training. A model of images takes these in place of texts.

        Raises:
            ModelError: a language model.
            DataError: something else than a list of strings, pairs of another number, a text of no tokens, an image
                that cannot be read.
        """
        if self.is_language:
            raise ModelError("this is a language model, which has no classes; use generate or choose")
        if self.base.vision is not None:
            return self._of_images(texts, pairs, batch_size)
        first = [text.strip() for text in _strings(texts, "texts")]
        second = None if pairs is None else [text.strip() for text in _strings(pairs, "pairs")]
        data = tokenise(
            first,
            second,
            np.zeros(len(first), np.int64),
            self.base.tokenizer,
            self.max_length,
            num_classes=len(self.labels),
            cached=False,
        )
        if not first:
            return torch.empty(0, len(self.labels))
        return predict(self.base, self.model, self.head, data, batch_size).logits

    def probabilities(
        self, texts: Iterable[Shown], pairs: Iterable[str] | None = None, *, batch_size: int = BATCH
    ) -> Tensor:
        """The classes' probabilities (n, C) float32, by softmax; see `logits`."""
        return self.logits(texts, pairs, batch_size=batch_size).softmax(dim=1)

    def predict(
        self, texts: Iterable[Shown], pairs: Iterable[str] | None = None, *, batch_size: int = BATCH
    ) -> list[str]:
        """The name of each text's, or image's, likeliest class; see `logits`."""
        found = self.logits(texts, pairs, batch_size=batch_size).argmax(dim=1)
        return [self.labels[place] for place in found.tolist()]

    def generate(
        self,
        prompts: Iterable[str],
        max_new_tokens: int = 64,
        *,
        pictures: Sequence[Picture] | None = None,
        batch_size: int = BATCH,
    ) -> list[str]:
        """What a language model goes on with after each prompt, greedily: up to its end token, or `max_new_tokens`.

        Prompts are tokenised as in training (`coterie.data.sequences.tokenise_sequences`). Special tokens, and the
        space that parts an answer from its prompt, are left out. pictures: the image that each prompt is about, for a
        model that sees.

        Raises:
            ModelError: a classifier, a tokeniser without an end token, or more new tokens than the base can see.
            DataError: something else than a list of strings, fewer than one new token, or not one image for each
                prompt.
        """
        self._language("predict")
        if max_new_tokens < 1:
            raise DataError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        given = _strings(prompts, "prompts")
        images = None if pictures is None else images_for(_each(pictures, len(given)), sight_for(self.base))
        taken = 0 if images is None else max(images.places.tolist(), default=0)
        room = min(self.max_length, self.context - max_new_tokens - taken)
        if room < 1:
            image = f", {taken} of an image" if taken else ""
            raise ModelError(
                f"max_new_tokens is {max_new_tokens}, but this model sees no more than {self.context} tokens with the "
                f"prompt{image} among them; lower it"
            )
        end = self.base.tokenizer.eos_token_id
        if end is None:
            raise ModelError("the tokeniser has no end token, so that an answer would not end; name one in its folder")
        # Of empty answers, so that the end token is all that follows a prompt.
        data = tokenise_sequences(given, [""] * len(given), self.base.tokenizer, room + 1)
        if images is not None:
            data = shown(data, images, torch.arange(len(given)), self.base)
        said = [""] * len(given)
        for batch in evaluation_batches(data.prompts, batch_size):
            answers = self._continued(data, batch.indices.tolist(), int(end), max_new_tokens)
            for place, answer in zip(batch.indices.tolist(), answers, strict=True):
                said[place] = answer if given[place][-1:].isspace() else answer.removeprefix(" ")
        return said

    def choice_scores(
        self,
        prompts: Iterable[str],
        choices: Sequence[str] | Sequence[Sequence[str]],
        *,
        score: Literal["sum", "mean"] = "sum",
        pictures: Sequence[Picture] | None = None,
        batch_size: int = BATCH,
    ) -> Tensor:
        """The log-probability of each choice's tokens after its prompt, (n, C) float32; -inf where there is no choice.

        choices: of all prompts, or for each prompt its own. score: the sum over a choice's tokens, or their mean, which
        does not favour short choices. As in training, a space comes between prompt and choice unless one of them brings
        white space there. pictures: as of `generate`.

        Raises:
            ModelError: a classifier, or images for a model that sees none.
            DataError: something else than lists of strings, fewer than two choices, or not one image for each prompt.
        """
        self._language("predict")
        given = _strings(prompts, "prompts")
        offered = _choices(choices, len(given))
        if not given:
            return torch.empty(0, max(map(len, offered), default=1))
        options = [[spaced(prompt, choice) for choice in own] for prompt, own in zip(given, offered, strict=True)]
        data = tokenise_choices(
            given, options, np.zeros(len(given), np.int64), self.base.tokenizer, self.max_length, score=score
        )
        if pictures is not None:
            data = questions_shown(data, _each(pictures, len(given)), self.base)
        return predict(self.base, self.model, None, data, batch_size).logits

    def choose(
        self,
        prompts: Iterable[str],
        choices: Sequence[str] | Sequence[Sequence[str]],
        *,
        score: Literal["sum", "mean"] = "sum",
        pictures: Sequence[Picture] | None = None,
        batch_size: int = BATCH,
    ) -> list[str]:
        """The likeliest choice after each prompt, of equal ones the first; see `choice_scores`."""
        given = _strings(prompts, "prompts")
        offered = _choices(choices, len(given))
        scores = self.choice_scores(given, offered, score=score, pictures=pictures, batch_size=batch_size)
        found = scores.argmax(dim=1)
        return [options[place] for options, place in zip(offered, found.tolist(), strict=True)]

    def _of_images(self, images: Iterable[Shown], pairs: Iterable[str] | None, batch_size: int) -> Tensor:
        sees = self.base.vision
        assert sees is not None
        if pairs is not None:
            raise DataError("images have no second texts; leave pairs out")
        if isinstance(images, str | Path | bytes):
            raise DataError("images is one image; give a list of them")
        pictures = [_opened(image) for image in images]
        if not pictures:
            return torch.empty(0, len(self.labels))
        data = image_set(
            pictures,
            np.zeros(len(pictures), np.int64),
            num_classes=len(self.labels),
            size=sees.size,
            mean=sees.mean,
            std=sees.std,
            tokens=sees.tokens,
        )
        return predict(self.base, self.model, self.head, data, batch_size).logits

    def _language(self, instead: str) -> None:
        if not self.is_language:
            raise ModelError(f"this is a classifier, which only names classes; use {instead}")

    @torch.no_grad()
    def _continued(self, data: SequenceSet, places: Sequence[int], end: int, count: int) -> list[str]:
        """The answers to the prompts at `places`, padded on the left: there the newest token is the last of all."""
        base = self.base
        starts, lengths = data.offsets[places], data.prompts[places]
        columns = torch.arange(int(lengths.max())) - (lengths.max() - lengths)[:, None]
        ids = torch.where(columns < 0, end, data.ids[(starts[:, None] + columns.clamp(min=0))].long())
        stacked, _ = alone(base, self.model, None)
        with base.slots.bound(1, stacked, None):
            if self.model.mix is not None:
                prompts = data.select(places)
                longest = int(prompts.lengths.max())
                ends = torch.arange(len(places)) * longest + lengths - 1  # where the answers begin
                share_out(base, prompts.batch(range(len(places)), longest), [ends.to(base.device)])
            given = {"input_ids": ids, "attention_mask": (columns >= 0).long()}
            given |= data.shown(places)
            whole = base.network.generate(**inputs_of(base, given), max_new_tokens=count)  # type: ignore[operator]
        answers: list[str] = base.tokenizer.batch_decode(whole[:, ids.shape[1] :], skip_special_tokens=True)
        return answers


def _each(pictures: Sequence[Picture], count: int) -> Sequence[Picture]:
    if len(pictures) != count:
        raise DataError(f"{len(pictures)} images for {count} prompts: there must be one for each")
    return pictures


def _opened(image: Shown) -> Picture:
    if not isinstance(image, str | Path):
        return image
    try:
        return Path(image).expanduser().read_bytes()
    except (OSError, ValueError) as error:
        raise DataError(f"{image}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _strings(given: Iterable[Any], name: str) -> list[str]:
    """A list of the texts given; one text alone would be taken for a list of its letters."""
    if isinstance(given, str):
        raise DataError(f"{name} is one text; give a list of them, such as [{given[:20]!r}]")
    found = list(given)
    for place, text in enumerate(found):
        if not isinstance(text, str):
            raise DataError(f"{name}[{place}] is {text!r}, which is no text; drop it or fill it in")
    return found


def _choices(choices: Sequence[str] | Sequence[Sequence[str]], count: int) -> list[list[str]]:
    """The choices of each of `count` prompts."""
    if isinstance(choices, str):
        raise DataError(f"choices is one text; give a list of them, such as [{choices[:20]!r}, …]")
    listed = list(choices)
    if all(isinstance(choice, str) for choice in listed):
        return [_strings(listed, "choices")] * count
    if len(listed) != count:
        raise DataError(f"{count} prompts and {len(listed)} lists of choices: there must be equally many")
    return [_strings(own, f"choices[{place}]") for place, own in enumerate(listed)]
