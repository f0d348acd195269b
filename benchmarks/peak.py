"""How near a training step comes to the best that this processor does: useful FLOPs over a bf16 product's rate.

    python benchmarks/peak.py --json peak.json

MiniLM, 32 texts of 64 tokens, LoRA of rank 8 on query and value, one core. Counted is what the network's definition
and the chain rule ask for and no more: in the last block what the first token's state, which alone the head reads,
depends on; in the backward pass no gradient of a frozen weight, and none of what lies below the lowest adapter. A test
holds the formula against the products that PyTorch executes. What is not a product (softmax, GELU, norms, the
optimiser) counts as nothing, and its time does count. The peak is the best rate of products of several good shapes in
the same process, measured between the steps. Seconds are of the thread, so that company on its core does not count;
company that shares its cache and memory does, so of several tries that counts whose steps differ least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from standin import machine, versions

from coterie.assets import fetch
from coterie.data.text import TextSet
from coterie.maths.keys import root_key
from coterie.models.loading import Base, load_base
from coterie.protocol import Fit, LowRank, Model
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.executor import Executor

WANTED = 0.65
TARGETS = ("query", "value")
GOOD = ((2048, 384, 1536), (2048, 1536, 384), (1024, 1024, 1024), (2048, 2048, 2048))
"""(m, k, n) of the products whose best rate is the peak: those of the model, and square ones."""
KEY = root_key(7)


@dataclass(frozen=True)
class Shape:
    """An encoder with LoRA on query and value of all its layers, and a batch: b texts of L tokens."""

    layers: int
    d: int
    f: int
    classes: int
    r: int
    b: int
    L: int


def useful(s: Shape) -> float:
    """FLOPs of one training step, forward and backward."""
    tokens = s.b * s.L
    blocks = [block(s, asking=tokens, trained_below=i > 0) for i in range(s.layers - 1)]
    pooler, classifier = 2 * s.b * s.d * s.d, 2 * s.b * s.d * s.classes
    return sum(blocks) + block(s, asking=s.b, trained_below=s.layers > 1) + 2 * pooler + 3 * classifier


def block(s: Shape, asking: int, trained_below: bool) -> float:
    """FLOPs of one block in which so many positions ask, and all are asked: in the last, the texts' first tokens."""
    square, known = 2 * asking * s.d * s.d, 2 * s.b * s.L * s.d * s.d
    wide, scores = 2 * asking * s.d * s.f, 2 * asking * s.L * s.d
    narrow = 2 * (asking + s.b * s.L) * s.d * s.r
    forward = 2 * square + 2 * known + 2 * wide + 2 * scores + 2 * narrow
    # Both products of attention by both of their factors; of each adapter: by B, by xA^T and by A.
    above = 2 * wide + square + 3 * scores + 3 * narrow
    # Only where something is trained below: key's side of the scores, what enters query, key, value and the adapters.
    through = scores + square + 2 * known + narrow
    return forward + above + (through if trained_below else 0)


def shape_of(base: Base, r: int, b: int, L: int) -> Shape:
    """That of a BERT with a classification head."""
    config = base.network.config
    return Shape(config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_labels, r, b, L)


def ask_of(base: Base, shape: Shape, steps: int) -> Ask:
    """A Fit on so many batches of random texts of one length."""
    count = shape.b * steps
    drawn = (KEY.fold("ids").bits(count * shape.L) % (base.network.config.vocab_size - 5)).astype("int32")
    rows = torch.arange(count)
    data = TextSet(torch.from_numpy(drawn) + 5, torch.arange(count + 1) * shape.L, rows % 2, rows, shape.classes)
    pairs = {
        name: LowRank(torch.zeros(layer.d_out, shape.r), KEY.fold(name).normal((shape.r, layer.d_in), 0.02))
        for name, layer in base.layers.items()
    }
    return Ask("client", Fit(Model(lora=pairs)), "base", base.head, data, KEY.fold("fit"))


def product_rate(dtype: torch.dtype, device: str = "cpu") -> float:
    """The best FLOPs a second of the good shapes, each a few times."""
    return max(_rate(shape, dtype, device) for shape in GOOD)


def _rate(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> float:
    m, k, n = shape
    x, w = torch.full((m, k), 0.5, dtype=dtype, device=device), torch.full((n, k), 0.5, dtype=dtype, device=device)
    torch.nn.functional.linear(x, w)
    return 2 * m * k * n / min(seconds_of(lambda: torch.nn.functional.linear(x, w)) for _ in range(5))


def seconds_of(run: Any) -> float:
    began = time.thread_time()
    run()
    return time.thread_time() - began


def measure(base: Base, shape: Shape, dtype: str, steps: int, repeats: int, attention: str = "eager") -> dict[str, Any]:
    """Steps and products in turn, after a warm-up."""
    settings = TrainSettings(batch_size=shape.b, steps=steps)
    executor = Executor({"base": base}, settings, Plan(dtype, attention, padding_rank=shape.r))  # type: ignore[arg-type]
    ask = ask_of(base, shape, steps)
    seconds, rates = [], []
    for repeat in range(repeats + 1):
        rates.append(product_rate(getattr(torch, dtype)))
        began = time.thread_time()
        (done,) = executor.answer([ask])
        taken = (time.thread_time() - began) / steps
        if not isinstance(done, Done):
            raise done
        if repeat:
            seconds.append(taken)
    flops, peak = useful(shape), max(rates)
    return {
        "shape": asdict(shape),
        "flops": flops,
        "peak": peak,
        "step": statistics.median(seconds),
        "best_step": min(seconds),
        "share": flops / statistics.median(seconds) / peak,
        "best_share": flops / min(seconds) / peak,
        "seconds": seconds,
        "rates": rates,
    }


def unsteadiness(seconds: list[float]) -> float:
    """How far the middle half of them spreads, as a share of their median."""
    lower, middle, upper = statistics.quantiles(seconds, n=4)
    return (upper - lower) / middle


def steadiest(tries: list[dict[str, Any]]) -> dict[str, Any]:
    """The try whose steps differ least, with the share and the unsteadiness of all."""
    told = [{"share": one["share"], "unsteadiness": unsteadiness(one["seconds"])} for one in tries]
    chosen = min(range(len(tries)), key=lambda number: told[number]["unsteadiness"])
    return tries[chosen] | {"tries": told}


def main() -> None:
    """Measures, prints one line and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="of one Fit")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tries", type=int, default=5, help="that counts whose steps differ least")
    parser.add_argument("--attention", default="eager", choices=["eager", "sdpa"])
    parser.add_argument("--model", help="a folder in place of MiniLM")
    options = parser.parse_args()
    torch.set_num_threads(1)
    place = options.model or fetch("minilm")
    base = load_base(place, targets=TARGETS, num_labels=2, head_key=KEY.fold("head"))
    shape = shape_of(base, options.rank, options.batch, options.length)
    tries = [
        measure(base, shape, "bfloat16", options.steps, options.repeats, options.attention)
        for _ in range(options.tries)
    ]
    found = steadiest(tries)
    print(
        f"a step of {shape.b} x {shape.L} tokens: {found['flops'] / 1e9:.1f} GFLOP in {found['step']:.3f} s "
        f"(best {found['best_step']:.3f}), {found['share']:.1%} of the peak of {found['peak'] / 1e9:.0f} GFLOP/s "
        f"(best {found['best_share']:.1%}; {WANTED:.0%} is wanted); all tries: "
        + ", ".join(f"{one['share']:.1%}" for one in found["tries"])
    )
    if options.json:
        options.json.write_text(json.dumps(found | {"machine": machine(), "versions": versions()}, indent=2))


if __name__ == "__main__":
    main()
