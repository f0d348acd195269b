"""Chooses how a run is executed, once, by a short timing on this device; the plan is then stored with the run."""

from __future__ import annotations

import copy
import time
from typing import Literal

import numpy as np
import torch

from coterie.data.sequences import DataSet
from coterie.errors import DataError, ModelError
from coterie.maths.keys import Key, root_key
from coterie.models.loading import Base
from coterie.protocol import Fit, LowRank, Model
from coterie.training.asks import Ask, Plan, TrainSettings
from coterie.training.fit import fit

_SECONDS = 0.5  # for each way that is timed
_CLEARLY = 0.9  # a lower precision, or another attention, must take less than this part of the time before it
_STACK_ELEMENTS = {"cpu": 200_000, "cuda": 16_000_000}
_MOST_CLIENTS = 16


def choose_plan(
    base: Base,
    data: DataSet,
    settings: TrainSettings,
    *,
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto",
    attention: Literal["auto", "eager", "sdpa"] = "auto",
    threads: int = 1,
    clients_per_step: Literal["auto"] | int = "auto",
    device: str = "cpu",
    rank: int = 8,
) -> Plan:
    """The plan for training on `data`-like examples; what is given is kept, what is "auto" is settled.

    dtype and attention: the fastest of float32 and bfloat16, eager and sdpa, timed on a few training steps of a
    typical batch (two seconds in all for a small encoder, half a minute for a language model of 135 M parameters;
    nothing is timed where one way remains). bfloat16 is tried only for dtype="auto"; on a CPU with eager attention
    alone, which is several times faster there than sdpa.
    clients_per_step: by the size of a batch's activations, since stacking pays where a single client's matrices
    are too small to keep the processor busy. rank: the largest of any client, to which factors are padded.
    The base is left as it was.

    Raises:
        DataError: no examples.
        ModelError: no way that was asked for works on this device.
    """
    if len(data) == 0:
        raise DataError("there are no examples to choose an execution plan on")
    torch.set_num_threads(threads)
    ways = _ways(dtype, attention, device)
    chosen = ways[0] if len(ways) == 1 else _fastest(base, data, settings, ways, threads, device, rank)
    stacked = _stack_size(base, data, settings, device) if clients_per_step == "auto" else clients_per_step
    return _plan(chosen, threads, stacked, device, rank)


def _ways(dtype: str, attention: str, device: str) -> list[tuple[str, str]]:
    attentions = ["sdpa", "eager"] if attention == "auto" else [attention]
    if dtype != "auto":
        plainest = attention == "auto" and (dtype == "float64" or (dtype == "bfloat16" and device == "cpu"))
        return [(dtype, "eager")] if plainest else [(dtype, a) for a in attentions]
    halved = [a for a in attentions if a == "eager" or device != "cpu"]
    return [("float32", a) for a in attentions] + [("bfloat16", a) for a in halved]


def _plan(way: tuple[str, str], threads: int, clients: int, device: str, rank: int) -> Plan:
    dtype, attention = way
    return Plan(dtype, attention, threads, clients, rank, device)  # type: ignore[arg-type]


def _fastest(
    base: Base,
    data: DataSet,
    settings: TrainSettings,
    ways: list[tuple[str, str]],
    threads: int,
    device: str,
    rank: int,
) -> tuple[str, str]:
    """The first way, unless a later one is clearly faster."""
    best: tuple[str, str] | None = None
    best_time = float("inf")
    failure: ModelError | None = None
    # A copy is cast step by step, and never back: ways are in order of falling precision.
    trial = copy.deepcopy(base, {id(base.tokenizer): base.tokenizer})
    for way in ways:
        try:
            trial.prepare(*way, device)
            taken = _time(trial, data, settings, _plan(way, threads, 1, device, rank))
        except ModelError as error:
            failure = error
            continue
        if best is None or taken < _CLEARLY * best_time:
            best, best_time = way, taken
    if best is None:
        assert failure is not None
        raise failure
    return best


def _time(base: Base, data: DataSet, settings: TrainSettings, plan: Plan) -> float:
    """Seconds of one training step on a typical batch: the least of a few, after one to warm up."""
    ask = _typical(base, data, settings, root_key(0).fold("probe"), max(1, plan.padding_rank))
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < 2 or (time.perf_counter() < end and len(times) < 6):
        start = time.perf_counter()
        (done,) = fit(base, [ask], settings, plan)
        if isinstance(done, Exception):
            raise done
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _typical(base: Base, data: DataSet, settings: TrainSettings, key: Key, rank: int) -> Ask:
    """One step on the examples of about median length."""
    order = np.argsort(np.asarray(data.lengths), kind="stable")
    size = min(settings.batch_size, len(order))
    first = (len(order) - size) // 2
    model = Model(
        lora={
            name: LowRank(
                torch.zeros(layer.d_out, min(rank, layer.d_in, layer.d_out)),
                key.fold(name).normal((min(rank, layer.d_in, layer.d_out), layer.d_in), 0.02),
            )
            for name, layer in base.layers.items()
        }
    )
    request = Fit(model, steps=1)
    return Ask("probe", request, "base", base.head, data.select(order[first : first + size]), key)


def _stack_size(base: Base, data: DataSet, settings: TrainSettings, device: str) -> int:
    """As many clients as keep b * L * d within what one step profits from: measured on a CPU, assumed on a GPU."""
    tokens = min(settings.batch_size, len(data)) * float(np.median(np.asarray(data.lengths)))
    width = min(layer.d_in for layer in base.layers.values())
    budget = _STACK_ELEMENTS["cuda" if device.startswith("cuda") else "cpu"]
    return int(min(_MOST_CLIENTS, max(1, budget // (tokens * width))))
