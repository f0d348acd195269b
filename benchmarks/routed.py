"""The cost of routed experts: a training step with six of them against one of plain LoRA of the same rank.

    python benchmarks/routed.py --json routed.json

An encoder of MiniLM's shape with random weights, rank 4 on query and value, texts of 32 tokens, batches of 16 and 32,
AdamW, one thread, CPU seconds. `routed`: a common A, six experts of which one is trained, a router with bias.
`fedsee`: the same with the shared pair and the calibration of mean use, a client's whole step of FedSEE. Contenders
take turns. Then the server: a step of the extraction, a gradient for each of six tasks on 64 examples beside the two
products over the pool, with 10 and with 1,000 uploads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from standin import machine, versions
from transformers import BertConfig, BertForSequenceClassification

from coterie.algorithms.extraction import Pool, extracted
from coterie.data.text import TextSet
from coterie.maths.extraction import Descent
from coterie.maths.keys import root_key
from coterie.models.loading import Base, from_network
from coterie.protocol import Fit, LowRank, Model, Routed, UsageDivergence
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.executor import Executor

RANK, EXPERTS, LENGTH, STEPS, SCALE = 4, 6, 32, 4, 2.0
BATCHES, POOLS, PUBLIC = (16, 32), (10, 1000), 64
TRAIN = TrainSettings(optimizer="adamw", lr=1e-3, steps=STEPS)
KEY = root_key(5)

Dtype = Literal["float32", "bfloat16"]


def encoder() -> Base:
    """Six layers of width 384, as MiniLM has them."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=2000,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=64,
        num_labels=2,
    )
    network = BertForSequenceClassification(config).eval()
    return from_network(network, None, ["query", "value"], KEY.fold("head"), attention="eager")


def texts(count: int) -> TextSet:
    """So many random texts of one length."""
    ids = torch.from_numpy((KEY.fold("ids").bits(count * LENGTH) % 1900).astype("int32")) + 5
    labels = torch.from_numpy((KEY.fold("labels").bits(count) % 2).astype("int64"))
    return TextSet(ids, torch.arange(count + 1) * LENGTH, labels, torch.arange(count), 2)


def contenders(base: Base) -> dict[str, Fit]:
    """What a client trains, by name."""

    def drawn(part: str, name: str, *shape: int) -> torch.Tensor:
        return KEY.fold(part, name).normal(shape, 0.02)

    layers = base.layers.items()
    pair = {n: LowRank(drawn("B", n, s.d_out, RANK), drawn("A", n, RANK, s.d_in), SCALE) for n, s in layers}
    experts = {
        n: Routed(
            tuple(drawn(f"B{e}", n, s.d_out, RANK) for e in range(EXPERTS)),
            (drawn("A", n, RANK, s.d_in),),
            drawn("router", n, EXPERTS, s.d_in),
            SCALE,
            torch.zeros(EXPERTS),
            allowed=torch.ones(EXPERTS, dtype=torch.bool),
        )
        for n, s in layers
    }
    routed = Fit(Model(experts=experts), train=("experts.*.B.0", "experts.*.router", "experts.*.bias"))
    calibration = UsageDivergence(torch.full((EXPERTS,), 1 / EXPERTS), 1e-3)
    whole = Model(experts=experts, shared=pair)
    return {
        "lora": Fit(Model(lora=pair)),
        "routed": routed,
        "fedsee": replace(routed, initial=whole, train=(*routed.train, "shared.*"), penalties=(calibration,)),
    }


def steps(base: Base, dtype: Dtype, batch: int, repeats: int) -> dict[str, Any]:
    """CPU seconds of a step of each contender, in turns after a warm-up, and their ratios to plain LoRA."""
    executor = Executor({"base": base}, replace(TRAIN, batch_size=batch), Plan(dtype=dtype))
    data, seconds = texts(batch * STEPS), {name: list[float]() for name in contenders(base)}
    for repeat in range(repeats + 1):
        for name, fit in contenders(base).items():
            ask = Ask("client", fit, "base", base.head, data, KEY.fold(repeat))
            began = time.process_time()
            (done,) = executor.answer([ask])
            took = (time.process_time() - began) / STEPS
            assert isinstance(done, Done), done
            if repeat:
                seconds[name].append(took)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    ratios = {
        name: statistics.median(one / plain for one, plain in zip(found, seconds["lora"], strict=True))
        for name, found in seconds.items()
    }
    return {"dtype": dtype, "batch": batch, "seconds": median, "ratio": ratios, "all": seconds}


def extraction(base: Base, dtype: Dtype, pool: int, count: int) -> dict[str, float]:
    """CPU seconds of one step of the extraction over a pool, and the part of it that is not the model's passes."""
    executor = Executor({"base": base}, TRAIN, Plan(dtype=dtype))
    layers, data = base.layers.items(), texts(PUBLIC)
    A = {n: KEY.fold("A", n).normal((RANK, s.d_in), 0.02) for n, s in layers}
    blocks = [{n: KEY.fold("B", n, p).normal((s.d_out, RANK), 0.02) for n, s in layers} for p in range(min(pool, 10))]
    uploads = [(f"c{p}", blocks[p % 10]) for p in range(pool)]
    tasks = [f"public/{task}" for task in range(EXPERTS)]
    program = extracted(Pool(uploads, A, SCALE), tasks, {}, pool, Descent(steps=count + 1), PUBLIC)
    asked = next(program)
    passes, whole = 0.0, 0.0
    for number in range(count + 1):
        began = time.process_time()
        answers = executor.answer([Ask("server", one, "base", base.head, data, KEY.fold(number)) for one in asked])
        answered = time.process_time()
        found: list[Mapping[str, torch.Tensor]] = []
        for one in answers:
            assert isinstance(one, Done) and isinstance(one.answer, dict), one
            found.append(one.answer)
        try:
            asked = program.send(found)  # type: ignore[arg-type]
        except StopIteration:
            break  # the last step is not a whole one
        if number:  # the first is a warm-up
            passes += answered - began
            whole += time.process_time() - began
    return {"pool": pool, "step": whole / (count - 1), "own": (whole - passes) / (count - 1)}


def main() -> None:
    """Runs all, prints a line for each and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--extraction-steps", type=int, default=6)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, server = [], []
    for dtype in options.dtypes:
        base = encoder()
        for batch in BATCHES:
            rows.append(row := steps(base, dtype, batch, options.repeats))
            told = "  ".join(
                f"{name} {row['seconds'][name] * 1e3:.1f} ms ({row['ratio'][name]:.2f}x)" for name in row["ratio"]
            )
            print(f"{dtype:9s} batch {batch}: {told}")
        found = [extraction(base, dtype, pool, options.extraction_steps) for pool in POOLS]
        server.append({"dtype": dtype, "pools": found, "ratio": found[1]["step"] / found[0]["step"]})
        told = "  ".join(
            f"pool {one['pool']} {one['step'] * 1e3:.0f} ms, own {one['own'] * 1e3:.1f} ms" for one in found
        )
        print(f"{dtype:9s} extraction, a step: {told}: {server[-1]['ratio']:.3f}x")
    if options.json:
        figures = {"machine": machine(), "versions": versions(), "steps": rows, "extraction": server}
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
