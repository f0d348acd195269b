"""The server's half of a round of every registered method, beside the least that the machine could take for it.

One square layer size, some layers, forty clients of rank 16 (`python benchmarks/server.py --all`). Timed is `aggregate`
alone, from uploads as they arrived to the new state, in a main round that the engine played with training stood in for.

The bound is the larger of two times. Bytes: what was uploaded is read once and what is new in the state is written
once, at the rate of a stream. FLOPs: the formula of the method's family below, at the rate of a matrix product. Both
rates are measured in the same run on the same thread, the product in fp32 and in fp64, which gives two bounds; sums,
QR and SVD of the methods run in fp64. Letters: m x n the layer, N clients of rank r, c = N r, e the scalars of one
upload, s and k a sketch's columns and rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from standin import Reached, Round, begun, cards, made, watched
from torch import Tensor

from coterie.engines.driver import drive_one
from coterie.protocol import Layer
from coterie.protocol.messages import leaves

CLIENTS, RANK, SIZE = 40, 16, 1024
LIMIT = 3.0
"""How many times the bound a method may take."""

OPTIONS: dict[str, dict[str, Any]] = {"slora": {"sparse_rounds": 0}}
"""SLoRA's rounds of the second stage; its change of stages is a dense SVD of each layer, once in a run."""


@dataclass(frozen=True)
class Work:
    """What decides on the FLOPs of one layer."""

    m: int
    n: int
    N: int
    r: int
    e: float
    s: int
    k: int

    @property
    def c(self) -> int:
        """Columns of all factors side by side."""
        return self.N * self.r


@dataclass(frozen=True)
class Family:
    """What methods do alike at the server; FLOPs of one layer, told and counted."""

    name: str
    told: str
    flops: Callable[[Work], float]


def mean(w: Work) -> float:
    """A weighted sum of all uploads."""
    return 2 * w.N * w.e


def spectral(w: Work) -> float:
    """The leading r triples of the stacked factors' product, as LAPACK counts: without other singular vectors."""
    qr = sum(2 * size * w.c**2 - 2 / 3 * w.c**3 for size in (w.m, w.n))
    return qr + w.c**3 / 3 + 8 / 3 * w.c**3 + 8 * w.c**2 * w.r + 4 * (w.m + w.n) * w.c * w.r


def solved(w: Work) -> float:
    """QR of Y, Psi Q, and least squares with it."""
    return 4 * w.m * w.s**2 + 2 * w.k * w.m * w.s + 4 * w.k * w.s**2 + 2 * w.k * w.s * w.n + w.s**2 * w.n


def shrunk(w: Work) -> float:
    """`solved`; QR of Omega, projections of Z, what Omega saw, and the SVD of an s x n matrix."""
    return solved(w) + 4 * w.n * w.s**2 + 4 * w.k * w.n * w.s + 3 * w.s**2 * w.n + 6 * w.n * w.s**2


def gram(w: Work) -> float:
    """B_u^T B_v and A_u A_v^T of all pairs of clients, each once."""
    return (w.m + w.n) * w.c**2


NOTHING = Family("nothing", "0", lambda w: 0)
MEAN = Family("mean", "2 N e", mean)
STACK = Family("stack", "r n N: weights on one factor", lambda w: w.c * w.n)
RESIDUAL = Family("mean and residual", "2 N e + 2 c (m + n)", lambda w: mean(w) + 2 * w.c * (w.m + w.n))
BEST = Family(
    "best rank r",
    "QR 2 (m + n) c^2 - 4/3 c^3; core 1/3 c^3, its bidiagonal form 8/3 c^3; r vectors 8 c^2 r + 4 (m + n) c r",
    spectral,
)
ROWS = Family("moved rows", "3 N e", lambda w: 3 * w.N * w.e)
SKETCH = Family("unsketch", "2 N e + 4 m s^2 + 2 k m s + 4 k s^2 + 2 k s n + s^2 n", lambda w: mean(w) + solved(w))
SHRUNK = Family("shrunk sketch", "unsketch's + 13 n s^2 + 4 k n s", lambda w: mean(w) + shrunk(w))
CORRECTED = Family(
    "corrected mean",
    "2 N e + Gram (m + n) c^2 + 2 (m + n) c r",
    lambda w: mean(w) + gram(w) + 2 * (w.m + w.n) * w.c * w.r,
)
FAMILIES: dict[str, Family] = {
    "centralised": NOTHING,
    "centralised-per-task": NOTHING,
    "fed-plora": ROWS,
    "fedex-lora": RESIDUAL,
    "fedex-lora-truncated": Family(
        "residual, cut", "residual's + best rank's", lambda w: RESIDUAL.flops(w) + spectral(w)
    ),
    "fedpa-factors": BEST,
    "fedpa-lora": BEST,
    "fedpa-lora-direction": BEST,
    "fedpa-lora-gradient": BEST,
    "fedpa-lora-loss": BEST,
    "fedpa-overwritten": BEST,
    "fedsrd": Family("best rank r of dense pairs", "best rank's", spectral),
    "fedsrd-e": Family("one factor of the mean", "2 (m + n) c r + 4 m r^2", lambda w: 2 * (w.m + w.n) * w.c * w.r),
    "flexlora": BEST,
    "flexlora-adaptive": BEST,
    "flora": STACK,
    "flora-adaptive": STACK,
    "flora-na": Family(
        "coefficients", "Gram (m + n) c^2 + 20 sweeps of 8 c^2 + 2 N e", lambda w: gram(w) + 160 * w.c**2 + mean(w)
    ),
    "fslora": ROWS,
    "hetlora": Family("mean by norms", "2 N e + 2 N r^2 (m + n)", lambda w: mean(w) + 2 * w.c * w.r * (w.m + w.n)),
    "local-only": NOTHING,
    "lora-fair": CORRECTED,
    "lora-fair-closed": CORRECTED,
    "ravan": ROWS,
    "sefora": SKETCH,
    "sefora-ho": SKETCH,
    "sefora-plus": SHRUNK,
    "sketch-pa": SHRUNK,
}
"""By method; the mean where none is named."""


@dataclass(frozen=True)
class Rates:
    """What this machine does a second on one thread: bytes of a stream, FLOPs of a square product in fp32 and fp64."""

    stream: float
    gemm32: float
    gemm64: float


@dataclass(frozen=True)
class Row:
    """One method: seconds of a round's server half, bytes and FLOPs that it must do, and how many bounds that is."""

    method: str
    family: str
    formula: str
    seconds: float
    runs: int
    read: int
    written: int
    flops: float
    bound32: float
    bound64: float
    ratio32: float
    ratio64: float


def rates() -> Rates:
    """The best of some tries; the stream is the sum of 256 MiB."""
    flat = torch.ones(2**26)
    squares = {dtype: torch.full((1536, 1536), 0.5, dtype=dtype) for dtype in (torch.float32, torch.float64)}
    stream = flat.nbytes / min(timed(flat.sum) for _ in range(5))
    gemm = {dtype: 2 * 1536**3 / min(timed(lambda x=x: x @ x) for _ in range(5)) for dtype, x in squares.items()}
    return Rates(stream, gemm[torch.float32], gemm[torch.float64])


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one run, of this process alone: what else the machine does counts for neither side of a ratio."""
    start = time.process_time()
    run()
    return time.process_time() - start


def played(name: str, layers: int) -> tuple[Any, Any, Round | None]:
    """The method, the engine, and the first main round up to its uploads; none where no client takes part."""
    algorithm = made(name, OPTIONS)
    members = cards([RANK] * CLIENTS, {f"layer{i:02d}": Layer(SIZE, SIZE) for i in range(layers)})
    engine = watched(algorithm, members, rounds=2, strict=False)
    engine.stop_in = "main"
    try:
        list(engine.rounds(begun(engine)))
    except Reached:
        return algorithm, engine, engine.seen[-1]
    return algorithm, engine, None


def measure(name: str, layers: int, rate: Rates) -> Row | None:
    """The server half of one method's round; None where the server only trains."""
    algorithm, engine, one = played(name, layers)
    if one is None or algorithm.traits.pools_data:
        return None
    party = engine._server_party(one.number, {})
    result: list[Any] = []

    def run() -> None:
        result[:] = [drive_one(algorithm.aggregate(one.before, one.uploads, one.server), party, engine.executor)]

    seconds = [timed(run)]
    while len(seconds) < 5 and sum(seconds) < 10:
        seconds.append(timed(run))
    old = {tensor.data_ptr() for tensor in tensors(one.before)}
    read = sum(tensor.nbytes for entry in one.uploads for tensor in tensors(entry.payload))
    written = sum(tensor.nbytes for tensor in tensors(result[0]) if tensor.data_ptr() not in old)
    e = sum(t.numel() for entry in one.uploads for t in tensors(entry.payload)) / CLIENTS / layers
    family = FAMILIES.get(name, MEAN)
    s, k = algorithm.sizes(Layer(SIZE, SIZE), RANK) if family in (SKETCH, SHRUNK) else (0, 0)
    flops = layers * family.flops(Work(SIZE, SIZE, CLIENTS, RANK, e, s, k))
    moving = (read + written) / rate.stream
    bound32, bound64 = max(moving, flops / rate.gemm32), max(moving, flops / rate.gemm64)
    took = statistics.median(seconds)

    def ratio(bound: float) -> float:
        return took / bound if bound > 0 else 0.0

    return Row(
        name,
        family.name,
        family.told,
        took,
        len(seconds),
        read,
        written,
        flops,
        bound32,
        bound64,
        ratio(bound32),
        ratio(bound64),
    )


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a message."""
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]


def dense_flexlora(layers: int) -> float:
    """Seconds of FlexLoRA as it is written down: N products, their mean, and its SVD; one layer, times the layers."""
    key = torch.Generator().manual_seed(0)
    factors = [(torch.randn(SIZE, RANK, generator=key), torch.randn(RANK, SIZE, generator=key)) for _ in range(CLIENTS)]

    def run() -> None:
        mean = torch.zeros(SIZE, SIZE)
        for B, A in factors:
            mean += (B @ A) / CLIENTS
        torch.linalg.svd(mean, full_matrices=False)

    return layers * min(timed(run) for _ in range(2))


def text(row: Row) -> str:
    """One row as a line."""
    moved = (row.read + row.written) / 1e6
    return (
        f"{row.method:22} {row.family:26} {1e3 * row.seconds:9.1f} ms {moved:7.0f} MB {row.flops / 1e9:8.2f} GFLOP "
        f"{1e3 * row.bound32:8.1f} {1e3 * row.bound64:8.1f} ms {row.ratio32:6.1f}x {row.ratio64:6.1f}x"
        + ("" if row.ratio64 <= LIMIT else "  above")
    )


def run(names: Sequence[str], layers: int) -> tuple[Rates, list[Row], dict[str, float]]:
    """Prints a row for each method, and SeFoRA beside dense FlexLoRA."""
    rate = rates()
    print(
        f"{layers} layers of {SIZE} x {SIZE}, {CLIENTS} clients of rank {RANK}; stream {rate.stream / 1e9:.1f} GB/s, "
        f"GEMM {rate.gemm32 / 1e9:.0f} GFLOP/s in fp32, {rate.gemm64 / 1e9:.0f} in fp64"
    )
    print(f"{'':50} {'seconds':>11} {'moved':>10} {'must':>14} {'bound fp32, fp64':>20} {'ratio fp32, fp64':>16}")
    rows = []
    for name in names:
        row = measure(name, layers, rate)
        if row is None:
            print(f"{name:22} the server trains")
            continue
        rows.append(row)
        print(text(row), flush=True)
    dense = dense_flexlora(layers)
    beside = {"dense_flexlora": dense}
    print(f"dense FlexLoRA (N products, their mean, SVD in fp32), one layer times {layers}: {dense:.1f} s")
    for row in rows:
        if row.method == "sefora":
            beside["sefora_speedup"] = dense / row.seconds
            print(f"SeFoRA is {beside['sefora_speedup']:.0f} times as fast (20 are wanted)")
    return rate, rows, beside
