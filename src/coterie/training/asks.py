"""What an engine hands to the trainer, and what it gets back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from coterie.data.sequences import DataSet
from coterie.maths.keys import Key
from coterie.protocol import Answer, Request

Head = dict[str, Tensor]
"""A classification head's parameters by their names in the network, for example `classifier.weight`."""


@dataclass(frozen=True)
class TrainSettings:
    """The experiment's local training; a Fit may override steps or epochs.

    dropout acts on the input of trained low-rank terms; clip is the largest gradient norm of one client over all
    it trains (None: no clipping); warmup steps rise linearly to lr, after which it stays or falls linearly to zero.
    The loss of a mini-batch is the mean over its labels: one for each text, or each token of the answers.

    To save memory: checkpointing keeps only what enters each of the network's layers and computes the rest again for
    the gradient, with the same result to the bit; accumulation computes a mini-batch of batch_size in so many parts,
    one after another, with the same result to rounding (dropout draws other masks).
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: float = 1e-3
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    batch_size: int = 16
    steps: int | None = 8
    epochs: int | None = None
    warmup_steps: int = 0
    schedule: Literal["constant", "linear"] = "constant"
    clip: float | None = 1.0
    dropout: float = 0.0
    buckets: bool = True
    checkpointing: bool = False
    accumulation: int = 1


@dataclass(frozen=True)
class Plan:
    """How a run is executed; within one plan results are bit-identical, so it is stored with the run and reused.

    clients_per_step: how many clients are trained at once (1: one after another).
    padding_rank: ranks are zero-padded to this (0: each stack to its own largest).
    workers: how many processes answer, each with so many threads (1: the run's own); no bit depends on it.
    lower_memory, lower_disk: MiB for activations below the lowest adapter (see `coterie.training.lower`), of all
    workers together and on disk; no bit depends on how many, but on whether there are any: with none they are computed
    in each pass, padded with the batch.
    """

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    attention: Literal["eager", "sdpa"] = "eager"
    threads: int = 1
    clients_per_step: int = 1
    padding_rank: int = 0
    device: str = "cpu"
    eval_batch_size: int = 64
    workers: int = 1
    lower_memory: int = 0
    lower_disk: int = 0


@dataclass(frozen=True)
class Ask:
    """One request of one party with all that is needed to answer it.

    `spec` is the party's base model; `head` its current head (None: the task has none); `key` the request's own
    random key (for Gradient(batch="first") it is the coming Fit's).
    """

    party: str
    request: Request
    spec: str
    head: Mapping[str, Tensor] | None
    data: DataSet | None
    key: Key
    source: DataSet | None = None


@dataclass(frozen=True)
class Done:
    """The answer, and the party's head afterwards."""

    answer: Answer
    head: Head | None
