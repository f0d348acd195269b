"""The base model of a run, by the kind of its task, and the task's examples as tokens for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.assets import ASSETS, fetch
from coterie.data.images import ImageSet, Picture, image_set
from coterie.data.pictured import with_pictures
from coterie.data.sequences import (
    ChoiceSet,
    Classified,
    DataSet,
    SequenceSet,
    tokenise_choices,
    tokenise_sequences,
)
from coterie.data.tasks import Examples, ExampleSet, Images, Questions, Task
from coterie.data.tasks.language import spaced
from coterie.data.text import tokenise
from coterie.data.tiles import TiledSet, tiled_set
from coterie.errors import DataError, ModelError
from coterie.experiments.config import ModelSection
from coterie.maths.keys import Key
from coterie.models.image_bases import load_image_base, load_seeing_language_base
from coterie.models.loading import Base, load_base, load_language_base
from coterie.models.vision import Vision
from coterie.protocol import Traits


def model_place(name: str) -> str:
    """A folder or hub name; an asset's name stands for its folder, which is fetched the first time."""
    return str(fetch(name)) if name in ASSETS else name


def open_base(model: ModelSection, classes: int | None, head_key: Key) -> Base:
    """The base model of a configuration: a classifier of so many classes, or with None a language model.

    Raises:
        ModelError: as `load_base` and `load_language_base`.
    """
    place = model_place(model.base)
    if classes is None:
        return load_language_base(place, targets=model.targets, quantization=model.quantization)
    return load_base(
        place, targets=model.targets, num_labels=classes, head_key=head_key, quantization=model.quantization
    )


def open_image_base(model: ModelSection, classes: int, head_key: Key) -> Base:
    """The base model of a configuration as a classifier of images.

    Raises:
        ModelError: as `load_image_base`.
    """
    return load_image_base(
        model_place(model.base),
        targets=model.targets,
        num_labels=classes,
        image_size=model.image_size,
        head_key=head_key,
        quantization=model.quantization,
    )


def open_seeing_base(model: ModelSection) -> Base:
    """The base model of a configuration as a language model that sees.

    Raises:
        ModelError: as `load_seeing_language_base`.
    """
    return load_seeing_language_base(model_place(model.base), targets=model.targets, quantization=model.quantization)


def base_for(task: Task, model: ModelSection, head_key: Key) -> Base:
    """The base model that a task needs: a classifier for texts or images, else a language model without a head.

    Raises:
        ModelError: a model that is not of this kind, or does not load.
    """
    if task.kind == "classification":
        return open_base(model, task.num_classes, head_key)
    if task.kind == "images":
        return open_image_base(model, task.num_classes, head_key)
    try:
        if getattr(task.train, "pictures", None) is not None:
            return open_seeing_base(model)
        return open_base(model, None, head_key)
    except ModelError as error:
        raise ModelError(f"task {task.name!r} ({task.kind}) needs a language model: {error}") from error


def check_method(traits: Traits, base: Base) -> None:
    """Refuse a method that patches the base where an adapted layer is quantised or factored, and can hold no patch.

    Raises:
        ModelError: naming method, layer and the way out.
    """
    if traits.changes_base and base.quantised:
        layer = base.quantised[0]
        kind = type(base.slots.layers[layer].base).__name__
        raise ModelError(
            f"{traits.title} changes the base model's weights, and layer {layer} is quantised ({kind}), so nothing can "
            "be merged into it; load the base unquantised (model.quantization=null), or choose a method that leaves "
            "the base alone"
        )
    if traits.changes_base and base.factored:
        raise ModelError(
            f"{traits.title} changes the base model's weights, and layer {base.factored[0]} of this compressed base "
            "holds two factors, so nothing can be merged into it; take the model that it was compressed from, or a "
            "method that leaves the base alone"
        )


def tokens(task: Task, examples: ExampleSet, base: Base, max_length: int) -> DataSet:
    """Examples of the task as they are scored: texts or images with classes, questions, or prompts with answers.

    A text, or a prompt, that is too long is cut to `max_length` tokens; so is an answer that is learnt, but no choice.
    Classes are numbered as the task's are, also where `examples` lack some.

    Raises:
        DataError: an example that cannot be tokenised, or a choice that leaves no room for a prompt.
    """
    if isinstance(examples, Examples):
        labels, count = examples.labels, task.num_classes
        return tokenise(examples.texts, examples.pairs, labels, base.tokenizer, max_length, num_classes=count)
    if isinstance(examples, Images):
        if (sees := base.vision) is None:
            raise ModelError(f"task {task.name!r} is of images, which this base model does not take")
        return image_set(
            examples.pictures,
            examples.labels,
            num_classes=task.num_classes,
            size=sees.size,
            mean=sees.mean,
            std=sees.std,
            tokens=sees.tokens,
        )
    if isinstance(examples, Questions):
        pairs = zip(examples.prompts, examples.choices, strict=True)
        options = [[spaced(prompt, option) for option in listed] for prompt, listed in pairs]
        chosen = tokenise_choices(
            examples.prompts, options, examples.labels, base.tokenizer, max_length, score=examples.score
        )
        return chosen if examples.pictures is None else questions_shown(chosen, examples.pictures, base)
    answers = [spaced(*pair) for pair in zip(examples.prompts, examples.answers, strict=True)]
    made = tokenise_sequences(examples.prompts, answers, base.tokenizer, max_length, cut=True)
    if examples.pictures is None:
        return made
    return shown(made, images_for(examples.pictures, sight_for(base)), torch.arange(len(examples)), base)


def images_for(pictures: Sequence[Picture], sees: Vision) -> ImageSet | TiledSet:
    """Images as a language model is shown them: squares of one size, or each in its own shape where it takes tiles.

    Raises:
        DataError: an image that cannot be read.
    """
    if sees.tiling is not None:
        return tiled_set(pictures, sees.tiling, sees.mean, sees.std)
    return image_set(
        pictures,
        np.zeros(len(pictures), np.int64),
        num_classes=1,
        size=sees.size,
        mean=sees.mean,
        std=sees.std,
        tokens=sees.places,
    )


def sight_for(base: Base) -> Vision:
    """What images a language model takes; raises ModelError for one that sees none."""
    if base.vision is None or base.vision.placeholder is None:
        raise ModelError(
            "this task is about images, which this base model does not see; choose one of the make of LLaVA or "
            "LLaVA-NeXT"
        )
    return base.vision


def shown(data: SequenceSet, images: ImageSet | TiledSet, owners: Tensor, base: Base) -> SequenceSet:
    """Sequences with the image of each in front; owners: (stored,) which of `images` each is about.

    Raises:
        DataError: a text with the token that stands for images.
        ModelError: a base that sees no images, or an image that with its text is longer than what it can see.
    """
    sees = sight_for(base)
    assert sees.placeholder is not None
    require_plain_text(data, sees.placeholder)
    made = with_pictures(data, images, owners, sees.placeholder, base.tokenizer.bos_token_id)
    config: Any = base.network.config
    most = getattr(config.text_config, "max_position_embeddings", None)
    longest = int(made.lengths.max()) if len(made) else 0
    if most is not None and longest > most:
        place = int(made.lengths.argmax())
        own = int(images.places[owners[made.rows[place]]])
        raise ModelError(
            f"example {int(owners[made.rows[place]])}: its image takes {own} places, and with its text {longest}, but "
            f"this model sees {most}; lower model.max_length, or leave out images of such a shape"
        )
    return made


def questions_shown(questions: ChoiceSet, pictures: Sequence[Picture], base: Base) -> ChoiceSet:
    """All questions of a store with the image of each in front of its options; raises as `images_for` and `shown`."""
    owners = torch.repeat_interleave(torch.arange(len(questions)), torch.diff(questions.first))
    images = images_for(pictures, sight_for(base))
    return replace(questions, options=shown(questions.options, images, owners, base))


def require_plain_text(data: SequenceSet, placeholder: int) -> None:
    """Raises DataError where a text holds the image token itself, for which there would be no image."""
    found = (data.ids == placeholder).nonzero()
    if len(found):
        owner = int(torch.searchsorted(data.offsets, int(found[0]), right=True)) - 1
        raise DataError(f"sequence {owner}: its text holds the model's image token; take that out of the text")


def to_train_on(data: DataSet) -> Classified | SequenceSet:
    """What a model is trained on where `data` are what it is scored on: of questions, the right options alone."""
    return data.answers() if isinstance(data, ChoiceSet) else data
