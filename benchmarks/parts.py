"""What a training step consists of, and what its products gain from weights that are laid out beforehand.

    python benchmarks/parts.py --json parts.json

MiniLM, 32 texts of 64 tokens in bfloat16, LoRA of rank 8 on query and value, one core: the step of `peak.py`, by kinds
of operators, as shares of its time; and how long it takes where frozen layers are left as they come, in turn. Then the
rates of the products of frozen weights, as they come (forward with the bias, backward without) and by oneDNN with
weights in its own layout: the best of several, in seconds of the thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peak import KEY, TARGETS, Shape, ask_of, product_rate, seconds_of, shape_of
from standin import machine, versions
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coterie.adapters.frozen import fuse, unfuse
from coterie.assets import fetch
from coterie.maths.products import by_frozen, packed
from coterie.models.loading import Base, load_base
from coterie.training.asks import Plan, TrainSettings
from coterie.training.executor import Executor

KINDS = {
    "products of weights and activations": ("_linear_pointwise", "addmm", "mm"),
    "products in attention and of adapters": ("bmm", "baddbmm", "baddbmm_"),
    "GELU and its derivative": ("gelu", "gelu_backward"),
    "softmax": ("_softmax", "_softmax_backward_data"),
    "sums": ("add", "add_"),
    "layer norms": ("native_layer_norm", "native_layer_norm_backward"),
    "copies": ("clone", "copy_", "_to_copy"),
    "factors": ("mul",),
}
REST = "all else"


class Timed(TorchDispatchMode):
    """Seconds of the thread by operator, of those that PyTorch calls inside.

    Not PyTorch's profiler: what it notes lies between a step's tensors, so the heap grows, and the new pages, which
    the system has to clear, count as the operators' time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spent: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.thread_time()
        found = func(*args, **(kwargs or {}))
        self.spent[func.overloadpacket.__name__] += time.thread_time() - began
        return found


def parts(base: Base, shape: Shape, steps: int) -> dict[str, float]:
    """Shares of the time of a Fit's steps by kind of operator; the time is that of steps which nobody watches."""
    executor = Executor({"base": base}, TrainSettings(batch_size=shape.b, steps=steps), Plan(dtype="bfloat16"))
    ask = ask_of(base, shape, steps)
    seconds_of(lambda: executor.answer([ask]))
    alone, watched = [], []
    for _ in range(5):
        alone.append(seconds_of(lambda: executor.answer([ask])))
        with Timed() as timed:
            executor.answer([ask])
        watched.append(timed.spent)
    whole = statistics.median(alone)
    shares = {
        kind: statistics.median(sum(spent[name] for name in names) for spent in watched) / whole
        for kind, names in KINDS.items()
    }
    return shares | {REST: 1 - sum(shares.values())}


def steps_both_ways(base: Base, shape: Shape, steps: int, repeats: int = 9) -> dict[str, float]:
    """Seconds of a step with frozen layers as they are and as they come, and the median ratio of two in turn."""
    executor = Executor({"base": base}, TrainSettings(batch_size=shape.b, steps=steps), Plan(dtype="bfloat16"))
    ask = ask_of(base, shape, steps)
    taken: dict[str, list[float]] = {"fused": [], "plain": []}
    for repeat in range(repeats + 1):
        for way, change in (("fused", fuse), ("plain", unfuse)):
            change(base.network)
            seconds = seconds_of(lambda: executor.answer([ask])) / steps
            if repeat:
                taken[way].append(seconds)
    fuse(base.network)
    ratio = statistics.median(plain / fused for fused, plain in zip(taken["fused"], taken["plain"], strict=True))
    return {way: statistics.median(seconds) for way, seconds in taken.items()} | {"ratio": ratio}


def rates(shape: Shape) -> dict[str, dict[str, float]]:
    """FLOPs a second of each frozen layer's products, forward and backward, as they are and packed."""
    rows, made = shape.b * shape.L, {}
    for name, inner, outer in (("square", shape.d, shape.d), ("up", shape.d, shape.f), ("down", shape.f, shape.d)):
        x, w, b = (torch.full(size, 0.5, dtype=torch.bfloat16) for size in ((rows, inner), (outer, inner), (outer,)))
        g = torch.full((rows, outer), 0.5, dtype=torch.bfloat16)
        turned = w.t().contiguous()
        forward, backward = packed(w), packed(turned)
        ways: dict[str, Callable[[], Tensor]] = {
            "forward": lambda x=x, w=w, b=b: torch.nn.functional.linear(x, w, b),
            "forward, packed": lambda x=x, w=w, b=b, copies=forward: by_frozen(x, w, b, copies),
            "backward": lambda g=g, w=w: g.mm(w),
            "backward, packed": lambda g=g, w=turned, copies=backward: by_frozen(g, w, None, copies),
        }
        flops = 2 * rows * inner * outer
        made[name] = {way: flops / min(seconds_of(run) for _ in range(12)) for way, run in ways.items()}
    return made


def main() -> None:
    """Measures, prints the shares and rates and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--model", help="a folder in place of MiniLM")
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = load_base(options.model or fetch("minilm"), targets=TARGETS, num_labels=2, head_key=KEY.fold("head"))
    shape = shape_of(base, 8, options.batch, options.length)
    peak, found, shares = product_rate(torch.bfloat16), rates(shape), parts(base, shape, 4)
    both = steps_both_ways(base, shape, 4)
    for kind, share in sorted(shares.items(), key=lambda item: -item[1]):
        print(f"{share:6.1%}  {kind}")
    print(
        f"a step {both['fused']:.3f} s, with layers as they come {both['plain']:.3f}: {both['ratio']:.3f} times as long"
    )
    print(f"rates in GFLOP/s; the best product has {peak / 1e9:.0f}")
    for name, ways in found.items():
        print(f"{name:7}" + "  ".join(f"{way} {rate / 1e9:.0f}" for way, rate in ways.items()))
    if options.json:
        content: dict[str, Any] = {"shares": shares, "step": both, "rates": found, "peak": peak}
        options.json.write_text(json.dumps(content | {"machine": machine(), "versions": versions()}, indent=2))


if __name__ == "__main__":
    main()
