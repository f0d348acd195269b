"""Server step of one layer: the best rank-R approximation of the clients' average product, done two ways.

dense: average the m x n products, `torch.linalg.svd(full_matrices=False)`, keep R triples.
factored: `coterie.maths.lowrank.best_rank`, which takes the exact path at these sizes.

Both start from the same float32 factors, return float32 factors, and do their linear algebra in the same
dtype (--dtype) on one thread. The run fails if the two products differ by more than rounding.

    python benchmarks/server.py --json server.json
    python benchmarks/server.py --all --json server-all.json    every method's server half instead: see server_all.py
    python benchmarks/server.py --at-once 2 --layers 6          several layers at once instead: see server_layers.py
    python benchmarks/server.py --randomised                    what sampling loses instead: see server_randomised.py
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.maths.keys import Key
from coterie.maths.lowrank import best_rank

Pair = tuple[Tensor, Tensor]

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Relative; the results are float32, and float32 SVDs err by an ulp over the gap of the spectrum at R."""


@dataclass(frozen=True)
class Case:
    """One layer of size x size, K clients of rank r, approximated at rank R; the ratio is to reach `target`.

    Each of `blocks` is one dense run and `factored_runs` factored ones, so that both meet the same load.
    """

    size: int
    K: int
    r: int
    R: int
    target: int
    blocks: int
    factored_runs: int


@dataclass(frozen=True)
class Seconds:
    """Wall-clock seconds of some runs."""

    best: float
    median: float
    runs: int


@dataclass(frozen=True)
class Result:
    """What one case showed; `relative_difference` is ||dense - factored||_F / ||dense||_F of the products.

    Below 1e-8, the float32 factors of the two are the same bits up to sign.
    """

    case: Case
    dense: Seconds
    factored: Seconds
    ratio_of_best: float
    ratio_of_medians: float
    relative_difference: float


CASES = [
    Case(size=1024, K=10, r=8, R=8, target=100, blocks=5, factored_runs=20),
    Case(size=4096, K=6, r=8, R=8, target=1000, blocks=1, factored_runs=40),
]


def client_factors(case: Case) -> list[Pair]:
    """Clients that share a direction of travel and each have their own: B_i = B + E_i, A_i = A + F_i."""
    key = Key(0).fold("benchmark", case.size)
    B, A = key.fold("B").normal((case.size, case.r)), key.fold("A").normal((case.r, case.size))
    return [
        (
            B + key.fold("B", i).normal((case.size, case.r)),
            A + key.fold("A", i).normal((case.r, case.size)),
        )
        for i in range(case.K)
    ]


def dense_best_rank(factors: list[Pair], rank: int, dtype: torch.dtype) -> Pair:
    """Truncated SVD of the dense average, as float32 factors (m, R) and (R, n)."""
    B_cat = torch.cat([B.to(dtype) for B, _ in factors], dim=1)
    A_cat = torch.cat([A.to(dtype) for _, A in factors]) / len(factors)
    U, S, Vh = torch.linalg.svd(B_cat @ A_cat, full_matrices=False)
    return (U[:, :rank] * S[:rank]).float(), Vh[:rank].float()


def factored_best_rank(factors: list[Pair], rank: int, dtype: torch.dtype) -> Pair:
    """The same from `best_rank`."""
    best = best_rank(factors, [1 / len(factors)] * len(factors), rank, dtype=dtype)
    return best.B, best.A


def timed(run: Callable[[], Pair]) -> tuple[Pair, float]:
    """The result of one run and its seconds."""
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def summary(seconds: list[float]) -> Seconds:
    """Best, median and number."""
    return Seconds(min(seconds), statistics.median(seconds), len(seconds))


def measure(case: Case, dtype: torch.dtype) -> Result:
    """Run one case."""
    factors = client_factors(case)
    factored_best_rank(factors, case.R, dtype)  # the first call pays for loading LAPACK
    dense_seconds, factored_seconds = [], []
    for _ in range(case.blocks):
        for _ in range(case.factored_runs):
            (B, A), seconds = timed(lambda: factored_best_rank(factors, case.R, dtype))
            factored_seconds.append(seconds)
        (B_dense, A_dense), seconds = timed(lambda: dense_best_rank(factors, case.R, dtype))
        dense_seconds.append(seconds)
    product = B_dense.double() @ A_dense.double()
    difference = torch.linalg.norm(product - B.double() @ A.double()) / torch.linalg.norm(product)
    dense, factored = summary(dense_seconds), summary(factored_seconds)
    return Result(
        case=case,
        dense=dense,
        factored=factored,
        ratio_of_best=dense.best / factored.best,
        ratio_of_medians=dense.median / factored.median,
        relative_difference=difference.item(),
    )


def text(result: Result) -> str:
    """One case as lines of text."""
    case = result.case

    def line(name: str, seconds: Seconds) -> str:
        best, median = 1e3 * seconds.best, 1e3 * seconds.median
        return f"  {name:9} best {best:10.2f} ms   median {median:10.2f} ms   of {seconds.runs}"

    return "\n".join(
        [
            f"{case.size} x {case.size}, K={case.K}, r={case.r}, R={case.R}",
            line("dense", result.dense),
            line("factored", result.factored),
            f"  ratio     best {result.ratio_of_best:10.0f} x    median {result.ratio_of_medians:10.0f} x    "
            f"target {case.target} x",
            f"  relative difference of the products {result.relative_difference:.1e}",
        ]
    )


def every_method(methods: list[str] | None, layers: int, path: Path | None) -> int:
    """`--all`; 1 where SeFoRA is not twenty times as fast as dense FlexLoRA."""
    import server_all
    from standin import machine, versions

    from coterie.algorithms import METHODS

    rows, beside = server_all.run(methods or sorted(METHODS), layers)
    if path:
        told = {"benchmark": "server, all methods", "layers": layers, "clients": server_all.CLIENTS}
        told |= {"rank": server_all.RANK, "limit": server_all.LIMIT, "machine": machine(), "versions": versions()}
        told |= {"rows": [asdict(row) for row in rows], **beside}
        path.write_text(json.dumps(told, indent=2) + "\n")
    return int(beside.get("sefora_speedup", 20.0) < 20)


def layers_at_once(methods: list[str] | None, layers: int, workers: int, path: Path | None) -> int:
    """`--at-once`."""
    import server_layers

    return told("server, layers at once", server_layers.run(methods, layers, workers), path)


def randomised(path: Path | None) -> int:
    """`--randomised`."""
    import server_randomised

    return told("server, randomised", server_randomised.run(), path)


def told(benchmark: str, rows: Sequence[Any], path: Path | None) -> int:
    """Writes rows where they are wanted."""
    from standin import machine, versions

    if path:
        found = {"benchmark": benchmark, "machine": machine(), "versions": versions()}
        path.write_text(json.dumps(found | {"rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="the 1024 case only (the other takes minutes)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64", help="of both contenders")
    parser.add_argument("--all", action="store_true", help="the server half of every registered method")
    parser.add_argument("--randomised", action="store_true", help="the errors of the randomised best rank")
    parser.add_argument("--at-once", type=int, help="the server half with so many layers under way at a time")
    parser.add_argument("--methods", nargs="*", help="with --all and --at-once: these alone")
    parser.add_argument("--layers", type=int, default=48, help="with --all, --at-once: how many layers of 1024 x 1024")
    options = parser.parse_args()

    torch.set_num_threads(1)
    if options.all:
        return every_method(options.methods, options.layers, options.json)
    if options.randomised:
        return randomised(options.json)
    if options.at_once:
        return layers_at_once(options.methods, options.layers, options.at_once, options.json)
    dtype: torch.dtype = getattr(torch, options.dtype)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    print(f"one thread, linear algebra of both in {options.dtype}, {platform.machine()}, {versions}")
    results = []
    for case in CASES[:1] if options.quick else CASES:
        results.append(measure(case, dtype))
        print(text(results[-1]), flush=True)
    if options.json:
        report = {"benchmark": "server", "dtype": options.dtype, "threads": 1, "versions": versions}
        options.json.write_text(
            json.dumps({**report, "cases": [asdict(result) for result in results]}, indent=2) + "\n"
        )
    worst = max(result.relative_difference for result in results)
    if worst > TOLERANCE[dtype]:
        print(f"the two products differ by {worst:.1e}, more than {TOLERANCE[dtype]:.0e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
