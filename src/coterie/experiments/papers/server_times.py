"""Seconds of one aggregation of a round, over layers of a model's real shapes, with random factors, on one thread."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.experiments.folders import write_whole
from coterie.experiments.papers.definition import Definition
from coterie.experiments.papers.reading import Cell, cell
from coterie.maths.keys import Key, root_key
from coterie.maths.lowrank import best_rank
from coterie.protocol import weighted_sum

Pair = tuple[Tensor, Tensor]


def measured(
    definition: Definition, config: Mapping[str, Any], place: Path, seed: int, say: Callable[[str], None]
) -> dict[str, dict[str, dict[str, Cell]]]:
    """Cells by row, model and the figure `seconds`: the median of the repeats.

    `config`: whole (every layer is computed, else one of each shape, times their number), repeats, dense_repeats,
    dtype of the linear algebra. What `place` holds from a run before is taken from there.

    Raises:
        ConfigError: `place` holds times of other settings.
    """
    settings = {"config": dict(config), "models": definition.models, "seed": seed}
    kept = _kept(place, settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for model, section in definition.models.items():
            clients = random_factors(section, root_key(seed).fold("server-times", model), whole=bool(config["whole"]))
            for row, entry in definition.rows.items():
                if f"{row}/{model}" not in kept:
                    seconds = _seconds(entry.operation, section, clients, config)
                    kept[f"{row}/{model}"] = seconds
                    write_whole(place, json.dumps({**settings, "seconds": kept}, indent=1) + "\n")
                    say(f"{definition.columns[model].title}: {entry.title}: {seconds:.4g} s")
    finally:
        torch.set_num_threads(threads)
    return {
        row: {model: {"seconds": cell({str(seed): kept[f"{row}/{model}"]})} for model in definition.models}
        for row in definition.rows
    }


def random_factors(section: Mapping[str, Any], key: Key, *, whole: bool) -> list[tuple[int, list[Pair]]]:
    """How often a layer counts, and its clients' factors B_i (m, r), A_i (r, n) in float32, normal draws.

    One entry for each layer where `whole`, else one for each shape.
    """
    made = []
    for index, (shape, count) in enumerate(section["layers"]):
        for layer in range(count if whole else 1):
            own, rank = key.fold(index, layer), int(section["rank"])
            pairs = [
                (own.fold("B", i).normal((shape[0], rank)), own.fold("A", i).normal((rank, shape[1])))
                for i in range(int(section["clients"]))
            ]
            made.append((1 if whole else int(count), pairs))
    return made


def server_step(
    operation: Mapping[str, Any], pairs: Sequence[Pair], rank: int, dtype: torch.dtype, key: Key
) -> list[Tensor]:
    """One layer's aggregation under uniform weights, as float32 tensors: the operation `kind` names.

    average: the mean of the first `factors` of (B, A). dense: the m x n mean product and its SVD. exact, randomised:
    `maths.lowrank.best_rank`, the latter with `oversample` directions more than the rank.

    Raises:
        ConfigError: no such kind.
    """
    weight = 1 / len(pairs)
    kind = operation["kind"]
    if kind == "average":
        return [weighted_sum([(weight, pair[which]) for pair in pairs]) for which in range(operation["factors"])]
    if kind == "dense":
        B = torch.cat([B.to(dtype) for B, _ in pairs], dim=1)
        A = torch.cat([A.to(dtype) for _, A in pairs]) * weight
        U, S, Vh = torch.linalg.svd(B @ A, full_matrices=False)
        return [(U[:, :rank] * S[:rank]).float(), Vh[:rank].float()]
    if kind not in ("exact", "randomised"):
        raise ConfigError(f"there is no server operation {kind!r}; known: average, dense, exact, randomised")
    best = best_rank(
        pairs,
        [weight] * len(pairs),
        rank,
        method=kind,
        oversample=int(operation.get("oversample", 0)),
        key=key,
        dtype=dtype,
    )
    return [best.B, best.A]


def _seconds(
    operation: Mapping[str, Any],
    section: Mapping[str, Any],
    clients: Sequence[tuple[int, list[Pair]]],
    config: Mapping[str, Any],
) -> float:
    dtype: torch.dtype = getattr(torch, operation.get("dtype", config["dtype"]))
    rank, key = int(section["rank"]), root_key(0).fold("sketch")
    dense = operation["kind"] == "dense"
    if not dense:  # the first call pays for loading what the later ones find loaded
        server_step(operation, clients[0][1], rank, dtype, key)
    rounds = []
    for _ in range(int(config["dense_repeats" if dense else "repeats"])):
        total = 0.0
        for count, pairs in clients:
            start = time.perf_counter()
            server_step(operation, pairs, rank, dtype, key)
            total += count * (time.perf_counter() - start)
        rounds.append(total)
    return statistics.median(rounds)


def _kept(place: Path, settings: Mapping[str, Any]) -> dict[str, float]:
    """The times that a run before has left; raises ConfigError when it had other settings."""
    if not place.is_file():
        return {}
    there = json.loads(place.read_text(encoding="utf-8"))
    seconds = there.pop("seconds", None)
    if seconds is None or there != json.loads(json.dumps(settings)):
        raise ConfigError(f"{place} holds times of other settings; choose another folder with --out, or remove it")
    return dict(seconds)
