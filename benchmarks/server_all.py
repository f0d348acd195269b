"""The server's half of a round of every registered method, beside the least that the machine could take for it.

One square layer size, some layers, forty clients of rank 16 (`python benchmarks/server.py --all`). Timed is `aggregate`
alone, from uploads as they arrived to the new state, in a main round that the engine played with training stood in for.

FedSLM's clients have the layers cut to 0.4 or 0.6 of their parameters, or whole; what it does once, after the last
round, is not timed. FedBiOT's adapter is in all layers, as in the outer blocks of a model, and FedProto's means are of
four classes and of features as wide as a layer. Where the server trains or predicts in a round, that is told instead.

The engine's check of what arrives (shapes, finiteness) comes before and is not counted.

The bound is the larger of two times. Bytes: what was uploaded is read once and what is new in the state is written
once, at the rate of a stream. FLOPs: the formula of the method's family below, at the rate of a matrix product. Rates
are measured between the runs of every method, in seconds of the thread as they are, so that both meet the same load;
the best of each counts. Products are measured in fp32 and in fp64, which gives two bounds; sums, QR and SVD of the
methods run in fp64. A method above three times the second bound is told with a reason (`REASONS`).
Letters: m x n the layer, N clients of rank r, c = N r, e the scalars of an upload, s and k a sketch's columns and rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from standin import Reached, Round, begun, cards, made, watched, with_bases
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


PASSES = "mean: gather, cast, add"
SKINNY = "narrow matrices"
SPREAD = "sparse uploads"
PLACED = "gather, weigh"
INDEXED = "rows by index"
CALLS = "many short means"
LAPACK = "LAPACK"
SWEEPS = "sweeps"
REASONS = {
    PASSES: "no call of torch reads fp32 and adds in fp64, so what came is gathered, cast and added in three passes, "
    "whose cost alone is the last ratio; one call for each tensor, in torch or numpy, took as long or longer",
    SKINNY: "products, QR and solves with 16 to 48 columns run at a fifth to a half of the rate of a square product",
    SPREAD: "eighty sparse tensors a layer are spread out one by one before dense products",
    PLACED: "what is new is as large as what came: it is put in place, and weighted in a pass of its own",
    CALLS: "means of features are short and few, and looking them up by client and class takes longer than adding "
    "them; of features sixteen times as wide they came at the rate of the last ratio",
    LAPACK: "QR and eigenvectors run at a third of the rate of a square product; QR of both stacks and an SVD took "
    "half as long again",
    SWEEPS: "each of forty half sweeps reads 10 MB of Gram matrices anew, which are not counted as bytes",
    INDEXED: "who trained which rows is looked up client by client, and fp64 rows are added by index",
}
"""Why a method may be above the limit; each was measured."""


@dataclass(frozen=True)
class Family:
    """What methods do alike at the server; FLOPs of one layer, told and counted; why one may be above the limit."""

    name: str
    told: str
    flops: Callable[[Work], float]
    reason: str = PASSES


def mean(w: Work) -> float:
    """A weighted sum of all uploads."""
    return 2 * w.N * w.e


def spectral(w: Work) -> float:
    """The leading r triples of the stacked factors' product, as LAPACK counts: without other singular vectors.

    What runs is one QR, two products and the eigenvectors of a Gram matrix, of about as many FLOPs.
    """
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
STACK = Family("stack", "r n N: weights on one factor", lambda w: w.c * w.n, PLACED)
RESIDUAL = Family(
    "mean and residual", "2 N e + 2 c (m + n)", lambda w: mean(w) + 2 * w.c * (w.m + w.n), f"{PASSES}; {PLACED}"
)
BEST = Family(
    "best rank r",
    "QR 2 (m + n) c^2 - 4/3 c^3; core 1/3 c^3, its bidiagonal form 8/3 c^3; r vectors 8 c^2 r + 4 (m + n) c r",
    spectral,
    LAPACK,
)
ROWS = Family("moved rows", "3 N e", lambda w: 3 * w.N * w.e, f"{PASSES}; {INDEXED}")
SKETCH = Family(
    "unsketch",
    "2 N e + 4 m s^2 + 2 k m s + 4 k s^2 + 2 k s n + s^2 n",
    lambda w: mean(w) + solved(w),
    f"{PASSES}; {SKINNY}",
)
SHRUNK = Family(
    "shrunk sketch", "unsketch's + 13 n s^2 + 4 k n s", lambda w: mean(w) + shrunk(w), f"{PASSES}; {SKINNY}"
)
CORRECTED = Family(
    "corrected mean",
    "2 N e + Gram (m + n) c^2 + 2 (m + n) c r",
    lambda w: mean(w) + gram(w) + 2 * (w.m + w.n) * w.c * w.r,
    SKINNY,
)
FAMILIES: dict[str, Family] = {
    "centralised": NOTHING,
    "centralised-per-task": NOTHING,
    "fed-plora": ROWS,
    "fedex-lora": RESIDUAL,
    "fedex-lora-truncated": Family(
        "residual, cut", "residual's + best rank's", lambda w: RESIDUAL.flops(w) + spectral(w), LAPACK
    ),
    "fedpa-factors": BEST,
    "fedpa-lora": BEST,
    "fedpa-lora-direction": BEST,
    "fedpa-lora-gradient": BEST,
    "fedpa-lora-loss": BEST,
    "fedpa-overwritten": BEST,
    "fedproto": Family("means by class", "2 N e", mean, f"{CALLS}; {PASSES}"),
    "fedsrd": Family("best rank r of dense pairs", "best rank's", spectral, LAPACK),
    "fedsrd-e": Family(
        "one factor of the mean",
        "2 (m + n) c r + 4 m r^2",
        lambda w: 2 * (w.m + w.n) * w.c * w.r + 4 * w.m * w.r**2,
        f"{SPREAD}; {SKINNY}",
    ),
    "flexlora": BEST,
    "flexlora-adaptive": BEST,
    "flora": STACK,
    "flora-adaptive": STACK,
    "flora-na": Family(
        "coefficients",
        "Gram (m + n) c^2 + 20 sweeps of 8 c^2 + 2 N e",
        lambda w: gram(w) + 160 * w.c**2 + mean(w),
        SWEEPS,
    ),
    "fslora": ROWS,
    "hetlora": Family(
        "mean by norms", "2 N e + 2 N r^2 (m + n)", lambda w: mean(w) + 2 * w.c * w.r * (w.m + w.n), SKINNY
    ),
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
    """What this machine does a second on one thread.

    stream: bytes of a sum over 256 MiB. gemm32, gemm64: FLOPs of a square product. averaged: bytes of fp32 tensors of a
    factor's size, spread over as much memory, that three calls of torch gather, cast to fp64 and add.
    """

    stream: float
    gemm32: float
    gemm64: float
    averaged: float


@dataclass(frozen=True)
class Seconds:
    """Of the thread, the least and the median; and of the clock on the wall, the least."""

    best: float
    median: float
    wall: float
    runs: int


@dataclass(frozen=True)
class Row:
    """One method: seconds of a round's server half, bytes and FLOPs that it must do, and how many bounds that is.

    averaged: how many bounds it takes to add what was uploaded in fp64, and do nothing else.
    """

    method: str
    family: str
    formula: str
    seconds: Seconds
    rates: Rates
    read: int
    written: int
    flops: float
    bound32: float
    bound64: float
    ratio32: float
    ratio64: float
    averaged: float
    reason: str


class Yardsticks:
    """What rates are measured on; kept, so that they can be measured between the runs of each method."""

    def __init__(self) -> None:
        self.flat = torch.ones(2**26)
        self.pool = [torch.ones(SIZE, RANK) for _ in range(2**26 // (SIZE * RANK))]
        self.squares = {dtype: torch.full((1024, 1024), 0.5, dtype=dtype) for dtype in (torch.float32, torch.float64)}
        self.block = torch.zeros(8, SIZE * RANK, dtype=torch.float64)
        self.total, self.weights = torch.zeros(SIZE * RANK).double(), torch.ones(8).double()

    def measured(self) -> Rates:
        """All rates, once."""
        gemm = {dtype: 2 * 1024**3 / timed(lambda x=x: x @ x)[0] for dtype, x in self.squares.items()}
        stream = self.flat.nbytes / timed(self.flat.sum)[0]
        return Rates(stream, gemm[torch.float32], gemm[torch.float64], self.flat.nbytes / timed(self.average)[0])

    def average(self) -> None:
        """Every tensor of the pool, eight at a time."""
        for top in range(0, len(self.pool), 8):
            self.block.copy_(torch.stack(self.pool[top : top + 8]).view(self.block.shape))
            self.total.addmv_(self.block.mT, self.weights)


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of one run: of this thread alone, since others of the machine count for neither side, and of the wall."""
    start, clock = time.thread_time(), time.perf_counter()
    run()
    return time.thread_time() - start, time.perf_counter() - clock


def interleaved(run: Callable[[], Any], yardsticks: Yardsticks) -> tuple[Seconds, Rates]:
    """Up to eight runs, each after rates were measured, so that both meet the same load; the best rates of all."""
    found: list[tuple[float, float]] = []
    rates: list[Rates] = []
    while len(found) < 2 or (len(found) < 8 and sum(cpu for cpu, _ in found) < 4):
        rates.append(yardsticks.measured())
        found.append(timed(run))
    cpu = [one for one, _ in found]
    best = {field.name: max(getattr(one, field.name) for one in rates) for field in fields(Rates)}
    return Seconds(min(cpu), statistics.median(cpu), min(wall for _, wall in found), len(found)), Rates(**best)


def played(name: str, layers: int) -> tuple[Any, Any, Round | None]:
    """The method, the engine, and the first main round up to its uploads; none where no client takes part."""
    algorithm = made(name, OPTIONS)
    members = cards([RANK] * CLIENTS, {f"layer{i:02d}": Layer(SIZE, SIZE) for i in range(layers)})
    engine = watched(algorithm, with_bases(algorithm, members), rounds=2, strict=False)
    engine.stop_in = "main"
    try:
        list(engine.rounds(begun(engine)))
    except Reached:
        return algorithm, engine, engine.seen[-1]
    return algorithm, engine, None


def measure(name: str, layers: int, yardsticks: Yardsticks) -> Row | None:
    """The server half of one method's round; None where it trains or asks for gradients, which is stood in for."""
    algorithm, engine, one = played(name, layers)
    if one is None or algorithm.traits.pools_data or asks(algorithm.aggregate(one.before, one.uploads, one.server)):
        return None
    party = engine._server_party(one.number, {})
    result: list[Any] = []

    def run() -> None:
        result[:] = [drive_one(algorithm.aggregate(one.before, one.uploads, one.server), party, engine.executor)]

    seconds, rate = interleaved(run, yardsticks)
    old = {tensor.data_ptr() for tensor in tensors(one.before)}
    read = sum(tensor.nbytes for entry in one.uploads for tensor in tensors(entry.payload))
    written = sum(tensor.nbytes for tensor in tensors(result[0]) if tensor.data_ptr() not in old)
    e = sum(t.numel() for entry in one.uploads for t in tensors(entry.payload)) / CLIENTS / layers
    family = FAMILIES.get(name, MEAN)
    s, k = algorithm.sizes(Layer(SIZE, SIZE), RANK) if family in (SKETCH, SHRUNK) else (0, 0)
    flops = layers * family.flops(Work(SIZE, SIZE, CLIENTS, RANK, e, s, k))
    moving = (read + written) / rate.stream
    bound32, bound64 = max(moving, flops / rate.gemm32), max(moving, flops / rate.gemm64)

    def ratio(took: float, bound: float) -> float:
        return took / bound if bound > 0 else 0.0

    above = ratio(seconds.best, bound64) > LIMIT
    return Row(
        method=name,
        family=family.name,
        formula=family.told,
        seconds=seconds,
        rates=rate,
        read=read,
        written=written,
        flops=flops,
        bound32=bound32,
        bound64=bound64,
        ratio32=ratio(seconds.best, bound32),
        ratio64=ratio(seconds.best, bound64),
        averaged=ratio(read / rate.averaged, bound64),
        reason=family.reason if above else "",
    )


def asks(program: Any) -> bool:
    """Whether an aggregation has anything trained, predicted or weighed, and does not only compute."""
    if not isinstance(program, Generator):
        return False
    try:
        next(program)
    except StopIteration:
        return False
    program.close()
    return True


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

    return layers * min(timed(run)[0] for _ in range(3))


def text(row: Row) -> str:
    """One row as a line."""
    moved = (row.read + row.written) / 1e6
    took = f"{1e3 * row.seconds.best:8.1f} {1e3 * row.seconds.wall:8.1f} ms"
    must = f"{moved:5.0f} MB {row.flops / 1e9:7.2f} GFLOP {1e3 * row.bound32:7.1f} {1e3 * row.bound64:7.1f} ms"
    ratios = f"{row.ratio32:5.1f} {row.ratio64:5.1f} {row.averaged:5.1f}"
    return f"{row.method:22} {row.family:26} {took} {must} {ratios}  {row.reason}".rstrip()


def run(names: Sequence[str], layers: int) -> tuple[list[Row], dict[str, float]]:
    """Prints a row for each method, and SeFoRA beside dense FlexLoRA."""
    yardsticks = Yardsticks()
    yardsticks.measured()
    print(f"{layers} layers of {SIZE} x {SIZE}, {CLIENTS} clients of rank {RANK}")
    print(
        "Seconds of the thread and of the clock; what must be moved, and computed; bounds with products in fp32 and in"
    )
    print("fp64; the thread's seconds as multiples of both; as a multiple of the second, those of a mean of what was")
    print("uploaded; why a method is above the limit")
    rows = []
    for name in names:
        row = measure(name, layers, yardsticks)
        if row is None:
            print(f"{name:22} the server trains")
            continue
        rows.append(row)
        print(text(row), flush=True)
    best = {field.name: max(getattr(row.rates, field.name) for row in rows) for field in fields(Rates)}
    print(
        f"stream {best['stream'] / 1e9:.1f} GB/s, means {best['averaged'] / 1e9:.1f} GB/s, "
        f"GEMM {best['gemm32'] / 1e9:.0f} GFLOP/s in fp32, {best['gemm64'] / 1e9:.0f} in fp64, the best of all runs"
    )
    dense = dense_flexlora(layers)
    beside = {"dense_flexlora": dense}
    for name in {part: None for row in rows for part in row.reason.split("; ") if part in REASONS}:
        print(f"{name}: {REASONS[name]}")
    print(f"dense FlexLoRA (N products, their mean, SVD in fp32), one layer times {layers}: {dense:.1f} s")
    for row in rows:
        if row.method == "sefora":
            beside["sefora_speedup"] = dense / row.seconds.best
            print(f"SeFoRA is {beside['sefora_speedup']:.0f} times as fast (20 are wanted)")
    return rows, beside
