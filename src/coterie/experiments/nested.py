"""Compressed models of several sizes that are cut from one decomposition of a base model, kept on disk by content."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import filelock
import torch
from torch import nn

from coterie.assets.store import cache_root
from coterie.compress import METHODS, Compressor, cut, rank_layers
from coterie.compress.folder import Notes, is_compressed, save
from coterie.compress.pictured import with_images
from coterie.compress.ranks import check_ratio
from coterie.errors import ModelError, RunError
from coterie.experiments.bases import model_place
from coterie.experiments.calibrating import Calibration, Material, Windows
from coterie.experiments.compression import (
    compressor,
    layers_to_compress,
    no_loss,
    read_texts,
    require_plain,
    windows_for,
)
from coterie.experiments.config import CompressionSection
from coterie.models.language import is_language_network
from coterie.models.loading import load_whole
from coterie.models.weights import digest

_FORMAT = 1
_LOCK_SECONDS = 3600.0


def nested_models(
    model: str, ratios: Iterable[float], section: CompressionSection, texts: Material
) -> dict[float, Path]:
    """The folder of the model at each ratio, under the cache folder; made the first time, found there afterwards.

    All are slices of one decomposition at the largest ratio, so that the spaces of a smaller one lie in those of a
    larger one (FedSLM's specification, L6). What is found again has the same weights to start from, calibration text,
    method, options, layers and largest ratio.

    texts: to calibrate on where the section names none.

    Raises:
        ConfigError: a ratio outside (0, 1], an unknown method or option.
        DataError: too little text.
        ModelError: a model that does not load or is compressed already, layers that match nothing, a rank below 1.
        RunError: the disk refuses.
    """
    wanted = sorted(set(ratios))
    for ratio in wanted:
        check_ratio(ratio)
    how = compressor(section.method, section.options)
    place = model_place(model)
    if is_compressed(place):
        raise ModelError(f"{model} is compressed already; name the model that it was made from, or drop clients.ratios")
    network, companion = load_whole(place)
    names = layers_to_compress(network, companion, section.layers)
    require_plain(network, names)
    chosen = Calibration(section.text or "", section.samples, section.length, held_out=0, seed=section.seed)
    own = texts if section.text is None else read_texts(section.text)
    windows = windows_for(network, companion, own, chosen)
    key = _key(network, names, how, wanted[-1], windows)
    folders = {ratio: cache_root() / "compressed" / f"{key}-{ratio:g}" for ratio in wanted}
    if all(map(is_compressed, folders.values())):
        return folders
    try:
        (cache_root() / "compressed").mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache_root() / "compressed" / f".{key}.lock", timeout=_LOCK_SECONDS):
            missing = {ratio: folder for ratio, folder in folders.items() if not is_compressed(folder)}
            if missing:
                _make(network, companion, names, how, wanted[-1], windows, missing)
    except filelock.Timeout as error:
        raise RunError(f"{model}: another process has been compressing it for an hour; end it, then try again") from (
            error
        )
    except OSError as error:
        raise RunError(f"{cache_root()}: cannot be written ({error.strerror or error}); free space") from error
    return folders


def _make(
    network: nn.Module,
    companion: object,
    names: Sequence[str],
    how: Compressor,
    largest: float,
    windows: Windows,
    folders: dict[float, Path],
) -> None:
    loss = None if is_language_network(network) else no_loss
    with with_images(network, windows.features):
        ranking = rank_layers(network, names, how, windows.text, largest, loss=loss)
        for ratio, folder in folders.items():
            smaller = copy.deepcopy(network)
            made = cut(smaller, ranking, how, ratio, windows.text)
            notes = Notes(method_name(how), ratio, made.ranks, made.shared, dataclasses.asdict(how))  # type: ignore[call-overload]
            save(folder, smaller, companion, notes)


def _key(network: nn.Module, names: Sequence[str], how: Compressor, largest: float, windows: Windows) -> str:
    """A name for all that the factors follow from: 24 hexadecimal digits."""
    told = {
        "format": _FORMAT,
        "weights": digest(network),
        "layers": list(names),
        "method": [method_name(how), dataclasses.asdict(how)],  # type: ignore[call-overload]
        "largest": largest,
        "windows": list(windows.text.shape),
    }
    if windows.images:
        told["images"] = windows.images
    hashed = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=12)
    exact = windows.text if windows.text.is_floating_point() else windows.text.to(torch.int64)
    hashed.update(exact.contiguous().numpy().tobytes())
    return hashed.hexdigest()


def method_name(how: Compressor) -> str:
    """The name of a compressor in `coterie.compress.METHODS`."""
    return next(name for name, kind in METHODS.items() if kind is type(how))
