"""A model compressed along real text: which text, what is measured before and after, what is written."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from coterie.compress import METHODS, Compressor, cut, rank_layers
from coterie.compress.calibration import LANGUAGE
from coterie.compress.folder import Notes, check_new, is_compressed, save, stored_dtype
from coterie.compress.pictured import with_images
from coterie.compress.ranks import check_ratio
from coterie.compress.text import calibration_and_held_out, last_states, perplexity, windows_of
from coterie.data.files import read_text
from coterie.data.images import normalised, stored_pixels
from coterie.data.tasks import Images, load_task
from coterie.errors import ConfigError, DataError, ModelError, nearest
from coterie.experiments.bases import model_place
from coterie.experiments.calibrating import Calibration, Material, Seen, Windows, check_length, pictured_windows, seen
from coterie.maths.keys import root_key
from coterie.models.language import is_language_network
from coterie.models.loading import load_whole
from coterie.models.seeing import Seeing, language_layers
from coterie.models.targets import select_layers
from coterie.models.vision import Vision
from coterie.models.weights import cast, plain_weight

COMPUTED = torch.float32
"""In which the network runs, whatever its checkpoint is in."""

Advance = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and of how much."""


def compressor(method: str, options: Mapping[str, Any]) -> Compressor:
    """A compressor with its options; values are converted to the types that its dataclass declares.

    Raises:
        ConfigError: no such method or option, or a value of another type.
    """
    if method not in METHODS:
        raise ConfigError(f"there is no compressor {method!r}{nearest(method, METHODS)}")
    kind = METHODS[method]
    hints = get_type_hints(kind)
    known = {field.name: hints[field.name] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            there = nearest(name, known) if known else "; it has none"
            raise ConfigError(f"compressor {method!r} has no option {name!r}{there}")
        try:
            values[name] = TypeAdapter(known[name]).validate_python(value)
        except ValidationError as error:
            said = error.errors(include_url=False)[0]["msg"].removeprefix("Input should be ")
            raise ConfigError(f"option {name} of {method!r}: must be {said}, not {value!r}") from None
    return kind(**values)


def compress_model(
    model: str,
    folder: str | Path,
    *,
    ratio: float,
    method: str = "svd-llm",
    options: Mapping[str, Any] | None = None,
    layers: str | Sequence[str] = "all-linear",
    calibration: Calibration | None = None,
    device: str = "cpu",
    advance: Advance | None = None,
) -> Notes:
    """Compress a model and write it, with what was measured, to a new folder that this package loads like any other.

    It is decomposed and measured in float32, and written in the dtype of the checkpoint that it comes from.

    Args:
        model: a folder, an asset's name or a hub name.
        folder: a new one.
        ratio: the share of the chosen layers' parameters that is kept.
        method: one of `coterie.compress.METHODS`; options: of its dataclass.
        layers: as `select_layers`; of all linear layers, those in the network's blocks.
        advance: see `Advance`.

    Returns:
        What `compression.json` holds. figures: bytes, in the dtype of the files, and parameters before and after;
        perplexity of a decoder, or how far an encoder's last hidden states move, on held-out text; output error of each
        layer on the calibration text.

    Raises:
        ConfigError: a ratio outside (0, 1], an unknown method, option or task, windows longer than the model takes.
        DataError: too little text, or text that cannot be read.
        ModelError: a model that does not load or is compressed already, layers that match nothing or are quantised, a
            rank below 1, a folder that is there already.
        RunError: a folder that cannot be made, told before anything is computed, or a disk that refuses later.
    """
    check_ratio(ratio)
    how, chosen, target = compressor(method, options or {}), calibration or Calibration(), Path(folder)
    check_new(target)
    texts = read_texts(chosen.text)
    place = model_place(model)
    if is_compressed(place):
        raise ModelError(f"{model} is compressed already; compress the model that it was made from")
    network, companion = load_whole(place)
    stored = stored_dtype(place)
    names = layers_to_compress(network, companion, layers)
    require_plain(network, names)
    tell = advance or (lambda what, done, total: None)
    try:
        network.to(device)
    except (RuntimeError, AssertionError) as error:  # torch's own words for a device that is not there
        raise ConfigError(f"device {device!r}: {str(error).splitlines()[0]}") from error
    windows = windows_for(network, companion, texts, chosen)
    text, held = windows.text, windows.held

    started = time.monotonic()
    language = is_language_network(network)
    loss = None if language else no_loss
    with with_images(network, windows.features):
        ranking = rank_layers(network, names, how, text, ratio, loss=loss, advance=_stage(tell, "decomposing"))
        seconds = time.monotonic() - started
        before = _measured(network, held, language, _stage(tell, "measuring the model"))
        sizes = _bytes(network, stored)
        started = time.monotonic()
        made = cut(network, ranking, how, ratio, text, advance=_stage(tell, "fitting"))
        seconds += time.monotonic() - started
        del ranking
        cast(network, stored)
        cast(network, COMPUTED)  # what is measured is what is written, rounded as it is there
        after = _measured(network, held, language, _stage(tell, "measuring what is left"))
    cast(network, stored)
    notes = Notes(
        method=method,
        ratio=ratio,
        ranks=made.ranks,
        shared=made.shared,
        options=dataclasses.asdict(how),  # type: ignore[call-overload]
        figures={
            "model": model,
            "dtype": str(stored).removeprefix("torch."),
            "bytes": {"before": sizes, "after": _bytes(network, stored)},
            "parameters_of_these_layers": {"before": made.parameters_before, "after": made.parameters},
            **_compared(before, after, language, held),
            "output_error": made.errors,
            "calibration": {**dataclasses.asdict(chosen), "tokens": text.numel()},
            "seconds": round(seconds, 1),
        },
    )
    save(target, network, companion, notes)
    return notes


def read_texts(text: str) -> Material:
    """The texts of a .txt file, parted by blank lines, or the training texts or images of a task, in order.

    Of a task without a test set of its own, what every federation tests on is left out (see `load_task`).

    Raises:
        ConfigError: no such task.
        DataError: a file that cannot be read, or a task without data.
    """
    if Path(text).suffix.lower() in (".txt", ".md"):
        parts = read_text(Path(text)).split("\n\n")
    else:
        train = load_task(text, seed_key=root_key(0)).train
        if isinstance(train, Images):
            return train.pictures
        if pairs := seen(train):
            return pairs
        parts = [" ".join(content).replace("\x1f", " ") for content in train.contents()]
    return [f"{part.strip()}\n" for part in parts if part.strip()]


def windows_for(network: nn.Module, companion: Any, material: Material, chosen: Calibration) -> Windows:
    """Windows to calibrate on, and those held out: of text, of images, or of both where a model takes both.

    companion: as `load_whole` gives it. A language model that sees may be calibrated on text alone, if that is asked.

    Raises:
        ConfigError: windows longer than the model takes.
        DataError: too little material, or such as the model does not take.
    """
    if isinstance(companion, Vision):
        return _images_for(companion, material, chosen)
    pairs = [part for part in material if isinstance(part, Seen)]
    if isinstance(companion, Seeing) and pairs and len(pairs) == len(material):
        return pictured_windows(network, companion, pairs, chosen)
    words = [part for part in material if isinstance(part, str)]
    if len(words) < len(material):
        kind = "a language model that sees is calibrated on text, or on questions about images"
        plain = "a model of texts is calibrated on text"
        raise DataError(
            f"{kind if isinstance(companion, Seeing) else plain}; name a task of such, or a .txt file of text"
        )
    check_length(network, chosen.length)
    windows = windows_of(companion.tokenizer if isinstance(companion, Seeing) else companion, words, chosen.length)
    held = math.ceil(chosen.held_out / (chosen.length - 1))
    return Windows(*calibration_and_held_out(windows, chosen.samples, held, root_key(chosen.seed).fold("calibration")))


def _images_for(sees: Vision, material: Material, chosen: Calibration) -> Windows:
    """Images (N, 3, size, size) to calibrate on, and those held out: as many as hold the tokens asked for."""
    pictures = [part for part in material if isinstance(part, bytes | np.ndarray)]
    if len(pictures) < len(material):
        raise DataError("a model of images is calibrated on images; name a task of images, such as mnist")
    held, key = math.ceil(chosen.held_out / sees.tokens), root_key(chosen.seed).fold("calibration")
    places = torch.arange(len(pictures))[:, None]
    taken = calibration_and_held_out(places, chosen.samples, held, key)
    shown = (stored_pixels([pictures[i] for i in part.flatten().tolist()], sees.size) for part in taken)
    first, second = (normalised(pixels, sees.size, sees.mean, sees.std) for pixels in shown)
    return Windows(first, second)


def layers_to_compress(network: nn.Module, companion: Any, layers: str | Sequence[str]) -> list[str]:
    """The layers that are meant; of a language model that sees, those of the language model.

    Raises:
        ModelError: as `select_layers` and `language_layers`, or layers beside the language model.
    """
    if not isinstance(companion, Seeing):
        return list(select_layers(network, layers))
    found = language_layers(network, layers)
    beside = [name for name in found if LANGUAGE not in name.split(".")]
    if beside:
        raise ModelError(f"layer {beside[0]} lies beside the language model, of which alone the layers are compressed")
    return found


def require_plain(network: nn.Module, names: Sequence[str]) -> None:
    """Raises ModelError naming a layer that holds no plain matrix."""
    for name in names:
        module = network.get_submodule(name)
        if plain_weight(module) is None:
            raise ModelError(f"layer {name} is a {type(module).__name__}, which holds no plain matrix to decompose")


def no_loss(network: nn.Module, windows: Tensor) -> Tensor:
    """In place of a loss that a network does not have: raises ModelError naming compressors that need none."""
    raise ModelError(
        f"{type(network).__name__} is no language model, and this method asks for the loss of one; choose svd, asvd, "
        "svd-llm, svd-llm-v2, or dobi without learned positions"
    )


def _measured(network: nn.Module, held: Tensor, language: bool, advance: Callable[[int, int], None]) -> Any:
    """Perplexity and its tokens of a decoder, the last hidden states of an encoder; None without held-out text."""
    if not len(held):
        return None
    return perplexity(network, held, advance) if language else last_states(network, held, advance)


def _compared(before: Any, after: Any, language: bool, held: Tensor) -> dict[str, Any]:
    if before is None:
        return {}
    if language:
        return {"perplexity": {"before": before[0], "after": after[0], "tokens": after[1]}}
    moved = float(torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before))
    return {"hidden_states": {"relative_error": moved, "tokens": held.numel()}}


def _bytes(network: nn.Module, dtype: torch.dtype) -> int:
    """Of all parameters in this dtype, each once."""
    return sum(value.numel() for value in network.parameters()) * dtype.itemsize


def _stage(tell: Advance, what: str) -> Callable[[int, int], None]:
    return lambda done, total: tell(what, done, total)
