"""What is left of the clients' mean product at equal upload bytes: SeFoRA, SeFoRA-Plus and Sketch-PA.

    python benchmarks/sketch.py --json sketch.json

One square layer, ten clients of rank r; the budget is a number of scalars a row, s + k, the same for the three. Errors
are ||What - W||_F / ||W||_F; `best` is that of the best rank-r product, which nothing of rank r goes below. Clients are
one common pair plus a spread of their own, with singular values of the factors that decay or are flat. Each draw has
new clients and new test matrices, the same for all three. Where k is s + 2 errors have a heavy tail, so medians stand
beside means, and `wins` is the share of draws in which a method errs less than SeFoRA does.
An error above 1 means that deploying nothing would have been nearer.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from coterie.maths.keys import Key
from coterie.maths.lowrank import best_rank
from coterie.maths.sketch import sketch, sketch_matrices, unsketch, unsketch_shrunk
from coterie.theory.sefora import sketch_sizes

SIZE, CLIENTS, R, DRAWS = 256, 10, 16, 30
SPREADS = {"similar": 0.1, "related": 0.3, "dissimilar": 1.0, "unrelated": None}
DECAYS = {"decaying": 0.8, "flat": 1.0}
BUDGETS = {"k = r + 2": 2 * R + 2, "k = 2 r": 3 * R, "3 R + 6 R": 9 * R}
METHODS = ("sefora", "sefora-plus", "sketch-pa")

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """One kind of clients at one budget; errors by method, `sizes` their columns and rows."""

    clients: str
    spectrum: str
    budget: int
    bytes_up: int
    best: float
    sizes: dict[str, tuple[int, int]]
    mean: dict[str, float]
    median: dict[str, float]
    wins: dict[str, float]
    lemma_2_best_r: int


def sizes_at(budget: int) -> dict[str, tuple[int, int]]:
    """s and k of each method with s + k = budget: SeFoRA's r columns; as many more as fit, two at most; a third."""
    more = max(0, min(2, (budget - 2 * R - 2) // 2))
    return {
        "sefora": (R, budget - R),
        "sefora-plus": (R + more, budget - R - more),
        "sketch-pa": (max(R, budget // 3), budget - max(R, budget // 3)),
    }


def client_factors(key: Key, spread: float | None, decay: float) -> list[Pair]:
    """Ten pairs (SIZE, R) and (R, SIZE); spread None: nothing in common."""
    share = 0.0 if spread is None else 1.0
    own = 1.0 if spread is None else spread
    strength = decay ** torch.arange(R, dtype=torch.float64)

    def drawn(*name: str | int) -> Pair:
        return (
            key.fold("B", *name).normal((SIZE, R)).double() * strength,
            key.fold("A", *name).normal((R, SIZE)).double(),
        )

    B, A = drawn("common")
    mine = [drawn("own", i) for i in range(CLIENTS)]
    return [(share * B + own * B_i, share * A + own * A_i) for B_i, A_i in mine]


def rebuilt(method: str, factors: list[Pair], s: int, k: int, key: Key) -> Tensor:
    """The product that comes back from the mean of the clients' sketches."""
    Omega, Psi = sketch_matrices(key, SIZE, SIZE, s, k)
    sketches = [sketch(B, A, Omega, Psi) for B, A in factors]
    Y, Z = (sum(one[part] for one in sketches) / len(sketches) for part in (0, 1))
    assert isinstance(Y, Tensor) and isinstance(Z, Tensor)
    B, A = unsketch(Y, Z, Psi) if method == "sefora" else unsketch_shrunk(Y, Z, Omega, Psi, R)
    return B @ A


def measure(clients: str, spectrum: str, budget: int) -> Row:
    """All draws of one row."""
    sizes = sizes_at(budget)
    errors: dict[str, list[float]] = {method: [] for method in METHODS}
    least, sigma = [], torch.zeros(SIZE, dtype=torch.float64)
    for draw in range(DRAWS):
        key = Key(7).fold("sketch benchmark", clients, spectrum, budget, draw)
        factors = client_factors(key, SPREADS[clients], DECAYS[spectrum])
        W = sum(B @ A for B, A in factors) / CLIENTS
        assert isinstance(W, Tensor)
        best = best_rank(factors, [1 / CLIENTS] * CLIENTS, R, method="exact")
        least.append(float(best.tail / W.norm()))
        sigma += torch.linalg.svdvals(W) / DRAWS
        for method, (s, k) in sizes.items():
            What = rebuilt(method, factors, s, k, key.fold("matrices"))
            errors[method].append(float((What - W).norm() / W.norm()))
    plain = errors["sefora"]
    return Row(
        clients=clients,
        spectrum=spectrum,
        budget=budget,
        bytes_up=budget * SIZE * 4,
        best=statistics.fmean(least),
        sizes=sizes,
        mean={method: statistics.fmean(found) for method, found in errors.items()},
        median={method: statistics.median(found) for method, found in errors.items()},
        wins={
            method: statistics.fmean(mine < other for mine, other in zip(found, plain, strict=True))
            for method, found in errors.items()
            if method != "sefora"
        },
        lemma_2_best_r=sketch_sizes(sigma, budget * SIZE * 4, SIZE, SIZE)[0].r,
    )


def main() -> None:
    """Prints a row for each kind of clients and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{SIZE} x {SIZE}, {CLIENTS} clients, r = R = {R}, {DRAWS} draws; error as mean / median (wins over SeFoRA)")
    rows = []
    for name, budget in BUDGETS.items():
        print(f"\n{budget} scalars a row, SeFoRA's {name}: " + str(sizes_at(budget)))
        for spectrum in DECAYS:
            for clients in SPREADS:
                row = measure(clients, spectrum, budget)
                rows.append(row)
                cells = [
                    f"{method} {row.mean[method]:.3f} / {row.median[method]:.3f}"
                    + (f" ({row.wins[method]:.2f})" if method in row.wins else "")
                    for method in METHODS
                ]
                print(f"{clients:>10} {spectrum:>8}  best {row.best:.3f}  " + "  ".join(cells))
    if options.json:
        told = {"torch": torch.__version__, "machine": platform.machine(), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
